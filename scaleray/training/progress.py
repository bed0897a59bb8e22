"""What a worker is doing right now, told to the outside by a thread of its own, which also notices when it hangs."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import TextIO

from scaleray.workload import user_frames

HANG = "a hang: "  # begins the phase of a worker that is about to end itself
WATCHED = ("loss", "update", "evaluation")  # input and collectives have time limits of their own
COLLECTIVES = ("torch/distributed/", "torch/nn/parallel/distributed.py")  # files that wait for other workers
LONGEST_LINE = 1000
FIRST_STEP_FACTOR = 3.0  # a first step may compile, and fill caches


class Progress:
    """The loop's place: a step and a phase of it. Written by the training thread, read by others."""

    def __init__(self) -> None:
        self.step = self.steps_done = 0
        self.phase = "start"
        self.since = time.monotonic()
        self.thread_id = threading.get_ident()

    def enter(self, phase: str) -> None:
        """The next phase begins: start, input, loss, synchronise, update, evaluation, checkpoint or end."""
        self.phase, self.since = phase, time.monotonic()

    def finish_step(self, step: int) -> None:
        """So many steps are complete."""
        self.step = step
        self.steps_done += 1


class Watchdog:
    """Reports progress at an interval. beat: takes (step, phase, seconds in it), true when the run should leave.

    on_hang: called once with a sentence when the training thread has not left a watched phase for `limit_s`.
    """

    def __init__(
        self, progress: Progress, *, interval_s: float, limit_s: float, beat: Callable[[int, str, float], bool],
        on_leave: Callable[[], None], on_hang: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.progress, self.interval_s, self.limit_s = progress, interval_s, limit_s
        self.beat, self.on_leave, self.on_hang = beat, on_leave, on_hang
        self._stop = threading.Event()
        self._waited_since = -1.0
        self._thread = threading.Thread(target=self._watch, name="scaleray-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(self.interval_s):
            progress = self.progress
            step, phase, since_s = progress.step, progress.phase, time.monotonic() - progress.since
            limit_s = self.limit_s * (1.0 if progress.steps_done else FIRST_STEP_FACTOR)
            if waits_for_others(progress.thread_id):
                self._waited_since = progress.since  # and if that fails, its way out may take longer than the limit
            if phase in WATCHED and since_s > limit_s and self._waited_since != progress.since:
                self.on_hang(
                    f"it has been in `{phase}` of step {step + 1} for {since_s:.0f} s: {where(progress.thread_id)}"
                )
                return
            try:
                if self.beat(step, phase, since_s):
                    self.on_leave()
            except Exception:  # nobody listens for the moment, which is no reason to stop training
                continue


def waits_for_others(thread_id: int) -> bool:
    """Whether a thread is inside a collective, such as DDP's own in a forward pass: then another worker is to blame."""
    frame = sys._current_frames().get(thread_id)
    return frame is not None and any(part in frame.f_code.co_filename for part in COLLECTIVES)


def where(thread_id: int) -> str:
    """The place in the user's own code where a thread is, innermost first, or just the innermost one."""
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return "the thread is gone"
    stack = traceback.extract_stack(frame)
    own = user_frames(stack) or stack
    last = own[-1]
    return f"{last.filename}:{last.lineno} in {last.name}: {last.line or ''}".rstrip(": ")


class Tail:
    """A stream that passes everything on and remembers its last lines."""

    def __init__(self, stream: TextIO, lines: deque[str]) -> None:
        self._stream, self._lines, self._open = stream, lines, ""

    def write(self, text: str) -> int:
        """Pass on."""
        # progress bars write for ever without a new line
        *whole, last = (self._open + text).replace("\r", "\n").split("\n")
        self._open = last[-LONGEST_LINE:]
        self._lines.extend(line.rstrip() for line in whole if line.strip())
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Pass on, line by line."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class TailHandler(logging.Handler):
    """Remembers the last lines that were logged, beside those that were printed."""

    def __init__(self, lines: deque[str]) -> None:
        super().__init__(logging.INFO)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self._lines.extend(f"{record.levelname}: {line}" for line in record.getMessage().splitlines() if line.strip())
