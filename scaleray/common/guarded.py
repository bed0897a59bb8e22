"""Commands that end, together with every process they start, when the process that started them ends for any reason.

A server that starts its own processes, such as `mlflow server` or Ray, leaves them behind when it is killed, as does a
program ended by SIGTERM, SIGKILL or a closed terminal. `guarded` puts a small process in between: this file, run as a
script. It adopts the processes that its child leaves behind (PR_SET_CHILD_SUBREAPER on Linux; elsewhere it finds only
its remaining descendants), and ends all of them on a signal, when the child ends, or when its parent is gone.
"""

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

GRACE_S = 5.0  # seconds from the request to end until SIGKILL
LOOK_S = 0.5  # seconds between two checks of whether the parent still exists: not all systems signal its end
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GUARD_VARIABLE = "GUARDED_BY"
NOBODY = 0
"""Value instead of a parent whose end is irrelevant."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def guarded(command: Sequence[str], *, outlives: bool = False) -> list[str]:
    """Wrap a command for subprocess in a guard. SIGTERM, SIGINT and SIGHUP to the guard end all processes of the
    command.

    The guard has the command's exit code, and inherits streams, environment and folder. outlives: it continues when
    this process ends, until it gets a signal.
    """
    # -P: modules next to this file must not shadow those of Python
    return [sys.executable, "-P", __file__, str(NOBODY if outlives else os.getpid()), *command]


@contextlib.contextmanager
def ending_like_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP (a closed terminal), so that open resources are closed.

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
    """Make this `multiprocessing` process end when its parent is gone, whatever it is doing."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=watch, name="scaleray-parent", daemon=True).start()


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main(parent: int, command: Sequence[str]) -> int:
    """Run the command as a child of this process until it ends, or until a signal or the end of `parent` ends it;
    return its exit code. parent: `NOBODY` if the command outlives its parent.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    signals: list[int] = []
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable)  # makes `select` return immediately
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for number in ENDING:
        signal.signal(number, lambda number, frame: signals.append(number))
    try:
        # this process has one thread; if SIGKILL ends it, the child ends too
        child = subprocess.Popen(
            command,
            env={**os.environ, GUARD_VARIABLE: str(os.getpid())},
            preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    except OSError as exc:
        print(f"{command[0]}: {exc.strerror}", file=sys.stderr)
        return 127
    code = None
    while code is None and not signals and parent in (NOBODY, os.getppid()):
        if select.select([readable], [], [], LOOK_S)[0]:
            os.read(readable, 4096)
        code = _reap().get(child.pid)
    _end_all()
    return 128 + signals[0] if signals else code if code is not None else 128 + signal.SIGHUP


def _reap() -> dict[int, int]:
    """Exit codes, by process id, of ended descendants of this process, including orphans."""
    codes = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return codes


def _end_all() -> None:
    """Ask all descendants of this process to end, and kill them after `GRACE_S`, including those started meanwhile."""
    import psutil  # takes a few MiB, which a guard needs only now

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
    if exit_code < 0:  # give the exit code that a shell would see without a guard
        with contextlib.suppress(OSError):  # SIGKILL has no handler to remove
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    sys.exit(exit_code)
