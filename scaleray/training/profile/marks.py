"""Marks between the phases of a step, and the time from each mark to the next.

On the CPU a mark is a reading of the clock. On a GPU it is an event in the computing stream, which costs the host two
microseconds and is read long after the device has passed it. The CUDA code has been reviewed but not run."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from scaleray.records.phases import PARTS, Phase

OTHER, EVALUATION = PARTS.index(Phase.OTHER), PARTS.index(Phase.EVALUATION)
COLUMN_OF: dict[str, int] = {**dict.fromkeys(Phase, OTHER), **{part: column for column, part in enumerate(PARTS)}}
"""Index of each phase among the parts of a step."""

MOST_MARKS = 64
"""Maximum number of marks of a step in the queue; a step with several micro-batches or an evaluation may have
thousands."""

StepParts = tuple[float, list[float]]
"""Seconds of a step by the training's clock, and the seconds of its parts."""


Listeners = Mapping[Phase, Callable[[], None]]
"""Function called when a phase begins, in addition to the mark. In every phase, it would cost as much as the marks."""


class Marks(Protocol):
    """Times between marks, step by step."""

    listeners: Listeners
    at_a_time: int
    """Number of steps after which it is worthwhile to read the times that are known."""

    def mark(self, phase: Phase) -> None:
        """Mark the beginning of a phase, which ends the previous one."""

    def as_evaluation(self, now: float) -> float:
        """Mark the time since the last step as an evaluation, and return its seconds on the host. now: reading of the
        training's clock, `time.perf_counter`."""

    def end_step(self, step_s: float, now: float) -> None:
        """Mark the end of a step; the next one begins in the same phase. now: as in `as_evaluation`; with two separate
        readings, a delay between them would be missed."""

    def next_known(self) -> StepParts | None:
        """The next step whose times are known, in order; None if there is none yet."""

    def wait(self) -> None:
        """Wait until the times of all steps are known."""


class HostMarks:
    """Marks that read the host's clock."""

    at_a_time = 64

    def __init__(self) -> None:
        self._open: list[tuple[int, float]] = [(OTHER, time.perf_counter())]
        self._under_way: deque[tuple[float, list[tuple[int, float]], float]] = deque()
        self.listeners: Listeners = {}

    def mark(self, phase: Phase) -> None:
        self._open.append((COLUMN_OF[phase], time.perf_counter()))
        if phase in self.listeners:
            self.listeners[phase]()

    def as_evaluation(self, now: float) -> float:
        begun = self._open[0][1]
        self._open = [(OTHER, begun), (EVALUATION, begun + _spent(self._open, now)[OTHER]), (OTHER, now)]
        return now - begun

    def end_step(self, step_s: float, now: float) -> None:
        last = self._open[-1][0]
        # one of many micro-batches does not wait in line with all of its marks
        marks = self._open if len(self._open) <= MOST_MARKS else _drawn_together(self._open, now)
        self._under_way.append((step_s, marks, now))
        self._open = [(last, now)]

    def next_known(self) -> StepParts | None:
        if not self._under_way:
            return None
        step_s, marks, end = self._under_way.popleft()
        return step_s, _spent(marks, end)

    def wait(self) -> None: ...


def _spent(marks: Sequence[tuple[int, float]], end: float) -> list[float]:
    """Seconds of each part, summed from mark to mark."""
    spent = [0.0] * len(PARTS)
    for column, at in reversed(marks):
        spent[column] += end - at
        end = at
    return spent


def _drawn_together(marks: Sequence[tuple[int, float]], end: float) -> list[tuple[int, float]]:
    """One mark for each part, with the total seconds of each part unchanged."""
    found, at = [], marks[0][1]
    for column, seconds in enumerate(_spent(marks, end)):
        if seconds:
            found.append((column, at))
            at += seconds
    return found


class DeviceMarks:
    """Marks recorded as events on a device. make_event: creates an event that records its time."""

    at_a_time = 1  # events are free for others as soon as they are read

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        self._make = make_event or (lambda: torch.cuda.Event(enable_timing=True))
        self._free: list[Any] = []  # to make an event costs more than to record it
        self._open: list[tuple[int, Any]] = []
        self._under_way: deque[tuple[float, list[tuple[int, Any]], Any]] = deque()
        self._at, self._since = OTHER, time.perf_counter()
        self.listeners: Listeners = {}

    def mark(self, phase: Phase) -> None:
        self._at = COLUMN_OF[phase]
        self._open.append((self._at, self._recorded()))
        if phase in self.listeners:
            self.listeners[phase]()

    def as_evaluation(self, now: float) -> float:
        self._open = [(column if column == OTHER else EVALUATION, event) for column, event in self._open]
        self.mark(Phase.OTHER)
        whole_s, self._since = now - self._since, now
        return whole_s

    def end_step(self, step_s: float, now: float) -> None:
        end = self._recorded()
        self._under_way.append((step_s, self._open, end))
        self._open, self._since = [(self._at, end)], now

    def next_known(self) -> StepParts | None:
        if not self._under_way or not self._under_way[0][2].query():
            return None
        step_s, marks, end = self._under_way.popleft()
        spent = [0.0] * len(PARTS)
        events = [event for _, event in marks]
        for (column, begin), after in zip(marks, [*events[1:], end], strict=True):
            spent[column] += begin.elapsed_time(after) / 1e3
        self._free.extend(events)  # the last one begins the next step
        return step_s, spent

    def wait(self) -> None:
        for _, _, end in self._under_way:
            end.synchronize()

    def _recorded(self) -> Any:
        event = self._free.pop() if self._free else self._make()
        event.record()
        return event
