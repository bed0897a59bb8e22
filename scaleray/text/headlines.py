"""A study's or a sweep's result in one short line, above the verdicts: on the page, on the terminal and in MLflow."""

from __future__ import annotations

from collections import Counter

from scaleray.records.settings import Setting, best, settings
from scaleray.records.study import Curve, Estimate, StudyRecord
from scaleray.records.sweep import SweepRecord
from scaleray.text.units import count, figure

KNOWN_WITHIN = 3.0
"""Factor between an interval's ends beyond which the interval stands in the headline itself."""


def study_headline(record: StudyRecord) -> str:
    """How much faster the largest number of workers is, and what the next doubling would give, for the first curve."""
    curve = next((curve for curve in record.curves if curve.points), None)
    if curve is None:
        return "No curve was measured"
    last = curve.points[-1]
    workers = last.point.workers
    if len(curve.points) == 1:
        rate = f"{count(last.point.samples_per_s.value)} samples/s on {workers} worker{'s' if workers > 1 else ''}"
        return f"{rate}; a curve needs a second number of workers"
    known = (
        f"{last.efficiency.value:.0%} of ideal" if _is_known(last.speedup) else f"known only to {_span(last.speedup)}"
    )
    speed = f"{last.speedup.value:.3g}× on {workers} workers, {known}"
    return f"{curve.mode.capitalize()} scaling: {speed}; {_outlook(curve)}"


def sweep_headline(record: SweepRecord) -> str:
    """Which batch size is the fastest and which the cheapest to the target; without a target, the best value."""
    found = settings(record)
    reached = [setting for setting in found if setting.samples_to_target is not None]
    if reached:
        return f"{_fastest_and_cheapest(reached, record.direction)} to {record.target}"
    chosen = best([setting for setting in found if setting.value is not None], record.direction)
    if chosen is None:
        statuses = Counter(trial.status for trial in record.trials).most_common(2)
        return "No trial gave a result" + "".join(f", {n} {status}" for status, n in statuses)
    where = f"{figure(chosen.value)} at batch {chosen.batch_size}, learning rate {chosen.learning_rate:.3g}"
    return (
        f"No setting reached {record.target}; the closest: {where}"
        if record.target
        else f"Best {record.metric}: {where}"
    )


def _fastest_and_cheapest(reached: list[Setting], direction: str) -> str:
    timed = [setting for setting in reached if setting.time_to_target_s is not None]
    cheapest = best(reached, direction)
    fastest = min(timed, key=lambda setting: setting.time_to_target_s or 0.0, default=cheapest)
    assert cheapest is not None and fastest is not None
    if fastest.batch_size == cheapest.batch_size:
        return f"Batch {fastest.batch_size} is fastest and cheapest"
    return f"Batch {fastest.batch_size} is fastest, batch {cheapest.batch_size} cheapest"


def _outlook(curve: Curve) -> str:
    doubling = curve.next_doubling
    if doubling is None:
        return "no next doubling is predicted"
    return f"doubling to {doubling.workers} would give {doubling.gain.value:.2f}×"


def _is_known(estimate: Estimate) -> bool:
    return estimate.low > 0 and estimate.high <= KNOWN_WITHIN * estimate.low


def _span(estimate: Estimate) -> str:
    return f"{estimate.low:.2g}–{estimate.high:.2g}×"
