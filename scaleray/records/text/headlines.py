"""One-line headline of a study or a sweep, shown above the verdicts on the page, on the terminal and in MLflow."""

import math
from collections import Counter

from scaleray.common.printed import quantity
from scaleray.records.settings import Setting, best, settings
from scaleray.records.study_record import Curve, CurvePoint, Estimate, StudyRecord
from scaleray.records.sweep_record import SweepRecord
from scaleray.records.text.units import count, figure, seconds

MUCH_FASTER = 1.1
"""Minimum certain gain in throughput from twice the workers; below it, they mostly wait for each other."""
KNOWN_WITHIN = 3.0
"""Factor between an interval's ends beyond which the headline shows the interval."""


def study_headline(record: StudyRecord) -> str:
    """Recommended number of workers according to the first curve, and its speed-up. The verdict below has the gain of
    the next doubling.
    """
    curve = next((curve for curve in record.curves if curve.points), None)
    if curve is None:
        return "No curve was measured"
    last = curve.points[-1]
    workers = last.point.workers
    if len(curve.points) == 1:
        rate = f"{count(last.point.samples_per_s.value)} samples/s on {quantity(workers, 'worker')}"
        return f"{rate}; a curve needs a second number of workers"
    chosen = worth_using(curve)
    number = quantity(chosen.point.workers, "worker")
    others = f"{workers} workers are {_times(last)} as fast as {curve.base_workers}"
    if not _is_known(last.speedup):
        return f"How many workers to use is unclear: {others}, known only within {_span(last.speedup)}"
    share = f"{last.efficiency.value:.0%} of ideal ({curve.mode} scaling)"
    if chosen is not last and last.speedup.value > _surely_faster(chosen, last):
        return f"Whether {workers} workers are worthwhile is unclear: {others} ({_span(last.speedup)})"
    if chosen is not last:
        return f"Stay on {number}: {others}, {share}"
    return f"Use {number}: {_times(last)} as fast as {curve.base_workers}, {share}"


def worth_using(curve: Curve) -> CurvePoint:
    """The smallest worthwhile number of workers: beyond it, twice as many are not certainly MUCH_FASTER.

    Certainty follows from the intervals: the slower end of the larger size is compared with the value of the smaller
    one.
    """
    chosen = curve.points[0]
    for at in curve.points[1:]:
        if at.speedup.low > _surely_faster(chosen, at):
            chosen = at
    return chosen


def would_pay(curve: Curve) -> str:
    """Sentence with the step time from which the largest number of workers would be worthwhile; empty if it already is,
    or if no step time suffices. Assumes that the overhead of each step stays the same."""
    chosen, last = worth_using(curve), curve.points[-1]
    before, now = chosen.point.step_time_s.value, last.point.step_time_s.value
    ratio = last.point.workers / chosen.point.workers
    much = MUCH_FASTER ** math.log2(ratio)
    rest = ratio - much if curve.mode == "weak" else 1 - much / ratio
    extra = now - (before if curve.mode == "weak" else before / ratio)
    if chosen is last or last.speedup.value > _surely_faster(chosen, last) or extra <= 0:
        return ""
    number = quantity(chosen.point.workers, "worker")
    return (
        f"A step takes {seconds(before)} on {number}: from about {seconds(much * extra / rest)}, with more work in it, "
        f"{last.point.workers} would be worthwhile"
    )


def _surely_faster(chosen: CurvePoint, at: CurvePoint) -> float:
    """Speed-up that a larger number of workers must exceed to be worthwhile."""
    return chosen.speedup.value * MUCH_FASTER ** math.log2(at.point.workers / chosen.point.workers)


def sweep_headline(record: SweepRecord) -> str:
    """Headline with the fastest and the cheapest batch size to the target or, without a target, the best value."""
    found = settings(record)
    reached = [setting for setting in found if setting.samples_to_target is not None]
    if reached:
        return f"{_fastest_and_cheapest(reached, record.direction)} to {record.target}"
    chosen = best([setting for setting in found if setting.value is not None], record.direction)
    if chosen is None:
        statuses = Counter(trial.status for trial in record.trials).most_common(2)
        return "No trial produced a result" + "".join(f", {n} {status}" for status, n in statuses)
    where = f"{figure(chosen.value)} at batch {chosen.batch_size}, learning rate {chosen.learning_rate:.3g}"
    return (
        f"No setting reached {record.target}; closest: {where}" if record.target else f"Best {record.metric}: {where}"
    )


def _fastest_and_cheapest(reached: list[Setting], direction: str) -> str:
    timed = [setting for setting in reached if setting.time_to_target_s is not None]
    cheapest = best(reached, direction)
    fastest = min(timed, key=lambda setting: setting.time_to_target_s or 0.0, default=cheapest)
    assert cheapest is not None and fastest is not None
    if fastest.samples_to_target == cheapest.samples_to_target or fastest.batch_size == cheapest.batch_size:
        return f"Batch {fastest.batch_size} is fastest and cheapest"
    return f"Batch {fastest.batch_size} is fastest, batch {cheapest.batch_size} cheapest"


def _times(at: CurvePoint) -> str:
    return f"{at.speedup.value:.3g}×"


def _is_known(estimate: Estimate) -> bool:
    return estimate.low > 0 and estimate.high <= KNOWN_WITHIN * estimate.low


def _span(estimate: Estimate) -> str:
    return f"{estimate.low:.2g}–{estimate.high:.2g}×"
