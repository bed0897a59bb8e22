"""A scaling curve from measured points: speed-ups with intervals, fitted laws, the next doubling, and a verdict as
text."""

from collections.abc import Sequence
from dataclasses import replace

from scaleray.errors import UsageError
from scaleray.profiling.verdict.advice import about_contention, about_little_work, advice_on
from scaleray.profiling.verdict.findings import Limit
from scaleray.profiling.verdict.signals import Facts
from scaleray.records.study_record import Curve, CurvePoint, Estimate, Fit, Mode, NextDoubling, Point
from scaleray.records.text.headlines import would_pay
from scaleray.studies.curves import extrapolation
from scaleray.studies.curves.efficiency import curve_points, scaled
from scaleray.studies.curves.extrapolation import to_text
from scaleray.studies.curves.fitting import FittedLaw, fit_laws
from scaleray.studies.curves.laws import GivenLaw

LEAST_LOSS = 0.05
"""Minimum lost share of the step time for a limit to be named."""
LARGE_SHARE = 0.2
"""Share of the step time from which communication or input is a limit although it has not grown since the base."""
WORDS = {
    "communication": "communication is the limit",
    "input": "the input is the limit",
    "contention": "contention between workers is the limit",
    "compute": "too little work for each worker is the limit",
    "computing or communication": "computing and communication, not measured separately here, are the limit",
    "nothing yet": "there is no limit yet",
}
"""Values of `Curve.limit`, each with the beginning of its sentence."""

AS_IN_PROFILES = {
    "communication": Limit.COMMUNICATION,
    "input": Limit.INPUT,
    "contention": Limit.STRAGGLER,
    "compute": Limit.COMPUTE,
    "computing or communication": Limit.COMMUNICATION,
    "nothing yet": Limit.COMPUTE,
}
"""Limits that a profile can have; a curve also detects too little work or too few cores."""


def limit_of(mode: Mode, base: Point, largest: CurvePoint) -> str:
    """Limit of the largest point: a key of WORDS, or "" for a curve of one point."""
    point = largest.point
    if point.workers == base.workers:
        return ""
    shares = lost_shares(mode, base, point)
    is_lost = largest.efficiency.value <= 1 - LEAST_LOSS and largest.efficiency.high < 1
    if is_lost and max(shares.values()) > 0:
        worst = max(shares, key=lambda name: shares[name])
        if worst == "waiting":
            return "contention"
        if worst != "compute":
            return worst
        if point.exposed_comm_s is None:
            return "computing or communication"
        # each worker computes what one of the base computes, so that it can only be slower by sharing something
        return "contention" if mode == "weak" or "oversubscribed" in point.marks else "compute"
    parts = {"communication": point.exposed_comm_s or 0.0, "input": point.input_wait_s}
    largest_part = max(parts, key=lambda name: parts[name])
    return largest_part if parts[largest_part] >= LARGE_SHARE * point.step_time_s.value else "nothing yet"


def lost_shares(mode: Mode, base: Point, point: Point) -> dict[str, float]:
    """Excess of each part over the ideal, as a share of the point's step time; negative if better. The sum is `1 -
    efficiency`.

    waiting: time spent waiting for the slowest worker of a step."""
    ideal = base.workers / point.workers if mode == "strong" else 1.0
    whole = point.step_time_s.value
    return {
        "communication": ((point.exposed_comm_s or 0.0) - ideal * (base.exposed_comm_s or 0.0)) / whole,
        "input": (point.input_wait_s - ideal * base.input_wait_s) / whole,
        "compute": (point.compute_s - ideal * base.compute_s) / whole,
        "waiting": (point.other_s - ideal * base.other_s) / whole,
    }


def advice(limit: str, point: Point) -> str:
    """Remedy for a limit, with config keys, as in a profile's advice; "" if there is none."""
    about = Facts(
        point.workers,
        point.strategy,
        point.accumulation_steps,
        point.global_batch_size,
        is_oversubscribed="oversubscribed" in point.marks,
    )
    if limit == "contention":
        return about_contention(about).text
    if limit == "compute":
        return about_little_work(about).text
    return advice_on(AS_IN_PROFILES[limit], about).text


def verdict_of(
    largest: CurvePoint, doubling: NextDoubling | None, reason: str, limit: str, price_per_worker_hour: float | None
) -> str:
    """The verdict as one sentence."""
    if doubling is not None:
        first = (
            f"the next doubling to {doubling.workers} workers would give {to_text(doubling.gain)} "
            f"for {doubling.cost_factor:g}x the cost"
        )
        if price_per_worker_hour is not None:
            first += f", {_price_of_a_million(largest, doubling, price_per_worker_hour)}"
    else:
        first = f"no next doubling is predicted: {reason}"
    second = ""
    if limit:
        advised = advice(limit, largest.point)
        second = f"; {WORDS[limit]}" + (f": {advised}" if advised else _efficiency(largest))
    marks = [mark for mark in largest.point.marks if mark in ("oversubscribed", "emulated")]
    return first + second + (f" ({', '.join(marks)})" if marks else "") + "."


