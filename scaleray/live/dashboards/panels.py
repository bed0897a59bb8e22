"""Parts of a dashboard, independent of Grafana's format: variables, rows, panels and their queries.

`grafana.py` converts them to Grafana's format; tests run their queries in a Prometheus."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["timeseries", "stat", "gauge", "heatmap", "bargauge", "table"]
Needs = Literal[
    "",
    "GPU",
    "fp16",
    "prediction",
    "study",
    "sweep",
    "target",
    "tokens",
    "long phase",
    "slow link",
    "Ray",
    "Ray Dataset",
]
"""Source of metrics that a panel needs in addition to runs; empty if it needs none."""
COLUMNS = 24
"""Width of Grafana's grid."""


@dataclass(frozen=True)
class Query:
    """One PromQL expression. legend: name of its series, with labels in double braces."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Threshold:
    """Value from which a colour applies."""

    value: float
    colour: str


@dataclass(frozen=True)
class Link:
    """A link in a panel; its address may contain labels of the clicked series."""

    title: str
    url: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart or table. description: what it shows, its normal state, and the remedy.

    unit: Grafana's name for it. words: texts shown in place of values. columns: labels shown by a table, with their
    headers.
    """

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str
    kind: Kind = "timeseries"
    needs: Needs = ""
    width: int = 8
    height: int = 8
    minimum: float | None = None
    maximum: float | None = None
    decimals: int | None = None
    thresholds: tuple[Threshold, ...] = ()
    words: tuple[tuple[str, str, str], ...] = ()
    """Value, text and colour of each state, if values represent states."""
    is_stacked: bool = False
    low_is_bad: bool = False
    """Whether a heat map must make small values visible."""
    columns: tuple[tuple[str, str], ...] = ()
    links: tuple[Link, ...] = ()
    links_from: tuple[str, ...] = ()
    """Labels of a table that hold link addresses and are not shown as columns."""


@dataclass(frozen=True)
class Row:
    """Panels under one heading, laid out from left to right."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A variable above the panels. query: source of its values, or the initial content of a textbox."""

    name: str
    label: str
    query: str
    kind: Literal["query", "textbox", "datasource"] = "query"
    description: str = ""
    all_value: str = ".*"


@dataclass(frozen=True, kw_only=True)
class Note:
    """An annotation on every panel's time axis wherever its query has a value."""

    title: str
    expr: str
    text: str
    colour: str


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """One page. name: file name without extension. Links use panel numbers, which follow the order of the panels."""

    name: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]
    notes: tuple[Note, ...] = ()

    @property
    def uid(self) -> str:
        """Identifier of the dashboard in Grafana; it does not depend on the title."""
        return f"scaleray-{self.name}"

    def panels(self) -> Iterator[Panel]:
        """All panels in reading order."""
        for row in self.rows:
            yield from row.panels
