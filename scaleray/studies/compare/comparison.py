"""Differences between recorded runs, studies or sweeps: conditions, measurements, curves and speed.

The first record is the base. Records that repeat each other (`records.conditions.repeat_key`) are grouped if they are
compared with others; their interval then covers the spread between launches. Without repeats, this spread is unknown,
and no record is called slower or faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaleray.common.installed import names_what_is_missing
from scaleray.errors import UsageError
from scaleray.live.steps_file import step_rows
from scaleray.recording.find_record import FoundRun, find_run
from scaleray.records.conditions import Difference, conditions, differences, repeat_key
from scaleray.records.json_record import JsonRecord
from scaleray.records.run_record import RunRecord
from scaleray.records.study_record import StudyRecord
from scaleray.records.sweep_record import SweepRecord
from scaleray.studies.compare.figures import Figure, figures
from scaleray.studies.compare.speed import SpeedVerdict, study_verdicts, sweep_verdict, training_verdict


def loss_difference(label: str, run: FoundRun, base: FoundRun) -> str:
    """Sentence on losses: equal to the bit, or the first step that differs and the largest relative difference."""
    mine, theirs = _losses(run), _losses(base)
    common = sorted(mine.keys() & theirs.keys())
    who = f"losses of {label} and A"
    if not common:
        return f"{who}: there are no common steps to compare"
    # a loss that is not finite equals itself here
    apart = [step for step in common if repr(mine[step]) != repr(theirs[step])]
    if not apart:
        return f"{who}: equal to the bit in all {len(common)} common steps"
    distances = {step: abs(mine[step] - theirs[step]) / max(abs(theirs[step]), 1e-300) for step in apart}
    worst = max(distances, key=lambda step: distances[step] if distances[step] == distances[step] else float("inf"))
    return (
        f"{who}: differ first at step {apart[0]}, by {distances[apart[0]]:.1e} of A's; "
        f"most at step {worst}, by {distances[worst]:.1e}"
    )


def _losses(run: FoundRun) -> dict[int, float]:
    return {int(row["step"]): row["loss"] for row in step_rows(run.steps)}


KINDS = {RunRecord: "training", StudyRecord: "scaling study", SweepRecord: "sweep"}
SINGLE = (
    "single launches: the spread between launches is unknown, so none is called slower or faster; give several "
    "launches of each"
)
EXIT_INCONCLUSIVE = 3
"""Exit status of `scaleray compare --fail-if-slower` if there are too few launches for a verdict."""
MOST_BY_CHANCE = 4
"""Number of verdicts, each at 95 %, from which a note warns of a difference by chance."""


@dataclass(frozen=True)
class Compared:
    """One of the compared records. label: A, B, ...; the name in the tables. group: the label of the first
    of its repeats."""

    label: str
    name: str
    where: str
    group: str


@dataclass(frozen=True)
class Comparison(JsonRecord):
    """The result. Values of differences and measurements are in the order of `runs`."""

    kind: str
    runs: list[Compared]
    differences: list[Difference]
    figures: list[Figure]
    verdicts: list[SpeedVerdict]
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The runs by label, their differences, and the verdicts on their speed."""
        runs = ", ".join(f"{run.label} {run.name}" for run in self.runs)
        keys = ", ".join(difference.key for difference in self.differences[:10])
        differs = f"{len(self.differences)} differences: {keys}" if keys else "no difference in their conditions"
        return [f"{self.kind}: {runs}", differs, *(f"{v.runs} against {v.base}: {v.words}" for v in self.verdicts)]

    def slower_by_more_than(self, per_cent: float) -> list[SpeedVerdict]:
        """Verdicts whose whole interval exceeds this many per cent, with enough launches for a verdict."""
        return [v for v in self.verdicts if v.verdict == "slower" and _is_beyond(v, per_cent)]

    def unclear_beyond(self, per_cent: float) -> list[SpeedVerdict]:
        """Verdicts that cannot exclude a slowdown by this many per cent: the known noise does not explain the
        difference and launches are too few, or there is no basis for a verdict."""
        return [v for v in self.verdicts if v.verdict == "inconclusive" and _is_beyond(v, per_cent)]


