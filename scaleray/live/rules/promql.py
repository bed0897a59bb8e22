"""Pieces of PromQL that the rules share.

Gauges of a worker that ends vanish, and a worker that starts again has series of its own next to those of the one
before (Ray's label WorkerId): the value of a run or a rank is the largest of its series.
"""

from __future__ import annotations

from scaleray.common import live_metrics as live
from scaleray.common.metric import RANK_LABELS, RUN_LABELS, Metric, prometheus_name

RUN = ", ".join(RUN_LABELS)
RANK = ", ".join((*RUN_LABELS, *RANK_LABELS))


def of_run(metric: Metric, of: str = "max") -> str:
    """One value for each run."""
    return f"{of} by ({RUN}) ({prometheus_name(metric)})"


def of_rank(metric: Metric, where: str = "") -> str:
    """One value for each rank. where: labels that it must have, such as {kind="used"}."""
    return f"max by ({RANK}) ({prometheus_name(metric)}{where})"


def over(function: str, metric: Metric, seconds: float, *, first: str = "", where: str = "", ago_s: float = 0) -> str:
    """A function of the last seconds of each series, such as avg_over_time. first: an argument before it."""
    window = f"{prometheus_name(metric)}{where}[{seconds:g}s]" + (f" offset {ago_s:g}s" if ago_s else "")
    return f"{function}({f'{first}, ' if first else ''}{window})"


def grown(metric: Metric, seconds: float, *, known_by: Metric | None = None) -> str:
    """Growth of a counter of a run. Not `increase`: a counter that appears with its first event has no sample before
    it, and would not have grown. known_by: a metric that the run must have had then: what a resumed run counted before
    is nothing new."""
    now, before = of_run(metric), f"max by ({RUN}) ({prometheus_name(metric)} offset {seconds:g}s)"
    none = now if known_by is None else f"max by ({RUN}) ({prometheus_name(known_by)} offset {seconds:g}s)"
    return f"{now} - ({before} or 0 * {none})"


LOST_WITHIN_S = 900
"""Seconds for which Prometheus remembers a run that tells nothing any more: so long an alert that it is lost stays."""


def remembered(metric: Metric, of: str = "max") -> str:
    """One value for each run that published lately, though it may be gone."""
    return f"{of} by ({RUN}) ({over('last_over_time', metric, LOST_WITHIN_S)})"


def ended() -> str:
    """The runs that are over as planned, or have said that they failed. A run whose last state was not scraped, as it
    is gone before the next scrape, has ended if it had taken all its steps.
    """
    said = [
        f"max by ({RUN}) ({over('max_over_time', metric, LOST_WITHIN_S)}) == 1"
        for metric in (live.RUN_FINISHED, live.RUN_FAILED)
    ]
    return " or ".join([*said, f"{remembered(live.STEPS)} >= {remembered(live.STEPS_PLANNED)}"])
