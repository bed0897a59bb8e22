"""Time in which a worker of a pipeline computed, and time that its schedules took."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from scaleray.strategies.contract.later import Later, steps_ahead


class BusyTime:
    """Time in which this worker computed, and duration of its schedules. On CUDA both are measured by events, which are
    read some steps later, when they have long happened; that path has not been run.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._later = steps_ahead(device)
        self._steps: deque[tuple[list[Any], list[Any]]] = deque()
        self._busy: list[Any] = []
        self._whole: list[Any] = []

    def start(self) -> None:
        """Begin a step."""
        self._busy, self._whole = [], []

    def working(self) -> contextlib.AbstractContextManager[None]:
        """Context in which this worker computes."""
        return self._timed(self._busy)

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Context in which a schedule runs."""
        return self._timed(self._whole)

    def end(self) -> tuple[float, float] | None:
        """End the step. (seconds of computation, seconds of the schedules) of the last known step, or None."""
        self._steps.append((self._busy, self._whole))
        if len(self._steps) <= self._later:
            return None
        busy, whole = self._steps.popleft()
        return sum(map(self._seconds, busy)), sum(map(self._seconds, whole))

    def _seconds(self, span: Any) -> float:
        if not self._on_cuda:
            return float(span)
        begin, end = span
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    @contextlib.contextmanager
    def _timed(self, spans: list[Any]) -> Iterator[None]:
        if self._on_cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            spans.append((begin, end))
        else:
            started = time.perf_counter()
            yield
            spans.append(time.perf_counter() - started)


def bubble_share(times: Later) -> float:
    """Share of a step in which workers waited for each other. times: seconds of computation, and of the schedules."""
    busy_s, whole_s = times.read()
    return 1.0 - busy_s / whole_s
