"""The verdict of a scaling curve: what the next doubling would give, what limits the speed, and what to do about it."""

from __future__ import annotations

from scaleray.records.study import CurvePoint, Estimate, NextDoubling
from scaleray.scaling.curves.efficiency import scaled
from scaleray.scaling.curves.extrapolation import in_words
from scaleray.scaling.curves.limits import WORDS, advice


def verdict_of(
    largest: CurvePoint, doubling: NextDoubling | None, reason: str, limit: str, price_per_worker_hour: float | None
) -> str:
    """The verdict as one sentence, in plain words."""
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
