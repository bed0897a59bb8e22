"""A small process that cleans up after a dead driver: its run in MLflow, and the processes and temporary folders of its
own Ray. Ray's core ends the driver without a message when its raylet or GCS ends.

That process runs this file as a script. It sleeps until the driver has died, and imports only the standard library
until then. It receives facts on its standard input, since MLflow's address may contain a password."""

import contextlib
import json
import os
import select
import site
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

LOOK_S = 0.5
"""Seconds between checks of the driver on systems without file descriptors for processes."""
END_S = 5.0
"""Seconds that the guard has to exit after the driver has finished normally."""

_guards: list[subprocess.Popen[str]] = []
_ray: dict[str, Any] = {}
"""Facts about this process's own Ray, see `note_ray`."""


@contextlib.contextmanager
def guarding(**facts: Any) -> Iterator[None]:
    """Guard a command that has a run in MLflow, during the context. An exception counts as a normal end, since the
    caller marks the run.

    facts: see `left_open.LeftOpen`."""
    try:
        guard = subprocess.Popen(
            # -P: the names of modules next to this file must not replace those of Python; -S: half of Python's start
            [sys.executable, "-P", "-S", __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C and a closed terminal are for the driver to answer
        )
    except OSError:  # no process to be had: the run itself may still succeed
        yield
        return
    own = os.getpid()
    _guards.append(guard)
    _send(guard, {"path": sys.path, "ray": _ray, **facts})
    try:
        yield
    finally:
        if os.getpid() == own:
            _guards.remove(guard)
            _send(guard, {"is_done": True})
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                guard.communicate(timeout=END_S)


def note(**facts: Any) -> None:
    """Send more facts to the guards of this process."""
    for guard in _guards:
        _send(guard, facts)


def note_ray(**facts: Any) -> None:
    """Replace the facts about this process's own Ray; no facts mean that it has ended.

    folder: of its template's socket, which is in the environment of all its processes. logs: folder of their logs.
    processes: process ids of raylet and GCS, by name."""
    global _ray
    _ray = facts
    note(ray=facts)


def _send(guard: subprocess.Popen[str], facts: dict[str, Any]) -> None:
    assert guard.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # it was killed
        guard.stdin.write(json.dumps(facts) + "\n")
        guard.stdin.flush()


def main(driver: int) -> None:
    """Wait until the driver ends, and clean up after it."""
    facts: dict[str, Any] = {}
    ended, content = "", b""
    watched: dict[int, str] = {0: "input"}
    with contextlib.suppress(OSError, AttributeError):  # the system or its kernel has none
        watched[os.pidfd_open(driver)] = "driver"
    while True:
        ready = select.select(list(watched), [], [], LOOK_S if len(watched) == 1 else None)[0]
        if 0 in ready:
            chunk = os.read(0, 65536)
            if not chunk:
                break
            *lines, content = (content + chunk).split(b"\n")
            for line in lines:
                facts.update(json.loads(line))
            if facts.get("is_done"):
                return
            _watch(watched, processes := facts["ray"].get("processes", {}))
            ended = ended if processes else ""
        elif os.getppid() != driver:
            break
        else:
            if _is_ending(driver):
                break
            for file in ready:
                ended = ended or watched[file]
                del watched[file]
                os.close(file)
    site.main()
    sys.path += [place for place in facts.pop("path") if place not in sys.path]
    from scaleray.launch.cluster.left_open import LeftOpen

    LeftOpen(**facts).close(ended)


def _is_ending(process: int) -> bool:
    """Whether a process's main thread has ended. Ray's processes are killed then, before its other threads end."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return os.getppid() != process


def _watch(watched: dict[int, str], processes: dict[str, int]) -> None:
    """Replace the Ray processes in `watched` by these: file descriptors by name."""
    for file in [file for file, name in watched.items() if name not in ("input", "driver")]:
        del watched[file]
        os.close(file)
    for name, process in processes.items():
        with contextlib.suppress(OSError, AttributeError):  # ended already, or as above
            watched[os.pidfd_open(process)] = name


if __name__ == "__main__":
    main(int(sys.argv[1]))
