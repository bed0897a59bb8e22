"""Where a step's time goes: computing, communication, waiting for input, and the rest."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scaleray.records.study_record import Turn


@dataclass(frozen=True)
class TimeSplit:
    """Where the time of a turn's steps goes, as shares that add up to 1. comm: None where it is part of compute."""

    compute: float
    comm: float | None
    input: float
    other: float


def split(step_time_s: float, turn: Turn, workers: int) -> TimeSplit:
    """Shares of a step's time. Compute: the time of the same work alone; `other`: its extra time on the slowest worker
    of a step; communication: the remainder."""
    wait = min(1.0, max(0.0, turn.input_share))
    rest = 1.0 - wait
    if turn.alone_s is None:
        return TimeSplit(rest, 0.0 if workers == 1 else None, wait, 0.0)
    compute = min(rest, turn.alone_s / step_time_s)
    slowest = max(turn.alone_s, turn.slowest_alone_s or 0.0) / step_time_s
    other = min(rest - compute, slowest - turn.alone_s / step_time_s)
    return TimeSplit(compute, rest - compute - other, wait, other)


def mean_split(splits: Sequence[TimeSplit]) -> TimeSplit:
    """Mean of each share. comm: None where one of the splits has none."""
    comm = [s.comm for s in splits if s.comm is not None]
    return TimeSplit(
        statistics.fmean(s.compute for s in splits),
        statistics.fmean(comm) if len(comm) == len(splits) else None,
        statistics.fmean(s.input for s in splits),
        statistics.fmean(s.other for s in splits),
    )
