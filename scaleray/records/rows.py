"""Measured values of a record as rows, from which MLflow, CSV, pages, tables and comparisons take them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scaleray.common.metric import Better, Metric

Interval = tuple[float | None, float | None]
"""Ends of a 95 % interval; None if unknown or infinite."""


@dataclass(frozen=True)
class Row:
    """A measured value; None if not measured. interval: None for a value that never has one."""

    metric: Metric
    value: float | None
    interval: Interval | None = None

    @property
    def name(self) -> str:
        """Name in MLflow."""
        return self.metric.name

    @property
    def key(self) -> str:
        """Name in files: the last part of the name in MLflow."""
        return self.metric.name.rpartition("/")[2]

    @property
    def unit(self) -> str:
        """Unit of the value and of its interval."""
        return self.metric.unit

    @property
    def better(self) -> Better | None:
        """Whether higher or lower is better; None if neither is."""
        return self.metric.better


def by_metric(rows: Iterable[Row]) -> Mapping[Metric, Row]:
    """The rows by metric."""
    return {row.metric: row for row in rows}


def as_columns(rows: Iterable[Row]) -> dict[str, float | None]:
    """Values by name, each with the ends of its interval."""
    columns: dict[str, float | None] = {}
    for row in rows:
        columns[row.key] = row.value
        if row.interval is not None:
            columns[f"{row.key}_low"], columns[f"{row.key}_high"] = row.interval
    return columns
