"""Values of metrics with their labels, as in Prometheus."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from scaleray.common.metric import Metric
from scaleray.common.printed import printable

SHOWN_LABEL = 300
"""Maximum number of characters of a label value, as users choose the names of metrics and jobs."""


class Series(NamedTuple):
    """Current value of a metric. labels: all labels of the metric, by name."""

    metric: Metric
    labels: Mapping[str, str]
    value: float


def series_of(metric: Metric, common: Mapping[str, str], value: float | None, /, **labels: object) -> list[Series]:
    """The series of a value, or none if the value is unknown. common: labels of every series."""
    if value is None:
        return []
    own = {name: label_value(text) for name, text in labels.items()}
    return [Series(metric, {**common, **own}, float(value))]


def label_value(value: object) -> str:
    """Text without line breaks and terminal control characters, as a label value."""
    text = printable(value)
    return text if len(text) <= SHOWN_LABEL else text[: SHOWN_LABEL - 1] + "…"


def by_metric(series: Iterable[Series]) -> dict[Metric, list[Series]]:
    """Series grouped by metric."""
    found: dict[Metric, list[Series]] = {}
    for one in series:
        found.setdefault(one.metric, []).append(one)
    return found


def run_labels(run_name: str, run_id: str) -> dict[str, str]:
    """Labels of each series of a run. run_id: distinguishes runs of the same name."""
    return {"ray_train_run_name": run_name, "run_id": run_id}


def common_labels(run_name: str, run_id: str, rank: int, node: str) -> dict[str, str]:
    """Labels of each series of a rank."""
    return {**run_labels(run_name, run_id), "rank": str(rank), "node": node}
