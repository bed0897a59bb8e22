"""How a figure of the same training on the same machines went over the months, and where it changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scaleray.records.experiment import Experiment
from scaleray.scaling.curves.change_points import LEAST, ChangePoint, change_points

FIGURES = {"efficiency": True, "samples_per_s": True, "mfu": True, "speedup": True, "step_time_s": False}
"""Figures that have a course, and whether more of it is better."""
SAME = ("kind", "model", "mode", "gpus", "strategy", "global_batch", "hardware")
"""Fields that all points of a course share."""
MAY_EXPLAIN = ("code", "environment", "data_hash", "topology", "owner")
"""Fields whose change is reported with a change of level."""


@dataclass(frozen=True)
class Course:
    """One figure over time. same: what its points have in common. changes: where the level changed."""

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
        """Whether the level became worse."""
        return (change.after < change.before) == FIGURES[self.figure]

    def explained(self, change: ChangePoint) -> list[str]:
        """Other facts that differ from this point on."""
        before, after = self.points[change.index - 1].values, self.points[change.index].values
        return [
            f"{name} {_short(before.get(name))} -> {_short(after.get(name))}"
            for name in MAY_EXPLAIN
            if before.get(name) != after.get(name)
        ]

    def to_dict(self) -> dict[str, Any]:
        """The course as JSON can hold it."""
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


def courses(found: Sequence[Experiment], *, figure: str) -> list[Course]:
    """The courses of a figure, those with most points first; experiments that are invalid or changed are left out."""
    groups: dict[tuple[Any, ...], list[Experiment]] = defaultdict(list)
    for one in found:
        if one.is_usable and one.values.get(figure) is not None:
            groups[tuple(one.values.get(name) for name in SAME)].append(one)
    made = []
    for key, points in groups.items():
        ordered = sorted(points, key=lambda one: str(one.values.get("started")))
        changes = change_points([float(one.values[figure]) for one in ordered]) if len(ordered) >= 2 * LEAST else []
        made.append(Course(figure, dict(zip(SAME, key, strict=True)), tuple(ordered), tuple(changes)))
    return sorted(made, key=lambda one: (-len(one.points), one.title))


def _short(value: Any) -> str:
    return "missing" if value is None else str(value)[:12]
