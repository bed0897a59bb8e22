"""Conclusions from a study's points in addition to their curves: text, and the planner's model among the laws."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scaleray.config import RunConfig
from scaleray.errors import UsageError, first_line
from scaleray.launch.study import noise as study_noise
from scaleray.launch.study.hardware import RELAUNCHED
from scaleray.launch.study.plan import MODES
from scaleray.launch.study.planner_law import planner_law
from scaleray.records.printed import quantity
from scaleray.records.study import Curve, Point, StudyRecord
from scaleray.records.workload_profile import WorkloadProfile
from scaleray.scaling.curves.curves import GivenLaw
from scaleray.scaling.curves.paired_rounds import launch_of


def points_of_others(more: Iterable[StudyRecord], own: Sequence[Point], modes: Sequence[str]) -> list[Point]:
    """Points of other studies on curves of these modes, where this one has none; of several, the first."""
    found = {(point.mode, point.workers): point for point in own}
    for other in more:
        for point in (at.point for curve in other.curves for at in curve.points if curve.mode in modes):
            reused = dataclasses.replace(point, reused_from=point.reused_from or other.name)
            found.setdefault((point.mode, point.workers), reused)
    return list(found.values())[len(own) :]


def planner_laws(
    config: RunConfig,
    profile: WorkloadProfile | str,
    points: Sequence[Point],
    hardware: Sequence[Mapping[str, Any]],
    *,
    workers_per_node: int,
) -> tuple[list[GivenLaw], str]:
    """The planner's model as a law for a curve of these points, or a note why there is none. See `planner_law`."""
    if len(points) < 2:
        return [], ""
    try:
        return [planner_law(config, profile, points, hardware, workers_per_node=workers_per_node)], ""
    except UsageError as exc:
        return [], f"The planner's model is not among the laws: {first_line(exc).rstrip('.')}."


def words_of(curves: Sequence[Curve], points: Sequence[Point], target: str, notes: Iterable[str]) -> list[str]:
    """Every curve's verdict, and what else a reader should know. notes: more sentences; empty ones count as none."""
    noisy = study_noise.surest(points)
    return [
        *(curve.verdict for curve in curves if curve.verdict),
        *about_target(target, points),
        *about_launches(points),
        *([study_noise.sentence(noisy)] if noisy else []),
        *(note for note in dict.fromkeys(notes) if note),
    ]


def about_target(target: str, points: Sequence[Point]) -> list[str]:
    """A sentence where not every point's training to the target reached it."""
    trained = [(point, point.to_target) for point in points if point.to_target is not None]
    missed = [(point, result) for point, result in trained if not result.is_reached]
    if not missed:
        return []
    sign = 1 if "<=" in target else -1
    point, nearest = min(missed, key=lambda pair: sign * pair[1].value if math.isfinite(pair[1].value) else math.inf)
    workers = quantity(point.workers, "worker")
    last = f"{nearest.metric} {nearest.value:.4g} after {nearest.samples} samples on {workers}"
    if len(missed) == len(trained):
        return [
            f"The target {target} was never reached, the nearest is {last}: train longer (stop.after), or give another."
        ]
    names = ", ".join(
        f"{point.mode} {quantity(point.workers, 'worker')} (batch {point.global_batch_size})" for point, _ in missed
    )
    return [f"The target {target} was missed on {names}; the nearest of them is {last}."]


def about_launches(points: Sequence[Point]) -> list[str]:
    """A sentence where points of one curve were measured by different launches."""
    apart: list[str] = []
    for mode in MODES:
        own = [(point, {launch_of(name) for name in point.rounds} - {""}) for point in points if point.mode == mode]
        known = [launches for point, launches in own if launches or RELAUNCHED in point.marks]
        if len(known) > 1 and not set.intersection(*known):
            apart.append(mode)
    if not apart:
        return []
    return [
        f"Sizes of the {' and the '.join(apart)} curve were measured by different launches, "
        "and what two launches of the same "
        "differ by is in no interval: to compare them, measure all in one (--force, without --relaunch)."
    ]
