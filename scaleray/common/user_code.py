"""Call the user's code, with errors that show the user's lines, and find its modules."""

import contextlib
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from scaleray.errors import ScaleRayError, WorkloadError

# folders of this package and of Python's own modules, resolved once: `user_modules` checks every imported module
_HOMES = tuple(
    f"{home}{os.sep}" for home in (Path(__file__).resolve().parents[1], Path(traceback.__file__).resolve().parent)
)


def call_user_code(call: Any, *, what: str, doing: str) -> Any:
    """Run the user's code; exceptions become a WorkloadError that shows only the user's part of the traceback."""
    try:
        return call()
    except ScaleRayError:
        raise
    except BaseException as exc:  # importing a script without a main guard may end the process
        if is_from_outside(exc):
            raise KeyboardInterrupt from exc
        raise WorkloadError.problem(what, f"failed while {doing}", user_traceback(exc)) from exc


@contextlib.contextmanager
def no_exit(what: str) -> Iterator[None]:
    """Context for user code that must not end the process: sys.exit() and everything else that is not an Exception
    become a WorkloadError. Exceptions, Ctrl-C and scaleray's own signals pass through.

    Otherwise sys.exit() could end a run with exit code 0 although nothing was trained, or end a Ray task's process.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as exc:
        if is_from_outside(exc):
            raise KeyboardInterrupt from exc
        is_closed = isinstance(exc, GeneratorExit) and not user_frames(traceback.extract_tb(exc.__traceback__))
        if is_closed or type(exc).__module__.startswith("scaleray."):
            raise
        raise exit_error(exc, what=what) from exc


def exit_error(exc: BaseException, *, what: str) -> WorkloadError:
    """Return the error for a sys.exit() in user code, or for another exception that ends a process."""
    allowed = "only scaleray ends its processes: return, or raise an exception"
    found = f"called sys.exit({exc.code!r})" if isinstance(exc, SystemExit) else f"raised {type(exc).__name__}"
    return WorkloadError.problem(what, f"{found}: {allowed}", user_traceback(exc))


def is_from_outside(exc: BaseException) -> bool:
    """Whether an exception was raised in user code by a signal: Ctrl-C, or SIGTERM through a handler, such as Ray's."""
    if isinstance(exc, KeyboardInterrupt):
        return True
    frames = [frame.f_code for frame, _ in traceback.walk_tb(exc.__traceback__)]
    # a handler is called with the signal's number and the frame that it interrupts
    handlers = (signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    codes = [getattr(inspect.unwrap(handler), "__code__", None) for handler in handlers if callable(handler)]
    return isinstance(exc, SystemExit) and any(code in frames for code in codes if code is not None)


def user_traceback(exc: BaseException) -> str:
    """Traceback of `exc` without the frames of scaleray, the import system and installed libraries.

    Keeps the last frame if none is the user's, so that there is always a location.
    """
    frames = traceback.extract_tb(exc.__traceback__)
    mine = user_frames(frames) or frames[-1:]
    if isinstance(exc, SyntaxError) and exc.filename:
        mine = []
    lines = ["".join(traceback.format_list(mine)), "".join(_shown_alone(exc))]
    return "\n  ".join("".join(lines).rstrip().splitlines())


def _shown_alone(exc: BaseException) -> list[str]:
    """The exception as text without its traceback, even if its own `__str__` fails."""
    try:
        return traceback.format_exception_only(exc)
    except Exception as failed:
        return [f"{type(exc).__name__}, whose __str__ failed: {type(failed).__name__}\n"]


def user_frames(frames: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Frames of a stack that are the user's own code."""
    return [f for f in frames if not f.filename.startswith("<frozen") and not is_installed(f.filename)]


def place_of(cls: type, name: str | None = None) -> str:
    """The class, with the file and line of it or of one of its methods."""
    about: Any = getattr(cls, name, cls) if name else cls
    try:
        file, (_, line) = inspect.getsourcefile(about), inspect.getsourcelines(about)
    except (OSError, TypeError):  # from a notebook, or created without source
        return cls.__name__
    return f"{cls.__name__} in {file}:{line or 1}"


def user_modules(workload: Any) -> list[ModuleType]:
    """Modules that exist only on the user's machine: the workload's own and its neighbours, but no installed packages.

    They must be sent to the workers by value.
    """
    home = inspect.getmodule(type(workload))
    origin = getattr(home, "__file__", None)
    if home is None or origin is None or is_installed(origin):
        return [home] if home is not None and origin is None else []
    return [home, *(module for module in modules_beside(Path(origin)) if module is not home)]


def modules_beside(file: Path) -> list[ModuleType]:
    """Modules imported from a user's file and from files in its import root and the folders below."""
    folder = import_root(file)
    return [
        module
        for module in list(sys.modules.values())
        if isinstance(path := getattr(module, "__file__", None), str)
        and not is_installed(path)
        and folder in Path(path).resolve().parents
        and Path(path).is_file()  # torch.ops has the relative path `_ops.py`, which is not in the current folder
    ]


def import_root(file: Path) -> Path:
    """The folder from which a file is imported: its own, or that of its outermost package."""
    folder = file.resolve().parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder


def is_installed(path: str) -> bool:
    """Whether a file belongs to an installed package, the standard library or scaleray."""
    return f"{os.sep}site-packages{os.sep}" in path or str(Path(path).resolve()).startswith(_HOMES)
