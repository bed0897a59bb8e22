"""Pieces of PromQL that the rules share.

Gauges of a worker vanish when it ends, and a restarted worker has new series next to the old ones (Ray's label
WorkerId): the value of a run or a rank is the largest of its series."""

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
    """A function over the last seconds of each series, such as avg_over_time. first: an argument before the series."""
    window = f"{prometheus_name(metric)}{where}[{seconds:g}s]" + (f" offset {ago_s:g}s" if ago_s else "")
    return f"{function}({f'{first}, ' if first else ''}{window})"


def grown(metric: Metric, seconds: float, *, known_by: Metric | None = None) -> str:
    """Growth of a run's counter. Not `increase`: a counter that first appears with an event has no earlier sample, and
    would not have grown. known_by: a metric that the run must have had then: counts from before a resume are not
    new."""
    now, before = of_run(metric), f"max by ({RUN}) ({prometheus_name(metric)} offset {seconds:g}s)"
    none = now if known_by is None else f"max by ({RUN}) ({prometheus_name(known_by)} offset {seconds:g}s)"
    return f"{now} - ({before} or 0 * {none})"


LOST_WITHIN_S = 900
"""Seconds for which Prometheus remembers a silent run, and its alert lasts."""


def remembered(metric: Metric, of: str = "max") -> str:
    """One value for each run that published recently, even if it is gone."""
    return f"{of} by ({RUN}) ({over('last_over_time', metric, LOST_WITHIN_S)})"


def ended() -> str:
    """The runs that ended or reported failure. A run whose last state was not scraped, because it was gone before the
    next scrape, has ended if it had taken all its steps."""
    said = [
        f"max by ({RUN}) ({over('max_over_time', metric, LOST_WITHIN_S)}) == 1"
        for metric in (live.RUN_FINISHED, live.RUN_FAILED)
    ]
    return " or ".join([*said, f"{remembered(live.STEPS)} >= {remembered(live.STEPS_PLANNED)}"])
