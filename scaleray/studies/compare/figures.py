"""Measurements of records side by side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaleray.common import metric_names as names
from scaleray.common.metric import Metric
from scaleray.records.rows import Row, by_metric
from scaleray.records.run_record import RunRecord
from scaleray.records.settings import best, settings
from scaleray.records.study_record import StudyRecord
from scaleray.records.sweep_record import SweepRecord
from scaleray.records.text.units import count, figure, seconds, shown, with_interval


@dataclass(frozen=True)
class Figure:
    """Name, values and formatted values of a measurement, in the order of the records; None and "" if a record lacks
    it."""

    name: str
    values: list[Any]
    shown: list[str]


def figures(records: Sequence[Any]) -> list[Figure]:
    """Measurements of records of one kind. Those that no record has are omitted."""
    make: dict[type, Callable[[Any], list[Figure]]] = {RunRecord: _training, StudyRecord: _study, SweepRecord: _sweep}
    rows = make[type(records[0])](records)
    return [row for row in rows if any(value is not None for value in row.values)]


def _row(name: str, values: Sequence[Any], show: Callable[[Any], str]) -> Figure:
    return Figure(name, list(values), ["" if value is None else show(value) for value in values])


def _measured(name: str, metric: Metric, found: Sequence[Mapping[Metric, Row]]) -> Figure:
    rows = [of.get(metric, Row(metric, None)) for of in found]
    return Figure(name, [row.value for row in rows], list(map(shown, rows)))


def _training(records: Sequence[RunRecord]) -> list[Figure]:
    found = [by_metric(record.rows()) for record in records]
    evaluations = [names.evaluation(name) for name in sorted(set().union(*(record.metrics for record in records)))]
    others = [metric for metric in found[0] if metric not in evaluations]
    of_learning = others.index(names.RECORD_FINAL_LOSS) + 1
    rows = [_row("verdict", [r.verdict.partition("\n")[0] for r in records], str)]
    for metric in [*others[:of_learning], *evaluations, *others[of_learning:]]:
        rows.append(_measured(metric.label, metric, found))
    return rows


def _study(records: Sequence[StudyRecord]) -> list[Figure]:
    curves = [{curve.mode: curve for curve in record.curves} for record in records]
    rows = []
    for mode in dict.fromkeys(mode for one in curves for mode in one):
        known = [one.get(mode) for one in curves]
        points = [{at.point.workers: at for at in curve.points} if curve else {} for curve in known]
        for n in sorted(set().union(*points)):
            at = [one.get(n) for one in points]
            name = f"{mode} {n}"
            rows.append(
                _row(f"{name}: samples/s", [p and p.point.samples_per_s for p in at], lambda e: with_interval(e, count))
            )
            if any(p is not None and curve and n > curve.base_workers for p, curve in zip(at, known, strict=True)):
                rows.append(
                    _row(f"{name}: efficiency", [p and p.efficiency for p in at], lambda e: with_interval(e, _percent))
                )
        rows.append(_row(f"{mode}: limit", [curve.limit or None if curve else None for curve in known], str))
        doublings = [curve.next_doubling.gain if curve and curve.next_doubling else None for curve in known]
        rows.append(_row(f"{mode}: next doubling", doublings, str))
    return rows


def _sweep(records: Sequence[SweepRecord]) -> list[Figure]:
    chosen = [best(settings(record), record.direction) for record in records]
    measured = [by_metric(setting.rows() if setting else []) for setting in chosen]
    return [
        _row("trials", [len(r.trials) for r in records], count),
        _row("of them failed", [sum(t.status == "failed" for t in r.trials) for r in records], count),
        _row("best batch size", [s and s.batch_size for s in chosen], count),
        _row("best learning rate", [s and s.learning_rate for s in chosen], figure),
        _row("best rule", [s and s.rule for s in chosen], str),
        _measured(f"best {records[0].metric}", names.TRIAL_VALUE, measured),
        _measured("its samples to target", names.TRIAL_SAMPLES_TO_TARGET, measured),
        _measured("its time to target", names.TRIAL_TIME_TO_TARGET_S, measured),
        _row("duration", [r.duration_s for r in records], seconds),
    ]


def _percent(value: Any) -> str:
    return f"{value:.0%}"
