"""Clock offsets between ranks, used to place their traces on one time line.

All ranks leave a barrier within one round trip of each other, whatever their clocks show; the median over many barriers
gives the clock offset. Traces without barriers are aligned by the ends of their collectives, which are equally close
together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scaleray.profiling.traces.matched_collectives import MatchedCollective


@dataclass(frozen=True)
class Clocks:
    """Nanoseconds by which each rank's clock is ahead of the first rank's, and their uncertainty."""

    ahead_ns: Mapping[int, int]
    within_ns: Mapping[int, int]
    """Half of the interquartile range of the values that give the offset."""
    found_from: str
    """`barriers`, `collectives`, or `nothing`: then all clocks are assumed equal, as they are on one node."""


def clocks_from_barriers(left_at: Mapping[int, Sequence[int]]) -> Clocks:
    """Return the clocks from the times at which each rank left the same barriers, in nanoseconds of its own clock."""
    first = np.array(left_at[min(left_at)], dtype=np.int64)
    return _clocks({rank: np.array(moments) - first for rank, moments in left_at.items()}, "barriers")


def clocks_from_collectives(meetings: Sequence[MatchedCollective], ranks: Sequence[int]) -> Clocks:
    """Return the clocks from the ends of collectives in which the first rank took part."""
    first = min(ranks)
    ends: dict[int, list[int]] = {rank: [] for rank in ranks}
    for meeting in meetings:
        if first in meeting.parts:
            for rank, part in meeting.parts.items():
                ends[rank].append(part.end_ns - meeting.parts[first].end_ns)
    found = {rank: np.array(values, dtype=np.int64) for rank, values in ends.items() if values}
    if len(found) < len(ranks):
        return Clocks(dict.fromkeys(ranks, 0), {}, "nothing")
    return _clocks(found, "collectives")


def _clocks(differences: Mapping[int, np.ndarray], found_from: str) -> Clocks:
    ahead = {rank: int(np.median(values)) for rank, values in differences.items()}
    spread = {rank: np.percentile(values, [25, 75]) for rank, values in differences.items()}
    return Clocks(ahead, {rank: int((high - low) / 2) for rank, (low, high) in spread.items()}, found_from)
