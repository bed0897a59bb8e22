"""A scaling curve from measured points: speed-ups with intervals, fitted laws, the next doubling, and a verdict as
text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scaleray.errors import UsageError
from scaleray.records.study_record import Curve, CurvePoint, Estimate, Fit, Mode, NextDoubling, Point
from scaleray.records.text.headlines import would_pay
from scaleray.studies.curves import extrapolation
from scaleray.studies.curves.efficiency import curve_points, scaled
from scaleray.studies.curves.extrapolation import in_words
from scaleray.studies.curves.fitting import FittedLaw, fit_laws
from scaleray.studies.curves.laws import GivenLaw
from scaleray.studies.curves.limits import WORDS, advice, limit_of


def verdict_of(
    largest: CurvePoint, doubling: NextDoubling | None, reason: str, limit: str, price_per_worker_hour: float | None
) -> str:
    """The verdict as one sentence."""
    if doubling is not None:
        first = (
            f"the next doubling to {doubling.workers} workers would give {in_words(doubling.gain)} "
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
"""Law for each mode with only two points, which every law fits exactly: the law made for the mode."""


def as_curve(
    mode: Mode,
    points: Sequence[Point],
    *,
    price_per_worker_hour: float | None = None,
    laws: Sequence[GivenLaw] = (),
    workers_per_node: int | None = None,
) -> Curve:
    """Everything derived from the points of one mode: speed-ups, fits, the next doubling, the limit, a verdict.

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
        gain = in_words(doubling.gain)
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
    """The law with the smallest held-out error, the simplest of equal ones; the mode's default if none can be
    compared."""
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
