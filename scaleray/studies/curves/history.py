"""History of a figure of the same training on the same machines over months, and its changes of level."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scaleray.records.experiment import Experiment

# Where a series of measurements changes its level, beyond its noise: the hierarchical E-divisive method.
#
# A split is as good as its two sides are far apart, by the energy distance of all pairs of values; how often the same
# values in random order have a split that is as good is its p-value. The best split that is significant divides the
# series, and its parts are looked at in the same way. No distribution and no number of changes is assumed. Sources:
# Matteson and James 2014, arXiv:1306.4933; for performance tests Daly et al. 2020, arXiv:2003.00584.

ALPHA = 0.05
PERMUTATIONS = 399
LEAST = 3
"""Fewest values on each side of a split. Series of fewer than about eight values have no significant split."""


@dataclass(frozen=True)
class ChangePoint:
    """First value of a new level of a series. before and after: medians of the parts on either side."""

    index: int
    before: float
    after: float
    p_value: float


def change_points(values: Sequence[float], *, alpha: float = ALPHA, seed: int = 0) -> list[ChangePoint]:
    """Changes of level, in order. alpha: probability of a false change. seed: of the random orders."""
    series, random = np.asarray(values, dtype=float), np.random.default_rng(seed)
    ends, p_values = [0, len(series)], dict[int, float]()
    waiting = [(0, len(series))]
    while waiting:
        start, end = waiting.pop()
        found = _split(series[start:end], random)
        if found is None or found[1] > alpha:
            continue
        at = start + found[0]
        p_values[at] = found[1]
        ends.append(at)
        waiting += [(start, at), (at, end)]
    ends.sort()
    return [
        ChangePoint(at, float(np.median(series[before:at])), float(np.median(series[at:after])), p_values[at])
        for before, at, after in zip(ends, ends[1:], ends[2:], strict=False)
    ]


def _split(part: np.ndarray, random: np.random.Generator) -> tuple[int, float] | None:
    """The best split of a series and its p-value; None for a series that is too short or constant."""
    if len(part) < 2 * LEAST or np.ptp(part) == 0:
        return None
    distances = np.abs(part[:, None] - part[None, :])
    at, best = _best(distances)
    orders = (random.permutation(len(part)) for _ in range(PERMUTATIONS))
    as_good = sum(_best(distances[np.ix_(order, order)])[1] >= best for order in orders)
    return at, (as_good + 1) / (PERMUTATIONS + 1)


def _best(distances: np.ndarray) -> tuple[int, float]:
    """The split with the largest energy statistic, and that statistic."""
    n = len(distances)
    sums = distances.cumsum(0).cumsum(1)
    at = np.arange(LEAST, n - LEAST + 1)
    whole, left = sums[-1, -1], sums[at - 1, at - 1]
    across = sums[at - 1, -1] - left
    right = whole - left - 2 * across
    sizes, others = at, n - at
    energy = 2 * across / (sizes * others) - left / (sizes * (sizes - 1)) - right / (others * (others - 1))
    statistic = sizes * others / n * energy
    best = int(np.argmax(statistic))
    return int(at[best]), float(statistic[best])


FIGURES = {"efficiency": True, "samples_per_s": True, "mfu": True, "speedup": True, "step_time_s": False}
"""Figures that have a history, and whether larger values are better."""
SAME = ("kind", "model", "mode", "gpus", "strategy", "global_batch", "hardware")
"""Fields that all points of a history share."""
MAY_EXPLAIN = ("code", "environment", "data_hash", "topology", "owner")
"""Fields whose change is reported with a change of level."""


@dataclass(frozen=True)
class History:
    """History of one figure. same: fields that its points share. changes: changes of level."""

    figure: str
    same: dict[str, Any]
    points: tuple[Experiment, ...]
    changes: tuple[ChangePoint, ...]

    @property
    def values(self) -> list[float]:
        """The figure of each point."""
        return [float(one.values[self.figure]) for one in self.points]

    @property
    def title(self) -> str:
        """Description of its points."""
        same = self.same
        parts = [same.get("model"), f"{same['gpus']} workers" if same.get("gpus") else None, same.get("mode"),
                 same.get("strategy"), f"batch {same['global_batch']}" if same.get("global_batch") else None,
                 same.get("hardware")]  # fmt: skip
        return ", ".join(str(part) for part in parts if part)

    def is_worse(self, change: ChangePoint) -> bool:
        """Whether the new level is worse."""
        return (change.after < change.before) == FIGURES[self.figure]

    def explained(self, change: ChangePoint) -> list[str]:
        """Other facts that change at this point."""
        before, after = self.points[change.index - 1].values, self.points[change.index].values
        return [
            f"{name} {_short(before.get(name))} -> {_short(after.get(name))}"
            for name in MAY_EXPLAIN
            if before.get(name) != after.get(name)
        ]

    def to_dict(self) -> dict[str, Any]:
        """The history as JSON-compatible values."""
        return {
            "figure": self.figure,
            "same": self.same,
            "points": [
                {"started": one.values["started"], "run_id": one.run_id, "name": one.values["name"], "value": value}
                for one, value in zip(self.points, self.values, strict=True)
            ],
            "changes": [
                {
                    "at": self.points[one.index].values["started"], "name": self.points[one.index].values["name"],
                    "before": one.before, "after": one.after, "p_value": one.p_value,
                    "is_worse": self.is_worse(one), "beside": self.explained(one),
                }
                for one in self.changes
            ],
        }  # fmt: skip


def histories(found: Sequence[Experiment], *, figure: str) -> list[History]:
    """Histories of a figure, longest first; experiments that are invalid or changed are omitted."""
    groups: dict[tuple[Any, ...], list[Experiment]] = defaultdict(list)
    for one in found:
        if one.is_usable and one.values.get(figure) is not None:
            groups[tuple(one.values.get(name) for name in SAME)].append(one)
    made = []
    for key, points in groups.items():
        ordered = sorted(points, key=lambda one: str(one.values.get("started")))
        changes = change_points([float(one.values[figure]) for one in ordered]) if len(ordered) >= 2 * LEAST else []
        made.append(History(figure, dict(zip(SAME, key, strict=True)), tuple(ordered), tuple(changes)))
    return sorted(made, key=lambda one: (-len(one.points), one.title))


def _short(value: Any) -> str:
    return "missing" if value is None else str(value)[:12]
