"""A worker's memory over time, and the time of its peak.

Reading the allocator's statistics takes a tenth of a millisecond, so most steps are not sampled. On the CPU there are
only the system's counts for the whole process; the peak is read after a step, in ten microseconds, but not after each
short step. The CUDA code has been reviewed but not run."""

import bisect
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from scaleray.records.phases import Phase
from scaleray.records.profile_record import MemoryNumbers, MemoryPeak
from scaleray.records.start import steady_time
from scaleray.training.profile import used_memory

SERIES = ("rounding_bytes", "cached_bytes", "stranded_bytes", "largest_hole_bytes", "resident_bytes")
MOST_SAMPLES = 2000
Sample = tuple[int, Mapping[str, int | None]]
"""A step, and its values under the names of SERIES."""


def numbers_of(stats: Mapping[str, int], segments: Iterable[Mapping[str, Any]] | None = None) -> dict[str, int | None]:
    """The four numbers, and how often the allocator had to release its cache. A number without statistics is None:
    older versions of torch do not count requested bytes, and the largest hole requires the segments of a snapshot."""

    def difference(larger: str, smaller: str) -> int | None:
        first, second = stats.get(f"{larger}.all.current"), stats.get(f"{smaller}.all.current")
        return None if first is None or second is None else max(0, first - second)

    return {
        # requested bytes count until a block is free again, as `active` does: `allocated` ends earlier, while the
        # block waits for another stream
        "rounding_bytes": difference("active_bytes", "requested_bytes"),
        "cached_bytes": difference("reserved_bytes", "active_bytes"),
        "stranded_bytes": stats.get("inactive_split_bytes.all.current"),
        "largest_hole_bytes": None if segments is None else largest_hole(segments),
        "retries": stats.get("num_alloc_retries"),
    }


def largest_hole(segments: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of the largest free block of all segments; 0 if there is none. A block that waits for another stream is not
    free."""
    return max((b["size"] for s in segments for b in s["blocks"] if b["state"] == "inactive"), default=0)


def thinned(samples: list[Sample]) -> list[Sample]:
    """Keep every second sample if there are too many."""
    return samples[::2] if len(samples) > MOST_SAMPLES else samples


def memory_over_time(
    samples: Sequence[Sample], *, peak: MemoryPeak | None, first_step: int, width: int, count: int
) -> MemoryNumbers:
    """Last value of each number, and its largest in each bucket of `width` steps; None in a bucket without samples."""
    last = {name: _last(samples, name) for name in (*SERIES, "retries")}
    steps = [step for step, _ in samples]
    series: dict[str, list[float | None]] = {}
    for name in SERIES:
        if last[name] is None:
            continue
        series[name] = []
        for bucket in range(count):
            low = bisect.bisect_left(steps, first_step + bucket * width)
            high = bisect.bisect_left(steps, first_step + (bucket + 1) * width)
            found = [value for _, numbers in samples[low:high] if (value := numbers.get(name)) is not None]
            series[name].append(max(found, default=None))
    return MemoryNumbers(**last, peak=peak, series=series)


def _last(samples: Sequence[Sample], name: str) -> int | None:
    return next((v for _, numbers in reversed(samples) if (v := numbers.get(name)) is not None), None)


LOOK_EVERY_S = 1.0
PEAK_EVERY_S = 0.1
"""Seconds between two samples of the peak; of several steps within this time, the last one is sampled."""
SNAPSHOT_EVERY_S = 60.0
"""Seconds between two snapshots. A snapshot reads every block, which takes a tenth of a second on a large model."""


class MemoryCurve:
    """Samples the memory of this process's device, or of the process itself on the CPU, after step `first_step`.
    started_at: wall-clock time at the start of the run."""

    def __init__(self, device: torch.device, started_at: float, first_step: int = 0) -> None:
        self.device, self.started_at = device, started_at
        self.is_looking = True
        """Whether phases are recorded, as they are in a sampled step."""
        self.peak: MemoryPeak | None = None
        self.samples: list[Sample] = []
        self._phase, self._step = Phase.OTHER, first_step
        self._looked_at = self._snapshot_at = self._asked_at = -1e9

    def mark(self, phase: Phase) -> None:
        """Mark the beginning of a phase: any increase in memory belongs to the phase that ends."""
        self._see_peak(self._phase)
        self._phase = phase

    def is_due(self) -> bool:
        """Whether memory is to be sampled at the end of this step."""
        return self.is_looking or time.monotonic() - self._asked_at >= PEAK_EVERY_S

    def end_step(self, step: int) -> None:
        """Sample the memory if it is due."""
        self._asked_at = now = time.monotonic()
        self._step = step - 1
        if self.is_looking or self.device.type == "cpu":
            grew = self._see_peak(self._phase if self.is_looking else None)
            # where the peak grows in one step, it may in the next, whose phases are then told
            self.is_looking = grew
        self._step = step
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at, self.is_looking = now, True
            self._sample(now)

    def now(self) -> dict[str, int]:
        """The newest numbers by name, and the peak so far."""
        newest = self.samples[-1][1] if self.samples else {}
        known = {name: value for name, value in newest.items() if value is not None}
        return {**known, **({"peak_bytes": self.peak.num_bytes} if self.peak is not None else {})}

    def numbers(self, *, first_step: int, width: int, count: int) -> MemoryNumbers:
        """Measured memory over time, in `count` buckets of `width` steps."""
        self._snapshot_at = -1e9
        self._sample(time.monotonic())
        return memory_over_time(self.samples, peak=self.peak, first_step=first_step, width=width, count=count)

    def _see_peak(self, phase: Phase | None) -> bool:
        num_bytes = used_memory.counted_peak_bytes(self.device)
        if self.peak is not None and num_bytes <= self.peak.num_bytes:
            return False
        self.peak = MemoryPeak(num_bytes, self._step + 1, phase or "", steady_time() - self.started_at)
        return True

    def _sample(self, now: float) -> None:
        found: dict[str, int | None] = {"resident_bytes": used_memory.resident_bytes()}
        if self.device.type == "cuda":
            segments = None
            if now - self._snapshot_at >= SNAPSHOT_EVERY_S:
                self._snapshot_at = now
                segments = torch.cuda.memory_snapshot()
            found.update(numbers_of(torch.cuda.memory_stats(self.device), segments))
        self.samples = thinned([*self.samples, (self._step, found)])
