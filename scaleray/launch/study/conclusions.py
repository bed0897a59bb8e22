"""What follows from a study's measurements, complete or not: points, curves with their laws, words, marks."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scaleray.config import RunConfig
from scaleray.errors import UsageError, first_line
from scaleray.launch.study import noise as study_noise
from scaleray.launch.study.hardware import OVERSUBSCRIBED, RELAUNCHED, peak_flops
from scaleray.launch.study.plan import MODES, OnCurve, Plan, Question
from scaleray.launch.study.planner_law import planner_law
from scaleray.launch.study.turn_store import studies_of
from scaleray.records.run import EMULATED
from scaleray.records.study import Curve, Mode, NoiseCourse, Point, StudyRecord, ToTarget, Turn
from scaleray.records.workload_profile import WorkloadProfile
from scaleray.scaling.curves.curve_point import Prices, as_point
from scaleray.scaling.curves.curves import as_curve
from scaleray.scaling.curves.paired_rounds import launch_of
from scaleray.training.setup.job import TRAIN


@dataclass
class Measurements:
    """What is known so far, by the name of the rung."""

    turns: dict[str, list[Turn]]
    targets: dict[str, ToTarget] = field(default_factory=dict)
    noises: dict[str, NoiseCourse] = field(default_factory=dict)
    placements: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of workers on each node, by rung."""
    profile: WorkloadProfile | str = "they were not counted before the study ended"
    """Counts of the model's operations, or why they are not known."""

    @property
    def num_turns(self) -> int:
        """Number of turns of all rungs."""
        return sum(map(len, self.turns.values()))

    @property
    def is_emulated(self) -> bool:
        """Whether the model sleeps instead of computing."""
        return any(turn.is_emulated for turns in self.turns.values() for turn in turns)

    @property
    def hardware(self) -> list[dict[str, Any]]:
        """Each kind of worker once."""
        kinds = [kind for turns in self.turns.values() for turn in turns for kind in turn.hardware]
        return list({json.dumps(kind, sort_keys=True): kind for kind in kinds}.values())


@dataclass(frozen=True)
class Conclusions:
    """What follows from the measurements of the study `name`.

    cores: number of cores that its workers share, None where they have devices.
    """

    name: str
    config: RunConfig
    question: Question
    plan: Plan
    measured: Measurements
    cores: int | None
    workers_per_node: int

    def is_complete(self, place: OnCurve) -> bool:
        """Whether everything that was asked for is known of a point."""
        rung, known = self.plan.rungs[place.rung], self.measured
        return (
            len(known.turns[place.rung]) >= self.question.repeats
            and (not rung.trains_to_target or place.rung in known.targets)
            and (not rung.measures_noise or place.rung in known.noises)
        )

    def point(self, place: OnCurve) -> Point:
        """A point by its turns so far, at least one. Raises RunFailedError for an MFU over 100 %."""
        rung, turns, profile = self.plan.rungs[place.rung], self.measured.turns[place.rung], self.measured.profile
        is_emulated = any(turn.is_emulated for turn in turns)
        marks = [EMULATED] if is_emulated else []
        if self.cores is not None and rung.workers > self.cores and not is_emulated:  # sleeping workers need no core
            marks.append(OVERSUBSCRIBED)
        if self.question.relaunch:
            marks.append(RELAUNCHED)
        prices = Prices(
            per_worker_hour=self.config.study.price_per_worker_hour,
            peak_flops=peak_flops(self.config, turns),
            flops_per_sample=(profile.flops or None) if isinstance(profile, WorkloadProfile) else None,
        )
        return as_point(
            place.mode,
            place.workers,
            rung.job.recipe,
            turns,
            period=rung.period,
            prices=prices,
            marks=marks,
            tokens_per_sample=rung.job.splits[TRAIN].tokens_per_row,
            to_target=self.measured.targets.get(rung.name),
            noise=self.measured.noises.get(rung.name),
            reused_from=studies_of(turns, own=self.name),
        )

    def values(self, more: Iterable[StudyRecord]) -> dict[str, Any]:
        """The fields of the record that measurements decide. more: studies whose points stand on the same curves."""
        points = [self.point(place) for place in self.plan.places if self.measured.turns[place.rung]]
        for other in more:
            points += self._points_of(other, have={(p.mode, p.workers) for p in points})
        marks = list(dict.fromkeys(mark for point in points for mark in point.marks))
        notes: dict[str, None] = {}
        curves = []
        for mode in MODES:
            if own := [point for point in points if point.mode == mode]:
                curve, note = self._curve(mode, own)
                curves.append(curve)
                notes |= {note: None} if note else {}
        noisy = study_noise.surest(points)
        words = [curve.verdict for curve in curves if curve.verdict]
        words += about_target(str(self.config.stop.at), points)
        words += about_launches(points)
        words += [
            *([study_noise.sentence(noisy)] if noisy else []),
            *notes,
            *([self.plan.left_out] if self.plan.left_out else []),
        ]
        return {"curves": curves, "marks": marks, "words": words, "noise": study_noise.resolved(noisy)}

    def _points_of(self, other: StudyRecord, *, have: set[tuple[Mode, int]]) -> list[Point]:
        found = [at.point for curve in other.curves for at in curve.points if curve.mode in self.question.modes]
        return [
            dataclasses.replace(point, reused_from=point.reused_from or other.name)
            for point in found
            if (point.mode, point.workers) not in have
        ]

    def _curve(self, mode: Mode, points: Sequence[Point]) -> tuple[Curve, str]:
        """A curve with the planner's model among its laws, or a note why it is not."""
        laws, note = [], ""
        if len(points) > 1:
            try:
                known = self.measured
                law = planner_law(
                    self.config, known.profile, points, known.hardware, workers_per_node=self.workers_per_node
                )
                laws.append(law)
            except UsageError as exc:
                note = f"The planner's model is not among the laws: {first_line(exc).rstrip('.')}."
        # workers that sleep or share cores stay where they are, however many
        stays = any(mark in (EMULATED, OVERSUBSCRIBED) for point in points for mark in point.marks)
        curve = as_curve(
            mode,
            points,
            price_per_worker_hour=self.config.study.price_per_worker_hour,
            laws=laws,
            workers_per_node=None if stays else self.workers_per_node,
        )
        return curve, note


def about_target(target: str, points: Sequence[Point]) -> list[str]:
    """A sentence where not every point's training to the target reached it."""
    trained = [(point, point.to_target) for point in points if point.to_target is not None]
    missed = [(point, result) for point, result in trained if not result.is_reached]
    if not missed:
        return []
    sign = 1 if "<=" in target else -1
    point, nearest = min(missed, key=lambda pair: sign * pair[1].value if math.isfinite(pair[1].value) else math.inf)
    last = f"{nearest.metric} {nearest.value:.4g} after {nearest.samples} samples on {_workers(point.workers)}"
    if len(missed) == len(trained):
        return [
            f"The target {target} was never reached, the nearest is {last}: train longer (stop.after), or give another."
        ]
    names = ", ".join(
        f"{point.mode} {_workers(point.workers)} (batch {point.global_batch_size})" for point, _ in missed
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


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count != 1 else ''}"