@names_what_is_missing
def compare(*runs: str | Path, uri: str | None = None) -> Comparison:
    """Compare recorded trainings, studies or sweeps with the first one, and decide whether one is slower.

    runs: folders, names in the storage path, or ids or names in MLflow at `uri`. Raises UsageError.
    """
    return compared([find_run(str(run), uri=uri) for run in runs])


def compared(found: Sequence[FoundRun]) -> Comparison:
    """Compare two or more of one kind, each with the first. Raises UsageError for fewer, or for different kinds."""
    _check(found)
    records: list[Any] = [one.record for one in found]
    kind = KINDS[type(records[0])]
    labels = [_label(number) for number in range(len(found))]
    groups = _groups(records)
    runs = [
        Compared(label, one.record.name, one.where, labels[groups[number]])
        for number, (label, one) in enumerate(zip(labels, found, strict=True))
    ]
    notes: list[str] = []
    verdicts: list[SpeedVerdict] = []
    subjects: Sequence[Any] = found if kind == "training" else records
    members = {first: [n for n, group in enumerate(groups) if group == first] for first in sorted(set(groups))}
    alike = subjects if len(set(map(repeat_key, records))) == 1 else ()
    for first in list(members)[1:]:
        sides = [([labels[n] for n in members[at]], [subjects[n] for n in members[at]]) for at in (first, 0)]
        if kind == "training":
            verdicts.append(training_verdict(*sides, alike=alike))
        elif kind == "scaling study":
            verdicts += study_verdicts(*sides, alike=alike)
        else:
            verdicts.append(sweep_verdict(*sides, alike=alike))
    if kind == "training":
        same = [n for n in range(1, len(found)) if _workload(records[n]) == _workload(records[0])]
        notes += [loss_difference(labels[n], found[n], found[0]) for n in same]
    if any(v.basis not in ("", "launches") for v in verdicts):
        notes.append(SINGLE)
    if sum(v.time_ratio is not None for v in verdicts) >= MOST_BY_CHANCE:
        notes.append("intervals are 95 %: of 20 equal values, one exceeds the noise by chance")
    return Comparison(
        kind, runs, differences([conditions(record) for record in records]), figures(records), verdicts, notes
    )


def _check(found: Sequence[FoundRun]) -> None:
    if len(found) < 2:
        raise UsageError.problem("Give", f"at least two RUNs, not {len(found)}", "scaleray compare RUN RUN")
    first = type(found[0].record)
    for one in found[1:]:
        if type(one.record) is not first:
            raise UsageError.problem(
                one.record.name,
                f"is a {KINDS[type(one.record)]}, but {found[0].record.name} is a {KINDS[first]}",
                "compare records of one kind: trainings, studies or sweeps",
            )
    places = [one.where for one in found]
    if twice := [place for number, place in enumerate(places) if place in places[:number]]:
        raise UsageError.problem("RUN", f"{twice[0]} is given more than once")


def _groups(records: Sequence[Any]) -> list[int]:
    """Index of the first record that each record repeats; its own index if all are alike or none is a repeat."""
    keys = list(map(repeat_key, records))
    groups = [keys.index(key) for key in keys]
    return groups if len(set(groups)) > 1 else list(range(len(records)))


def _is_beyond(verdict: SpeedVerdict, per_cent: float) -> bool:
    return verdict.time_ratio is None or verdict.time_ratio.low > 1 + per_cent / 100


def _workload(record: RunRecord) -> str:
    return str(record.config.get("workload", {}).get("name"))


def _label(number: int) -> str:
    """A, B ... Z, A1, B1 ..."""
    round_, letter = divmod(number, 26)
    return chr(ord("A") + letter) + (str(round_) if round_ else "")
