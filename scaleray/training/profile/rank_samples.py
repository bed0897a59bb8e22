"""Samples of how this worker is doing, at intervals, for whoever watches the run while it lives.

A sample costs some tenths of a millisecond and is taken between two steps; nothing is sent or waited for here.
"""

from __future__ import annotations

import time
import warnings

import numpy as np
import psutil
import torch

from scaleray.profiling.run_profile import STEP
from scaleray.records.phases import PARTS
from scaleray.records.published import RankSample
from scaleray.records.run import Emit
from scaleray.training.observer import Observer, TakenStep
from scaleray.training.profile.arrivals import ArrivalTimes
from scaleray.training.profile.phase_times import PhaseTimes
from scaleray.training.setup.place import Place
from scaleray.watchers import Guard, Watcher

SAMPLES_A_SECOND = 50.0
"""Most samples that all workers together send to the recorder."""
MEMORY_KINDS = ("peak", "resident", "rounding", "cached", "stranded", "largest_hole")
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class RankSamples(Observer):
    """Emits a `RankSample` after the first steps, and every `every_s` seconds from then on."""

    def __init__(
        self, place: Place, phases: PhaseTimes, arrivals: ArrivalTimes, *, every_s: float, emit: Emit, guard: Guard
    ) -> None:
        self.place, self.phases, self.arrivals = place, phases, arrivals
        self.every_s = max(every_s, place.world_size / SAMPLES_A_SECOND)
        self._emit, self._guard = emit, guard
        self._sampled_at = -1e9
        self._steps, self._totals = 0, np.zeros(0)
        self._limit = guard(Watcher.MEMORY, lambda: memory_limit(place.device), None, part="its limit")
        self._device = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else ""

    def after_step(self, taken: TakenStep) -> None:
        """Take a sample, if it is time to and a step was measured since the last one."""
        now = time.monotonic()
        if now - self._sampled_at >= self.every_s and self.phases.num_known > self._steps:
            self._sampled_at = now
            sample = self._guard(Watcher.FIGURES, lambda: self._sample(taken.number), None, part="live metrics")
            if sample is not None:
                self._emit(sample)

    def _sample(self, step: int) -> RankSample:
        columns, steps, totals = self.phases.totals()
        before = self._totals if len(self._totals) else np.zeros(len(totals))
        means = dict(zip(columns, (totals - before) / (steps - self._steps), strict=True))
        self._steps, self._totals = steps, totals
        return RankSample(
            rank=self.place.rank,
            node=self.place.node,
            world_size=self.place.world_size,
            step=step,
            step_at=time.time(),
            step_time_s=float(means[STEP]),
            # a part that never had any time cannot be told apart here
            phases={part.value: float(means[part]) for part in PARTS if totals[columns.index(part)] > 0},
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
        """See `RankSample.ahead_s`: of the steps that are kept since the last sample."""
        rows = self.arrivals.take_recent()
        if not rows:
            return ()
        values = np.array(rows)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a place that no step came by
            ahead = np.nanmedian(values[:, 2:3] - values[:, 3:], axis=0)
        return tuple(float(one) for one in ahead)


def memory_limit(device: torch.device) -> int | None:
    """Bytes that this worker can have: of its GPU, of its container, or of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [int(psutil.virtual_memory().total)]
    for path in CGROUP_LIMITS:
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits)
