"""Measured all-reduces in the form that `scaleray plan --collectives` reads."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from scaleray.planner.hardware.measured_collectives import COLUMNS
from scaleray.records.preflight import AllReduceTime


def collectives_csv(times: Sequence[AllReduceTime]) -> str:
    """A line for each group of workers and size; where several groups are alike, such as those inside each node, their
    median: the planner asks what such a group takes, and what is slower than the others has a check of its own."""
    groups: dict[tuple[int, int, int], list[float]] = {}
    for time in times:
        groups.setdefault((time.ranks, time.nodes, time.num_bytes), []).append(time.seconds)
    rows = [(*group, statistics.median(found)) for group, found in sorted(groups.items())]
    lines = [",".join(COLUMNS), *(f"{ranks},{nodes},{size},{seconds:.9g}" for ranks, nodes, size, seconds in rows)]
    return "\n".join(lines) + "\n"
