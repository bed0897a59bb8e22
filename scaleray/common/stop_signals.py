"""Handling of SIGTERM, as sent by `ray job stop` and container platforms, for the duration of a context."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def on_sigterm(handle: Callable[[], None], *, once: bool = False) -> Iterator[None]:
    """Call `handle` for each SIGTERM during the context; does nothing outside the main thread, where Python does not
    allow handlers.

    once: whether a second SIGTERM ends the process, as it would without this context.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before_term, before_int = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    def answer(signum: int, frame: object) -> None:
        if once:
            signal.signal(signal.SIGTERM, before_term)
        handle()

    signal.signal(signal.SIGTERM, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before_term)
        signal.signal(signal.SIGINT, before_int)  # Ray leaves its own handler, which waits for a finished controller


def sigterm_like_ctrl_c() -> contextlib.AbstractContextManager[None]:
    """Context in which SIGTERM has the effect of Ctrl-C, so that workers are released."""
    return on_sigterm(_interrupt_here)


def interrupt() -> None:
    """End this command like Ctrl-C, from any thread; with SIGTERM if SIGINT is ignored, as in a script's background
    job."""
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGTERM if is_ignored else signal.SIGINT)


def _interrupt_here() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)
