"""Whether one of two records is slower: of step times in steady state, with the interval of what noise alone would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scaleray.reports.compared_steps import steady_steps
from scaleray.scaling.regression import Change, change_of_pairs, change_of_turns
from scaleray.study_records import CurvePoint, Estimate, StudyRecord, SweepRecord, Trial
from scaleray.tracking.found_run import FoundRun

LEAST_STEPS = 8
"""Steady steps of each side, below which nothing is said."""


@dataclass(frozen=True)
class SpeedVerdict:
    """Time for the same work over the base's, in words and numbers; time_ratio is None where nothing can be said."""

    runs: str
    """Labels: `B`, or `B, D` for repeats."""
    base: str
    what: str
    words: str
    time_ratio: Estimate | None = None
    caveats: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        doubts = f" ({'; '.join(self.caveats)})" if self.caveats else ""
        return f"{self.runs} against {self.base}, {self.what}: {self.words}{doubts}"


def training_verdict(side: tuple[list[str], list[FoundRun]], base: tuple[list[str], list[FoundRun]]) -> SpeedVerdict:
    """Of trainings: the runs of each side, with their labels, are repeats of each other."""
    mine, theirs = (", ".join(labels) for labels, _ in (side, base))
    steps = [[(label, steady_steps(run)) for label, run in zip(*one, strict=True)] for one in (side, base)]
    every = [pair for one in steps for pair in one]
    for label, found in every:
        if found.num_steps < LEAST_STEPS:
            return SpeedVerdict(mine, theirs, "step time", f"nothing can be said: {label} has {found.described()}")
    sizes = {found.samples_per_step for _, found in every}
    what = "step time" if len(sizes) == 1 else "time per sample"
    scaled = [[found.times(per_sample=len(sizes) > 1) for _, found in one] for one in steps]
    change = change_of_turns(*scaled)
    caveats = [f"{label} was not steady: {found.why}" for label, found in every if found.why]
    if len({str(run.record.config.get("workload")) for _, runs in (side, base) for run in runs}) > 1:
        caveats.append("they train other workloads")
    caveats += [f"{label} changed its number of workers" for label, found in every if found.num_world_sizes > 1]
    return _verdict(mine, theirs, what, change, caveats)


def study_verdicts(label: str, record: StudyRecord, base: StudyRecord, *, base_label: str = "A") -> list[SpeedVerdict]:
    """Of studies: one for each mode and number of workers that both measured, by their turns."""
    mine, theirs = _points(record), _points(base)
    common = [key for key in theirs if key in mine]
    if not common:
        shown = [f"{mode} {workers}" for mode, workers in (*mine, *theirs)]
        text = f"nothing can be said: they have no mode and number of workers in common ({', '.join(shown)})"
        return [SpeedVerdict(label, base_label, "step time", text)]
    found = []
    for mode, workers in common:
        point, other = mine[mode, workers].point, theirs[mode, workers].point
        is_same_work = point.global_batch_size == other.global_batch_size
        of_point, of_other = (
            [[t / (1 if is_same_work else p.global_batch_size) for t in turn] for turn in p.turns]
            for p in (point, other)
        )
        what = f"{'step time' if is_same_work else 'time per sample'} of {workers} worker{'s' if workers > 1 else ''} ({mode})"
        caveats = [
            f"{name} is of {p.reused_from}" for name, p in ((label, point), (base_label, other)) if p.reused_from
        ]
        found.append(_verdict(label, base_label, what, change_of_turns(of_point, of_other), caveats))
    return found


def sweep_verdict(label: str, record: SweepRecord, base: SweepRecord, *, base_label: str = "A") -> SpeedVerdict:
    """Of sweeps: time per sample of trials with the same settings, as pairs."""
    mine, theirs = _trials(record), _trials(base)
    common = [key for key in theirs if key in mine]
    change = change_of_pairs([(1 / mine[key], 1 / theirs[key]) for key in common])
    what = f"time per sample of {len(common)} trials with the same settings"
    if change is None:
        text = "nothing can be said: it takes at least 3 trials with a measured speed that both sweeps have"
        return SpeedVerdict(label, base_label, what, text)
    return _verdict(label, base_label, what, change, [])


def _verdict(runs: str, base: str, what: str, change: Change, caveats: Sequence[str]) -> SpeedVerdict:
    return SpeedVerdict(runs, base, what, str(change), change.time_ratio, list(caveats))


def _points(record: StudyRecord) -> dict[tuple[str, int], CurvePoint]:
    return {(curve.mode, at.point.workers): at for curve in record.curves for at in curve.points}


def _trials(record: SweepRecord) -> dict[tuple[object, ...], float]:
    """Samples per s by settings, of trials that measured it; of two alike, the first."""
    found: dict[tuple[object, ...], float] = {}
    for trial in record.trials:
        if trial.samples_per_s:
            found.setdefault(_settings(trial), trial.samples_per_s)
    return found


def _settings(t: Trial) -> tuple[object, ...]:
    return t.batch_size, t.rule, round(t.learning_rate, 12), t.optimizer, t.warmup, t.seed, t.workers
