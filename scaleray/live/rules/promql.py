"""PromQL fragments shared by the rules.

Gauges of a worker vanish when it ends, and a restarted worker has new series next to the old ones (Ray's label
WorkerId). The value of a run or a rank is therefore the largest of its series."""

from scaleray.common import live_metrics as live
from scaleray.common.metric import RANK_LABELS, RUN_LABELS, Metric, prometheus_name

RUN = ", ".join(RUN_LABELS)
RANK = ", ".join((*RUN_LABELS, *RANK_LABELS))


def of_run(metric: Metric, of: str = "max") -> str:
    """One value for each run."""
    return f"{of} by ({RUN}) ({prometheus_name(metric)})"


def of_rank(metric: Metric, where: str = "") -> str:
    """One value for each rank. where: required labels, such as {kind="used"}."""
    return f"max by ({RANK}) ({prometheus_name(metric)}{where})"


def over(function: str, metric: Metric, seconds: float, *, first: str = "", where: str = "", ago_s: float = 0) -> str:
    """A function over the last seconds of each series, such as avg_over_time. first: argument before the series."""
    window = f"{prometheus_name(metric)}{where}[{seconds:g}s]" + (f" offset {ago_s:g}s" if ago_s else "")
    return f"{function}({f'{first}, ' if first else ''}{window})"


def grown(metric: Metric, seconds: float, *, known_by: Metric | None = None) -> str:
    """Growth of a run's counter. `increase` misses the first event, with which a counter first appears. known_by:
    metric that the run must have had at the earlier time, so that a resume does not count as growth."""
    now, before = of_run(metric), f"max by ({RUN}) ({prometheus_name(metric)} offset {seconds:g}s)"
    none = now if known_by is None else f"max by ({RUN}) ({prometheus_name(known_by)} offset {seconds:g}s)"
    return f"{now} - ({before} or 0 * {none})"


LOST_WITHIN_S = 900
"""Seconds for which Prometheus remembers a silent run and its alert lasts."""


def remembered(metric: Metric, of: str = "max") -> str:
    """One value for each run that published recently, even if it is gone."""
    return f"{of} by ({RUN}) ({over('last_over_time', metric, LOST_WITHIN_S)})"


def ended() -> str:
    """Runs that ended or reported failure. A run that was gone before its last scrape counts as ended after all its
    steps."""
    said = [
        f"max by ({RUN}) ({over('max_over_time', metric, LOST_WITHIN_S)}) == 1"
        for metric in (live.RUN_FINISHED, live.RUN_FAILED)
    ]
    return " or ".join([*said, f"{remembered(live.STEPS)} >= {remembered(live.STEPS_PLANNED)}"])
