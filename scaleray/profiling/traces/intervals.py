"""Sets of intervals on one time line, in integer nanoseconds.

A set is sorted and its intervals neither overlap nor touch; rows are (start, end), with the end excluded.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Intervals = NDArray[np.int64]
EMPTY: Intervals = np.empty((0, 2), dtype=np.int64)


def union(start: Ints, end: Ints) -> Intervals:
    """Times covered by at least one of many intervals, given in any order."""
    keep = end > start
    if not keep.any():
        return EMPTY
    start, end = start[keep], end[keep]
    order = np.argsort(start, kind="stable")
    start, latest = start[order], np.maximum.accumulate(end[order])
    begins = np.concatenate(([True], start[1:] > latest[:-1]))
    ends = np.concatenate((begins[1:], [True]))
    return np.stack((start[begins], latest[ends]), axis=1)


def length(intervals: Intervals) -> int:
    """Total nanoseconds in the set."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def both(left: Intervals, right: Intervals) -> Intervals:
    """Intersection of two sets."""
    return _where(left, right, lambda in_left, in_right: in_left & in_right)


def without(left: Intervals, right: Intervals) -> Intervals:
    """Times in the left set that are not in the right one."""
    return _where(left, right, lambda in_left, in_right: in_left & ~in_right)


def either(left: Intervals, right: Intervals) -> Intervals:
    """Union of two sets."""
    together = np.concatenate((left, right))
    return union(together[:, 0], together[:, 1])


def _where(left: Intervals, right: Intervals, keep) -> Intervals:  # type: ignore[no-untyped-def]
    cuts = np.unique(np.concatenate((left.ravel(), right.ravel())))
    if len(cuts) < 2:
        return EMPTY
    kept = keep(_covers(left, cuts[:-1]), _covers(right, cuts[:-1]))
    return union(cuts[:-1][kept], cuts[1:][kept])


def _covers(intervals: Intervals, moments: Ints) -> NDArray[np.bool_]:
    """Whether each moment is in the set."""
    if not len(intervals):
        return np.zeros(len(moments), dtype=bool)
    before = np.searchsorted(intervals[:, 0], moments, side="right") - 1
    return (before >= 0) & (moments < intervals[np.maximum(before, 0), 1])
