"""Memory that an allocator holds without using it, in four numbers from its statistics, and their development over
time.

The statistics are those of torch's caching allocator: `torch.cuda.memory_stats` and the segments of a snapshot.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scaleray.records.profile_record import MemoryNumbers, MemoryPeak

SERIES = ("rounding_bytes", "cached_bytes", "stranded_bytes", "largest_hole_bytes", "resident_bytes")
MOST_SAMPLES = 2000
Sample = tuple[int, Mapping[str, int | None]]
"""A step, and its values under the names of SERIES."""


def numbers_of(stats: Mapping[str, int], segments: Iterable[Mapping[str, Any]] | None = None) -> dict[str, int | None]:
    """The four numbers, and how often the allocator had to release its cache. None for a number without statistics:
    older versions of torch do not count requested bytes, and the largest hole needs the segments of a snapshot."""

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
    """Every second sample, if there are too many."""
    return samples[::2] if len(samples) > MOST_SAMPLES else samples


def memory_over_time(
    samples: Sequence[Sample], *, peak: MemoryPeak | None, first_step: int, width: int, count: int
) -> MemoryNumbers:
    """Last and largest value of each number in each bucket of `width` steps; None in a bucket without a sample."""
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
