"""Definition of a metric: its name, unit and meaning, where it is published, and its name in Prometheus.

The metrics themselves are in `metric_names.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower"]
Kind = Literal["gauge", "counter"]
Where = Literal["mlflow", "record", "run", "rank"]
"""Where a metric is published: in MLflow; in record.json; in Prometheus once a run; in Prometheus by every rank."""

PREFIX = "ray_scaleray_"
"""Beginning of all names in Prometheus. Ray puts `ray_` before every name; without Ray it is kept, so that the same
dashboards and rules fit both."""
RUN_LABELS = ("ray_train_run_name", "run_id")
"""Labels of every series. The first one joins with Ray Train's own metrics; the second one tells runs of one name
apart."""
RANK_LABELS = ("rank", "node")
"""Further labels of a series that every rank has. node: the address by which Ray knows it; `local` without Ray."""
ENDINGS = {"_per_s": "_per_second", "_s": "_seconds", "_share": "_ratio"}
"""How a name ends here, and in Prometheus, whose units are whole words and never prefixed."""


@dataclass(frozen=True)
class Metric:
    """A metric's name as recorded, its unit and one line of help."""

    name: str
    unit: str
    help: str
    better: Better | None = None
    """Whether more or less of it is better; None where that depends, or neither is."""
    label: str = ""
    """Label of it next to a figure of a whole run."""
    published: tuple[Where, ...] = ("mlflow",)
    kind: Kind = "gauge"
    labels: tuple[str, ...] = ()
    """Labels in Prometheus in addition to those that all series have."""
    prometheus: str = ""
    """Name in Prometheus without `PREFIX`, where it is not made of the last part of `name`."""

    @property
    def is_in_mlflow(self) -> bool:
        """Whether MLflow has it."""
        return "mlflow" in self.published

    @property
    def is_in_prometheus(self) -> bool:
        """Whether Prometheus has it, once a run or by rank."""
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
    """Name of a metric in Prometheus: `PREFIX`, the last part of its own name with the unit as a whole word, and
    `_total` for a counter. `perf/step_time_s` is `ray_scaleray_step_time_seconds`. Raises KeyError for one that is not
    published there."""
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