def _efficiency(largest: CurvePoint) -> str:
    e = largest.efficiency
    return f": {e.value:.0%} ({e.low:.0%}-{e.high:.0%}) of ideal on {largest.point.workers} workers"


def _price_of_a_million(largest: CurvePoint, doubling: NextDoubling, price_per_worker_hour: float) -> str:
    rate = largest.point.samples_per_s
    now = price_per_worker_hour / 3600 * largest.point.workers * 1e6 / rate.value
    gain = doubling.gain
    then = scaled(Estimate(1 / gain.value, 1 / gain.high, 1 / gain.low), doubling.cost_factor * now)
    return f"{then.value:.3g} ({then.low:.3g}-{then.high:.3g}) a million samples instead of {now:.3g}"


__all__ = ["GivenLaw", "as_curve"]

DEFAULT_LAW = {"strong": "amdahl", "weak": "gustafson"}
"""Law used for each mode with only two points, which every law fits exactly."""


def as_curve(
    mode: Mode,
    points: Sequence[Point],
    *,
    price_per_worker_hour: float | None = None,
    laws: Sequence[GivenLaw] = (),
    workers_per_node: int | None = None,
) -> Curve:
    """Derive the curve of one mode from its points: speed-ups, fits, the next doubling, the limit and a verdict.

    laws: further laws to fit and compare in addition to Amdahl's, Gustafson's and the USL. workers_per_node: number of
    workers on a node; a doubling that needs a second node is not predicted if all points fit on one. Raises UsageError
    for points that do not belong to one curve: none, two of one size, another mode, or inconsistent global batches."""
    _check(mode, points)
    found = curve_points(points)
    limit = limit_of(mode, found[0].point, found[-1])
    reason = extrapolation.refusal(found, workers_per_node)
    fitted = fit_laws([p.point for p in found], laws) if len(found) > 1 else []
    best = _best(mode, fitted)
    doubling = extrapolation.next_doubling(found, best) if best is not None and not reason else None
    if doubling is not None and extrapolation.is_too_wide(doubling):
        gain = to_text(doubling.gain)
        reason = (
            f"twice the workers would give {gain} the throughput; the interval is too wide to act on: measure "
            f"{doubling.workers}"
        )
        doubling = None
    curve = Curve(
        mode=mode,
        base_workers=found[0].point.workers,
        points=found,
        fits=[
            Fit(
                law=f.law.name,
                parameters=f.parameters(),
                held_out_error=f.held_out_error,
                band=extrapolation.band(found, f),
            )
            for f in fitted
        ],
        best_law=best.law.name if best else None,
        next_doubling=doubling,
        limit=limit,
    )
    verdict = verdict_of(found[-1], doubling, reason, limit, price_per_worker_hour)
    needed = would_pay(curve)
    return replace(curve, verdict=f"{mode.capitalize()} scaling: {verdict}" + (f" {needed}." if needed else ""))


def _best(mode: Mode, fitted: Sequence[FittedLaw]) -> FittedLaw | None:
    """Law with the smallest held-out error, the simplest if equal; the mode's default if none can be compared."""
    if any(f.held_out_error is None for f in fitted):
        return next(f for f in fitted if f.law.name == DEFAULT_LAW[mode])
    return min(fitted, key=lambda f: f.held_out_error or 0.0, default=None)


def _check(mode: Mode, points: Sequence[Point]) -> None:
    if not points:
        raise UsageError.problem(f"the {mode} curve", "has no points: it needs at least one measured number of workers")
    sizes = sorted(point.workers for point in points)
    if len(set(sizes)) < len(sizes):
        raise UsageError.problem(f"the {mode} curve", f"has duplicate numbers of workers: {sizes}")
    if other := [point.mode for point in points if point.mode != mode]:
        raise UsageError.problem(f"the {mode} curve", f"has a {other[0]} point")
    base = min(points, key=lambda point: point.workers)
    for point in points:
        wanted = base.global_batch_size * (point.workers / base.workers if mode == "weak" else 1)
        if abs(point.global_batch_size - wanted) > 1e-9 * wanted:
            raise UsageError(
                f"the global batch of {point.workers} workers",
                point.global_batch_size,
                f"it must be {wanted:g} on a {mode} curve that starts with {base.global_batch_size} on {base.workers}",
            )
