"""Definition of a metric: its name, unit and meaning, where it is published, and its name in Prometheus.

The metrics themselves are in `metric_names.py`.
"""

from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower"]
Kind = Literal["gauge", "counter"]
Where = Literal["mlflow", "record", "run", "rank"]
"""Where a metric is published: in MLflow, in record.json, or in Prometheus, once per run or by every rank."""

PREFIX = "ray_scaleray_"
"""Prefix of all names in Prometheus. Ray adds `ray_` to every name; it is also used without Ray, so that the same
dashboards and rules work."""
RUN_LABELS = ("ray_train_run_name", "run_id")
"""Labels of every series. The first joins them with Ray Train's own metrics, the second distinguishes runs of the same
name."""
RANK_LABELS = ("rank", "node")
"""Additional labels of a series by rank. node: its address in Ray; `local` without Ray."""
ENDINGS = {"_per_s": "_per_second", "_s": "_seconds", "_share": "_ratio"}
"""Unit suffixes: here, and in Prometheus, whose units are whole words without prefixes."""


@dataclass(frozen=True)
class Metric:
    """A metric's name as recorded, its unit and one line of help."""

    name: str
    unit: str
    help: str
    better: Better | None = None
    """Whether higher or lower is better; None if it depends, or if neither is."""
    label: str = ""
    """Label of the value for a whole run."""
    published: tuple[Where, ...] = ("mlflow",)
    kind: Kind = "gauge"
    labels: tuple[str, ...] = ()
    """Labels in Prometheus in addition to the common ones."""
    prometheus: str = ""
    """Name in Prometheus without `PREFIX`, if it does not follow from the last part of `name`."""

    @property
    def is_in_mlflow(self) -> bool:
        """Whether it is in MLflow."""
        return "mlflow" in self.published

    @property
    def is_in_prometheus(self) -> bool:
        """Whether it is in Prometheus, once per run or by rank."""
        return "run" in self.published or self.is_by_rank

    @property
    def is_by_rank(self) -> bool:
        """Whether Prometheus has a series of it for every rank."""
        return "rank" in self.published

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Labels of its series in Prometheus."""
        return (*RUN_LABELS, *(RANK_LABELS if self.is_by_rank else ()), *self.labels)


def prometheus_name(metric: Metric) -> str:
    """Name of the metric in Prometheus: `PREFIX`, the last part of its own name with the unit as a whole word, and
    `_total` for a counter. `perf/step_time_s` becomes `ray_scaleray_step_time_seconds`. Raises KeyError for a metric
    that is not published there."""
    if not metric.is_in_prometheus:
        raise KeyError(f"{metric.name} is not published in Prometheus")
    name = metric.prometheus or metric.name.rpartition("/")[2]
    for ending, word in ENDINGS.items():
        if name.endswith(ending):
            name = name.removesuffix(ending) + word
            break
    if metric.kind == "counter" and not name.endswith("_total"):
        name += "_total"
    return PREFIX + name
