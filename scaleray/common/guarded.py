"""Commands that end, with every process they start, when the process that started them ends, for any reason.

A server that starts processes of its own, as `mlflow server` and Ray do, leaves them behind when it is killed, and so
does a program that is ended by SIGTERM, a closed terminal or SIGKILL. `guarded` puts a small process in between: this
file, run as a script. It adopts the processes that its child leaves behind (PR_SET_CHILD_SUBREAPER; on Linux, elsewhere
only what is still below it is found) and ends all of them on a signal, when the child ends, or when its parent is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

GRACE_S = 5.0  # seconds between asking to end and SIGKILL
LOOK_S = 0.5  # seconds between two looks at whether the parent is still there: no signal tells of that everywhere
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GUARD_VARIABLE = "GUARDED_BY"
NOBODY = 0
"""In place of a parent whose end is waited for."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def guarded(command: Sequence[str], *, outlives: bool = False) -> list[str]:
    """The command under a guard, for subprocess. SIGTERM, SIGINT and SIGHUP to it end all processes of the command.

    Its exit code is that of the command. Streams, environment and folder are passed on. outlives: it continues when
    this process ends, until it gets a signal.
    """
    # -P: the names of modules beside this file must not stand for those of Python
    return [sys.executable, "-P", __file__, str(NOBODY if outlives else os.getpid()), *command]


def is_guarded() -> bool:
    """Whether this process is the command of a guard. A tool with many processes starts itself again under one."""
    return os.environ.get(GUARD_VARIABLE) == str(os.getppid())


@contextlib.contextmanager
def ending_like_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP (a closed terminal), so that what is open is closed.

    Main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """Let this process of `multiprocessing` end when its parent is gone, whatever it is doing then."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=watch, name="scaleray-parent", daemon=True).start()


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main(parent: int, command: Sequence[str]) -> int:
    """Run the command below this process until it, or a signal, or the end of `parent` ends it; returns its exit code.
    parent: `NOBODY` if the command outlives it.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    told: list[int] = []
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable)  # `select` returns at once
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for number in ENDING:
        signal.signal(number, lambda number, frame: told.append(number))
    try:
        # this process has one thread; its own death by SIGKILL takes the child along
        child = subprocess.Popen(
            command,
            env={**os.environ, GUARD_VARIABLE: str(os.getpid())},
            preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    except OSError as exc:
        print(f"{command[0]}: {exc.strerror}", file=sys.stderr)
        return 127
    code = None
    while code is None and not told and parent in (NOBODY, os.getppid()):
        if select.select([readable], [], [], LOOK_S)[0]:
            os.read(readable, 4096)
        code = _reap().get(child.pid)
    _end_all()
    return 128 + told[0] if told else code if code is not None else 128 + signal.SIGHUP


def _reap() -> dict[int, int]:
    """Exit codes of the processes below this one that have ended, orphans among them, by process id."""
    codes = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return codes


def _end_all() -> None:
    """Ask all processes below this one to end, and make them after `GRACE_S`; what they start meanwhile too."""
    import psutil  # costs a few MiB, which a guard needs only now

    is_asked = False
    while family := psutil.Process().children(recursive=True):
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if is_asked:
                    member.kill()
                else:
                    member.terminate()
        psutil.wait_procs(family, timeout=GRACE_S)
        is_asked = True


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    exit_code = main(int(sys.argv[1]), sys.argv[2:])
    if exit_code < 0:  # the exit code as a shell would see it had there been no guard
        with contextlib.suppress(OSError):  # SIGKILL has no handler to take away
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    sys.exit(exit_code)
