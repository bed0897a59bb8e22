"""A worker's current activity, sent by a separate thread, which also detects hangs."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import TextIO

from scaleray.records.live_state import RecentSteps
from scaleray.records.phases import TIMED, Phase
from scaleray.records.worker_requests import ControlRequest
from scaleray.workload import user_frames

HANG = "a hang: "  # begins the phase of a worker that is about to end itself
COMPILERS = (  # files that are on a thread's stack only while it compiles
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/compile_fx.py",
    "torch/_inductor/async_compile.py",
)
COLLECTIVES = ("torch/distributed/", "torch/nn/parallel/distributed.py")  # files that wait for other workers
# a device in whose queue a collective of NCCL waits for them is waited for here
WAITS = (*COLLECTIVES, "torch/cuda/streams.py", "scaleray/strategies/contract/later.py")
BEAT_S = 0.5
"""Seconds between two heartbeats; longer with more than 50 workers."""
LONGEST_LINE = 1000
FIRST_STEP_FACTOR = 3.0  # a first step may compile, and fill caches; so may a first evaluation
WATCHDOG_SHARE = 0.9  # share of the time that the others wait for this worker: only it knows where it hangs


class Progress:
    """Current step and phase of the loop. Written by the training thread, read by other threads."""

    def __init__(self) -> None:
        self.step = self.steps_done = 0
        self.phase = Phase.START
        self.passed: set[Phase] = set()
        """Phases that have been left at least once."""
        self.since = time.monotonic()
        self.thread_id = threading.get_ident()
        self.on_enter: Callable[[Phase], None] = lambda phase: None
        """Called with every phase that is entered."""
        self.recent: RecentSteps | None = None
        """Durations of the last steps; None before the second one."""
        if on_new is not None:
            on_new(self)

    def enter(self, phase: Phase) -> Phase:
        """Enter the next phase and return the previous one."""
        left = self.phase
        self.passed.add(left)
        self.phase, self.since = phase, time.monotonic()
        self.on_enter(phase)
        return left

    def on_recent_steps(self, recent: RecentSteps) -> None:
        """Store the durations of the last steps."""
        self.recent = recent

    def finish_step(self, step: int) -> None:
        """Store the number of complete steps."""
        self.step = step
        self.steps_done += 1

    def others_wait_s(self, collective_timeout_s: float) -> float:
        """Seconds that other workers wait for this one in a collective: the limit set by `CollectiveLimits` for this
        step."""
        return collective_timeout_s * (1.0 if self.steps_done else FIRST_STEP_FACTOR)

    def is_new(self, phase: Phase) -> bool:
        """Whether the training is in its first phase of this kind, which may compile and fill caches."""
        return not self.steps_done or phase not in self.passed


on_new: Callable[[Progress], None] | None = None
"""Listener for each new `Progress` in this process, set by the watch of a group that runs many trainings."""


class Watchdog:
    """Reports progress at an interval. beat: takes (step, phase, seconds in it) and returns the requests to the worker,
    for which on_leave, on_save and on_links are called.

    on_hang: called once, with a sentence, when the training thread has stayed in a watched phase for `limit_s`, or for
    three times as long if it compiles or does something for the first time. look: called before that with the seconds
    in the phase, and whether the training must leave the phase."""

    def __init__(
        self,
        progress: Progress,
        *,
        interval_s: float,
        limit_s: float,
        beat: Callable[[int, str, float], ControlRequest],
        on_leave: Callable[[], None],
        on_save: Callable[[], None] = lambda: None,
        on_links: Callable[[], None] = lambda: None,
        on_hang: Callable[[str], None],
        look: Callable[[float, bool], None] = lambda since_s, is_limited: None,
    ) -> None:
        self.look = look
        self.progress, self.interval_s, self.limit_s = progress, interval_s, limit_s
        self.beat, self.on_hang = beat, on_hang
        self._answers = {ControlRequest.LEAVE: on_leave, ControlRequest.SAVE: on_save, ControlRequest.LINKS: on_links}
        self._stop = threading.Event()
        self._waited_since = self._compiled_since = -1.0
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
            compiling = is_compiling(progress.thread_id)
            if compiling:
                self._compiled_since = progress.since  # what was compiled must still run
            self.look(since_s, phase in TIMED and not compiling)
            is_longer = progress.is_new(phase) or self._compiled_since == progress.since
            limit_s = self.limit_s * (FIRST_STEP_FACTOR if is_longer else 1.0)
            if waits_for_others(progress.thread_id):
                self._waited_since = progress.since  # and if that fails, its way out may take longer than the limit
            if phase in TIMED and since_s > limit_s and self._waited_since != progress.since:
                self.on_hang(
                    f"it has been in `{phase}` of step {step + 1} for {since_s:.0f} s: {where(progress.thread_id)}"
                )
                return
            try:
                request = self.beat(step, Phase.COMPILING if compiling else phase, since_s)
                if request in self._answers:
                    self._answers[request]()
            except Exception:  # nobody listens for the moment, which is no reason to stop training
                continue


def waits_for_others(thread_id: int) -> bool:
    """Whether a thread is inside a collective, such as DDP's in a forward pass, or waits for its device; the cause is
    then another worker."""
    frame = sys._current_frames().get(thread_id)
    return frame is not None and any(part in frame.f_code.co_filename for part in WAITS)


def is_compiling(thread_id: int) -> bool:
    """Whether a thread is inside torch.compile's compiler, which may also run in the middle of a training, for a batch
    of a new shape or a first evaluation."""
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        if frame.f_code.co_filename.endswith(COMPILERS):
            return True
        frame = frame.f_back
    return False


def where(thread_id: int) -> str:
    """Current lines of a thread in the user's own code, innermost first, or its innermost line if there are none."""
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return "the thread is gone"
    stack = traceback.extract_stack(frame)
    own = user_frames(stack) or stack
    last = own[-1]
    return f"{last.filename}:{last.lineno} in {last.name}: {last.line or ''}".rstrip(": ")


class Tail:
    """Stream that forwards everything written to it and stores the last lines."""

    def __init__(self, stream: TextIO, lines: deque[str]) -> None:
        self._stream, self._lines, self._open = stream, lines, ""

    def write(self, text: str) -> int:
        """Forward the text."""
        # progress bars write for ever without a new line
        *whole, last = (self._open + text).replace("\r", "\n").split("\n")
        self._open = last[-LONGEST_LINE:]
        self._lines.extend(line.rstrip() for line in whole if line.strip())
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Forward the lines one by one."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class TailHandler(logging.Handler):
    """Stores the last logged lines, in addition to the printed ones."""

    def __init__(self, lines: deque[str]) -> None:
        super().__init__(logging.INFO)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Store the message."""
        self._lines.extend(f"{record.levelname}: {line}" for line in record.getMessage().splitlines() if line.strip())
