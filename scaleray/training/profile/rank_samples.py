"""Samples of a worker's state at intervals, for live displays of the run. A sample takes some tenths of a millisecond,
between two steps, without communication or waiting."""

import time
import warnings
from collections.abc import Callable

import numpy as np
import psutil
import torch

from scaleray.common.memory_limits import container_memory
from scaleray.common.watchers import Guard, Watcher
from scaleray.profiling.run_profile import STEP
from scaleray.records.live_state import RecentSteps
from scaleray.records.phases import PARTS
from scaleray.records.published import RankSample
from scaleray.records.run_record import Emit, StepRecord
from scaleray.records.start import steady_time
from scaleray.training.observer import Observer
from scaleray.training.profile.arrival_recording import ArrivalTimes
from scaleray.training.profile.phase_times import PhaseTimes
from scaleray.training.setup.rank_context import RankContext

TOLD_EVERY_S = 1.0
SAMPLES_A_SECOND = 50.0
"""Maximum number of samples per second that all workers together send to the recorder."""
MEMORY_KINDS = ("peak", "resident", "rounding", "cached", "stranded", "largest_hole")


class RankSamples(Observer):
    """Reports the last steps about once a second, and emits a `RankSample` after each of the first steps and every
    `every_s` seconds from then on. tell: receives the content of heartbeats."""

    def __init__(
        self,
        place: RankContext,
        phases: PhaseTimes,
        arrivals: ArrivalTimes,
        *,
        every_s: float,
        tell: Callable[[RecentSteps], None],
        emit: Emit,
        guard: Guard,
    ) -> None:
        self.place, self.phases, self.arrivals = place, phases, arrivals
        self._tell, self._emit, self._guard = tell, emit, guard
        self._recent = StepMeans(phases, every_s=TOLD_EVERY_S)
        self._means = StepMeans(phases, every_s=max(every_s, place.world_size / SAMPLES_A_SECOND))
        self._due_at = -1e9
        self._limit = guard(Watcher.MEMORY, lambda: memory_limit(place.device), None, part="its limit")
        self._device = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else ""

    def set_intervals(self, *, samples_s: float, told_s: float = TOLD_EVERY_S) -> None:
        """Set the intervals of samples and of reports of the last steps, in order to measure their cost: 0 is every
        step, infinity never."""
        for means, every_s in ((self._means, samples_s), (self._recent, told_s)):
            means.every_s, means.due_at = every_s, time.monotonic() + every_s
        self._due_at = min(self._recent.due_at, self._means.due_at)

    def after_step(self, taken: StepRecord) -> None:
        """Report and take a sample if it is due and a step has been measured since the last one."""
        now = time.monotonic()
        if now < self._due_at:
            return
        if self._recent.is_due(now):
            self._guard(Watcher.FIGURES, lambda: self._tell_of(taken.step, now), None, part="last steps")
        if self._means.is_due(now):
            sample = self._guard(Watcher.FIGURES, lambda: self._sample(taken.step, now), None, part="live metrics")
            if sample is not None:
                self._emit(sample)
        self._due_at = min(self._recent.due_at, self._means.due_at)

    def _tell_of(self, step: int, now: float) -> None:
        num_steps, means = self._recent.take(now)
        phases = {part.value: means[part] for part in PARTS if means.get(part)}
        self._tell(RecentSteps(step, num_steps, means[STEP], phases, self.phases.memory.now()))

    def _sample(self, step: int, now: float) -> RankSample:
        _, means = self._means.take(now)
        return RankSample(
            rank=self.place.rank,
            node=self.place.node,
            world_size=self.place.world_size,
            step=step,
            step_at=steady_time(),
            step_time_s=means[STEP],
            phases={part.value: means[part] for part in PARTS if part in means},
            memory=self._memory(),
            memory_limit_bytes=self._limit,
            ahead_s=self._ahead_s(),
            device=self._device,
        )

    def _memory(self) -> dict[str, int]:
        known = self.phases.memory.now()
        found = {kind: known[f"{kind}_bytes"] for kind in MEMORY_KINDS if f"{kind}_bytes" in known}
        is_cuda = self.place.device.type == "cuda"
        used = torch.cuda.memory_allocated(self.place.device) if is_cuda else found.get("resident")
        if used is not None:
            found |= {"used": used, "peak": max(found.get("peak", 0), used)}
        return found

    def _ahead_s(self) -> tuple[float, ...]:
        """`RankSample.ahead_s`, as the medians of the steps stored since the last sample."""
        rows = self.arrivals.take_recent()
        if not rows:
            return ()
        values = np.array(rows)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a place that no step came by
            ahead = np.nanmedian(values[:, 2:3] - values[:, 3:], axis=0)
        return tuple(float(one) for one in ahead)


class StepMeans:
    """Means of the steps since the last reading, with at most one reading in `every_s` seconds."""

    def __init__(self, phases: PhaseTimes, *, every_s: float) -> None:
        self.phases, self.every_s = phases, every_s
        self.due_at = -1e9
        self._steps, self._totals = 0, np.zeros(1)

    def is_due(self, now: float) -> bool:
        """Whether a reading is due and a step has been measured since the last one."""
        return now >= self.due_at and self.phases.num_known > self._steps

    def take(self, now: float) -> tuple[int, dict[str, float]]:
        """Steps since the last reading, and their mean seconds by column, without columns that have never had any
        time."""
        self.due_at = now + self.every_s
        columns, steps, totals = self.phases.totals()
        num_steps = steps - self._steps
        means = (totals - self._totals) / num_steps
        self._steps, self._totals = steps, totals
        return num_steps, {name: float(means[at]) for at, name in enumerate(columns) if totals[at] > 0}


def memory_limit(device: torch.device) -> int | None:
    """Memory limit of this worker in bytes: that of its GPU, its container or the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return min([psutil.virtual_memory().total, *(limit for limit, _ in container_memory())])
