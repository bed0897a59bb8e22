"""Compare the steady-state step times of two sets of launches, with an interval for the noise."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scaleray.common.printed import quantity
from scaleray.live.steps_file import step_rows
from scaleray.profiling.verdict.findings import Limit, Verdict
from scaleray.profiling.verdict.of_run import verdict_of_run
from scaleray.recording.find_record import FoundRun
from scaleray.records.study_record import Estimate, Point, StudyRecord
from scaleray.records.sweep_record import SweepRecord, Trial
from scaleray.records.text.units import seconds
from scaleray.studies.curves.efficiency import Turns
from scaleray.studies.curves.paired_rounds import launch_of
from scaleray.studies.curves.regression import Change, change_of_launches, change_of_trials
from scaleray.studies.curves.steady_state import steady_state


@dataclass(frozen=True)
class SteadySteps:
    """Times in seconds of the full batches after the warm-up. why: reason why they are not steady, or ""."""

    step_times_s: list[float]
    samples_per_step: int
    why: str
    num_world_sizes: int

    @property
    def num_steps(self) -> int:
        """Number of steady steps."""
        return len(self.step_times_s)

    def times(self, *, per_sample: bool) -> list[float]:
        """Seconds per step, or per sample."""
        return [time / (self.samples_per_step if per_sample else 1) for time in self.step_times_s]

    def described(self) -> str:
        """Number of steady steps as text, or `no step times` with the reason."""
        return (
            f"too few steady steps: {self.num_steps}"
            if self.step_times_s
            else "no step times: its steps.csv is missing or empty"
        )


def steady_steps(run: FoundRun) -> SteadySteps:
    """Steps after the warm-up. Only full batches are compared, as the last batch of an epoch may be smaller."""
    rows = [row for row in step_rows(run.steps) if row.get("step_time_s", 0.0) > 0]
    size = int(max((row["num_samples"] for row in rows), default=0))
    whole = [row for row in rows if row["num_samples"] == size]
    times = [row["step_time_s"] for row in whole]
    steady = steady_state(times)
    sizes = {row["world_size"] for row in whole if "world_size" in row}
    return SteadySteps(times[steady.first :], size, steady.why, len(sizes))


MOST_OF_IT = 0.5
"""Smallest share of the difference at which a limit counts as its cause."""


def seconds_by_limit(verdict: Verdict) -> dict[str, float]:
    """Seconds of a mean step spent on each limit and on computing."""
    return {limit: share * verdict.step_s for limit, share in verdict.shares.items()}


def reason_of(base: Verdict, other: Verdict) -> str:
    """Main cause of the difference between two trainings, as text; "" if no single cause is known."""
    if Limit.INCOMPLETE in (base.limit, other.limit) or other.step_s == base.step_s:
        return ""
    before, after = seconds_by_limit(base), seconds_by_limit(other)
    whole = other.step_s - base.step_s
    more = {limit: after.get(limit, 0.0) - before.get(limit, 0.0) for limit in {**before, **after}}
    limit = max(more, key=lambda name: more[name] / whole)
    if more[limit] / whole < MOST_OF_IT:
        return ""
    place = f" ({_place(other if whole > 0 else base)})" if limit == Limit.STRAGGLER else ""
    return f"most of it is {limit}{place}: {seconds(abs(more[limit]))} a step {'more' if whole > 0 else 'less'}"


def _place(verdict: Verdict) -> str:
    """Ranks that delay the others, and where."""
    found = next((one for one in (verdict.primary, *verdict.others) if one.limit is Limit.STRAGGLER), None)
    if found is None:
        return "ranks wait for each other"
    many = "s" if len(found.ranks) > 1 else ""
    return f"rank{many} {', '.join(map(str, found.ranks[:8]))} in {found.phase}"


LEAST_STEPS = 8
"""Minimum number of steady steps of each side for a verdict."""


@dataclass(frozen=True)
class SpeedVerdict:
    """Time for the same work relative to the base, as text and numbers; time_ratio is None if there is no verdict."""

    runs: str
    """Labels of the compared runs: `B`, or `B, D` for repeats."""
    base: str
    what: str
    words: str
    time_ratio: Estimate | None = None
    """Time relative to the base; if the verdict is `inconclusive`, the interval covers only the known noise."""
    caveats: list[str] = field(default_factory=list)
    verdict: str = "inconclusive"
    """`slower`, `faster`, `no difference` or `inconclusive`, see `Change.verdict`."""
    basis: str = ""
    """Basis of the interval, see `Change`; "" without a result."""
    repeats: int | None = None
    """Launches of each side needed to detect a difference as large as this one, see `Change.repeats`."""

    def __str__(self) -> str:
        doubts = f" ({'; '.join(self.caveats)})" if self.caveats else ""
        return f"{self.runs} against {self.base}, {self.what}: {self.words}{doubts}"


Side = tuple[Sequence[str], Sequence[Any]]
"""Labels of records that repeat each other, and the records."""


def training_verdict(side: Side, base: Side, *, alike: Sequence[FoundRun] = ()) -> SpeedVerdict:
    """Verdict on trainings (FoundRun). alike: all compared runs if they are all the same."""
    mine, theirs = (", ".join(labels) for labels, _ in (side, base))
    steps = [[(label, steady_steps(run)) for label, run in zip(*one, strict=True)] for one in (side, base)]
    every = [pair for one in steps for pair in one]
    for label, found in every:
        if found.num_steps < LEAST_STEPS:
            return SpeedVerdict(mine, theirs, "step time", f"no result: {label} has {found.described()}")
    others = [found for found in map(steady_steps, alike) if found.num_steps >= LEAST_STEPS]
    sizes = {found.samples_per_step for _, found in every}
    what = "step time" if len(sizes) == 1 else "time per sample"

    def times(of: Sequence[SteadySteps]) -> list[Turns]:
        return [[found.times(per_sample=len(sizes) > 1)] for found in of]

    change = change_of_launches(*(times([found for _, found in one]) for one in steps), alike=times(others))
    caveats = [f"{label} was not steady: {found.why}" for label, found in every if found.why]
    if len({str(run.record.config.get("workload")) for _, runs in (side, base) for run in runs}) > 1:
        caveats.append("they train different workloads")
    caveats += [f"{label} changed its number of workers" for label, found in every if found.num_world_sizes > 1]
    verdict = _verdict(mine, theirs, what, change, caveats)
    if len(sizes) > 1 or verdict.verdict == "no difference" or not (reason := _reason(side, base)):
        return verdict
    return dataclasses.replace(verdict, words=f"{verdict.words}; {reason}")


def _reason(side: Side, base: Side) -> str:
    """Cause of the difference according to the profiles of two trainings, the first of each side's repeats; "" if there
    is no single cause or a profile is missing."""
    mine, theirs = (verdict_of_run(runs[0].record) for _, runs in (side, base))
    return reason_of(theirs, mine)


def study_verdicts(side: Side, base: Side, *, alike: Sequence[StudyRecord] = ()) -> list[SpeedVerdict]:
    """Verdicts on studies (StudyRecord): one for each mode and number of workers that all studies measured."""
    mine, theirs = (", ".join(labels) for labels, _ in (side, base))
    points = [[_points(record) for record in records] for _, records in (side, base)]
    every = [one for of_side in points for one in of_side]
    common = [key for key in points[1][0] if all(key in one for one in every)]
    if not common:
        shown = [f"{mode} {workers}" for one in every for mode, workers in one]
        text = f"no result: they have no mode and number of workers in common ({', '.join(shown)})"
        return [SpeedVerdict(mine, theirs, "step time", text)]
    more = list(map(_points, alike))
    found = []
    for mode, workers in common:
        of_sides = [[one[mode, workers] for one in of_side] for of_side in points]
        sizes = {point.global_batch_size for of_side in of_sides for point in of_side}
        launches = [_launches(of_side, per_sample=len(sizes) > 1) for of_side in of_sides]
        same = _launches([one[mode, workers] for one in more if (mode, workers) in one], per_sample=len(sizes) > 1)
        unit = "step time" if len(sizes) == 1 else "time per sample"
        what = f"{unit} of {quantity(workers, 'worker')} ({mode})"
        caveats = [
            f"{label} is of {one[mode, workers].reused_from}"
            for (labels, _), of_side in zip((side, base), points, strict=True)
            for label, one in zip(labels, of_side, strict=True)
            if one[mode, workers].reused_from
        ]
        found.append(_verdict(mine, theirs, what, change_of_launches(*launches, alike=same), caveats))
    return found


def sweep_verdict(side: Side, base: Side, *, alike: Sequence[SweepRecord] = ()) -> SpeedVerdict:
    """The verdict on sweeps (SweepRecord): time per sample of trials with the same settings, as pairs."""
    mine, theirs = (", ".join(labels) for labels, _ in (side, base))
    trials = [[_trials(record) for record in records] for _, records in (side, base)]
    change = change_of_trials(*trials, alike=list(map(_trials, alike)))
    every = [one for of_side in trials for one in of_side]
    num_common = sum(all(key in one for one in every) for key in every[0])
    what = f"time per sample of {num_common} trials with the same settings"
    if change is None:
        text = "no result: at least 3 trials with a measured speed in all sweeps are needed"
        return SpeedVerdict(mine, theirs, what, text)
    return _verdict(mine, theirs, what, change, [])


def _verdict(runs: str, base: str, what: str, change: Change, caveats: Sequence[str]) -> SpeedVerdict:
    return SpeedVerdict(
        runs, base, what, str(change), change.time_ratio, list(caveats), change.verdict, change.basis, change.repeats
    )


def _points(record: StudyRecord) -> dict[tuple[str, int], Point]:
    return {(curve.mode, at.point.workers): at.point for curve in record.curves for at in curve.points}


def _launches(points: Sequence[Point], *, per_sample: bool) -> list[Turns]:
    """Measurements of each launch. A study is one launch; a reused measurement belongs to its original launch."""
    found: dict[str, list[list[float]]] = {}
    for number, point in enumerate(points):
        rounds = point.rounds or [""] * len(point.turns)
        for name, turn in zip(rounds, point.turns, strict=True):
            turns = found.setdefault(launch_of(name) or f"/{number}", [])
            times = [step / (point.global_batch_size if per_sample else 1) for step in turn]
            if times and times not in turns:
                turns.append(times)
    return [turns for turns in found.values() if turns]


def _trials(record: SweepRecord) -> dict[tuple[object, ...], float]:
    """Seconds per sample of trials with their own measurement, by settings; the first trial of equal ones."""
    found: dict[tuple[object, ...], float] = {}
    for trial in record.trials:
        if trial.samples_per_s and trial.same_as is None:
            found.setdefault(_settings(trial), 1 / trial.samples_per_s)
    return found


def _settings(t: Trial) -> tuple[object, ...]:
    return t.batch_size, t.rule, round(t.learning_rate, 12), t.optimizer, t.warmup, t.seed, t.workers
