"""Rules for training quality: loss spikes, non-finite values and exploding gradients.

A loss is compared with the median of its last 200 values and their median absolute deviation, since multiples of a mean
are meaningless for losses near or below zero. Prometheus, which has a loss per scrape instead of per step, uses half
the interquartile range, which equals that deviation for values distributed symmetrically around the median."""

from collections.abc import Callable

import numpy as np

from scaleray.common import metric_names as names
from scaleray.common.metric import Metric, prometheus_name
from scaleray.config.alerts import AlertLimits
from scaleray.live.rules.progress_rules import grown_in
from scaleray.live.rules.promql import RUN, grown, of_run, over
from scaleray.live.rules.rule import Match, Rule
from scaleray.live.rules.series_history import SeriesHistory, Values

LOOK_BACK, IN_A_ROW, LEAST_POINTS = 200, 3, 20
LOOK_BACK_S = 1000.0
"""Seconds of history that Prometheus uses, with a scrape every five seconds."""
RELATIVE_FLOOR, FLOOR = 0.01, 0.001
"""Amounts added to the deviation, relative to the median and absolute, so that a nearly constant loss has no spikes.
"""
NONFINITE_WITHIN_S, SCALE_WITHIN_S = 300.0, 1800.0
LOSS_SCALE = prometheus_name(names.LOSS_SCALE)


def _spike_query(limits: AlertLimits) -> str:
    loss = prometheus_name(names.LOSS)
    low, median, high = (
        over("quantile_over_time", names.LOSS, LOOK_BACK_S, first=first) for first in ("0.25", "0.5", "0.75")
    )
    spread = f"(({high} - {low}) / 2 + {RELATIVE_FLOOR:g} * abs({median}) + {FLOOR:g})"
    above = f"({loss} - {median}) / {spread} and {_has_enough(names.LOSS)}"
    return f"max by ({RUN}) ({above}) > {limits.loss_spike_mads:g}"


def mads_above(values: Values, usual: Values) -> Values:
    """Distance of values above the median of the usual values, in median absolute deviations."""
    median = np.median(usual)
    spread = np.median(np.abs(usual - median)) + RELATIVE_FLOOR * abs(median) + FLOOR
    return np.asarray((values - median) / spread)


def _explosion_query(limits: AlertLimits) -> str:
    median = over("quantile_over_time", names.GRAD_NORM, LOOK_BACK_S, first="0.5")
    ratio = f"{prometheus_name(names.GRAD_NORM)} / ({median} > 0) and {_has_enough(names.GRAD_NORM)}"
    return f"max by ({RUN}) ({ratio}) > {limits.gradient_factor:g}"


def over_median(values: Values, usual: Values) -> Values:
    """Ratio of values to the median of the usual values."""
    median = np.median(usual)
    return values / median if median > 0 else np.zeros(len(values))


def _has_enough(metric: Metric) -> str:
    return f"{over('count_over_time', metric, LOOK_BACK_S)} >= {LEAST_POINTS}"


def _in_a_row(
    seen: SeriesHistory, metric: Metric, measure: Callable[[Values, Values], Values], limit: float
) -> Match | None:
    """Largest value of the first streak of three or more above the limit, among values since the last check and the two
    before. They are compared in blocks of `LOOK_BACK` with earlier values: checks may be many steps apart."""
    times, values = seen.points(prometheus_name(metric))
    is_finite = np.isfinite(values)
    times, values = times[is_finite], values[is_finite]
    for first in range(int((times <= seen.before).sum()), len(values), LOOK_BACK):
        usual = values[max(0, first - LOOK_BACK) : first]
        if len(usual) >= LEAST_POINTS:
            measured = measure(values[first - (IN_A_ROW - 1) : first + LOOK_BACK], usual)
            if (row := _first_row(measured, limit)) is not None:
                return Match(float(row.max()))
    return None


def _first_row(measured: Values, limit: float) -> Values | None:
    """The first streak of at least three values above the limit."""
    began = 0
    for at, value in enumerate([*measured, -np.inf]):
        if value > limit:
            continue
        if at - began >= IN_A_ROW:
            return measured[began:at]
        began = at + 1
    return None


def _nonfinite(seen: SeriesHistory, limits: AlertLimits) -> Match | None:
    count = grown_in(seen, names.NONFINITE_STEPS, NONFINITE_WITHIN_S)
    return Match(count) if count > 0 else None


def _scale_query(limits: AlertLimits) -> str:
    highest = f"max by ({RUN}) ({over('max_over_time', names.LOSS_SCALE, SCALE_WITHIN_S)})"
    scale = of_run(names.LOSS_SCALE)
    return f"{scale} < 1 or {scale} <= {highest} / {limits.loss_scale_drop:g}"


def _loss_scale_collapse(seen: SeriesHistory, limits: AlertLimits) -> Match | None:
    scale = seen.last(LOSS_SCALE)
    if scale is None:
        return None
    highest = seen.past(LOSS_SCALE, last_s=SCALE_WITHIN_S).max()
    return Match(scale) if scale < 1 or scale <= highest / limits.loss_scale_drop else None


RULES = (
    Rule(
        "loss_spike",
        "warning",
        "the loss was {value} median deviations above the median of its last 200 values, three times in a row",
        "number",
        "Training progress is lost, and the run may not recover.",
        "Check the gradient norm before the spike, and the rows of these steps (listed in the step plan). Usual "
        "remedies: optimizer.clip_norm, a longer schedule.warmup, a lower learning rate, or a return to the previous "
        "checkpoint.",
        ("run", "Loss"),
        _spike_query,
        lambda seen, limits: _in_a_row(seen, names.LOSS, mads_above, limits.loss_spike_mads),
        for_s=10,
        steps_in_a_row=True,
    ),
    Rule(
        "nonfinite",
        "critical",
        "a loss or gradient was not finite in {value} of the steps in the last five minutes",
        "count",
        "Skipped steps do not train the model; without skipping, the weights are lost.",
        "Check the first such step: its rows, divisions or logarithms in the loss, and the precision. Common causes "
        "are fp16 without a loss scale, and bf16 sums over many values.",
        ("run", "Non-finite steps"),
        lambda limits: f"{grown(names.NONFINITE_STEPS, NONFINITE_WITHIN_S)} > 0",
        _nonfinite,
    ),
    Rule(
        "loss_scale_collapse",
        "warning",
        "the loss scale has fallen to {value}",
        "number",
        "Gradients overflow repeatedly: steps are skipped, and small gradients vanish in fp16.",
        "Use precision.dtype bf16 if the GPU supports it; otherwise find the layer whose activations grow.",
        ("run", "Loss scale"),
        _scale_query,
        _loss_scale_collapse,
    ),
    Rule(
        "gradient_explosion",
        "warning",
        "the gradient norm was {value} times the median of its last 200 values, three times in a row",
        "number",
        "Steps go in the wrong direction and, without clipping, are also too long: a loss spike follows.",
        "Set optimizer.clip_norm 1.0, a lower learning rate or a longer schedule.warmup; check these steps' rows.",
        ("run", "Gradient norm"),
        _explosion_query,
        lambda seen, limits: _in_a_row(seen, names.GRAD_NORM, over_median, limits.gradient_factor),
        for_s=10,
        steps_in_a_row=True,
    ),
)
