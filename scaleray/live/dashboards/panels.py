"""Parts of a dashboard, independent of Grafana's format: panels with their queries, in rows, below variables.

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
"""Source that a panel needs besides runs; empty if runs suffice."""
COLUMNS = 24
"""Width of Grafana's grid."""


@dataclass(frozen=True)
class Query:
    """One expression of PromQL. legend: name of its series, with labels in double braces."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Threshold:
    """A value from which a colour applies."""

    value: float
    colour: str


@dataclass(frozen=True)
class Link:
    """A link of a panel; the address may contain labels of the clicked series."""

    title: str
    url: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart or table. description: the normal state, and the remedy.

    unit: Grafana's name for it. words: text in place of a value. columns: of a table, the labels that it shows, with
    their headers.
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
    """Value, word and colour, if a value represents a state."""
    is_stacked: bool = False
    low_is_bad: bool = False
    """Whether small values of a heat map matter."""
    columns: tuple[tuple[str, str], ...] = ()
    links: tuple[Link, ...] = ()
    links_from: tuple[str, ...] = ()
    """Labels of a table that hold the addresses of its links but are not shown as columns."""


@dataclass(frozen=True)
class Row:
    """Panels under one heading, laid out from left to right."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A variable above the panels. query: source of the values; of kind textbox, its first content."""

    name: str
    label: str
    query: str
    kind: Literal["query", "textbox", "datasource"] = "query"
    description: str = ""
    all_value: str = ".*"


@dataclass(frozen=True, kw_only=True)
class Note:
    """A mark on every panel's time axis whenever its query has a value."""

    title: str
    expr: str
    text: str
    colour: str


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """One page. name: of its file. Links use the numbers of panels, which follow their order."""

    name: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]
    notes: tuple[Note, ...] = ()

    @property
    def uid(self) -> str:
        """Identifier of the dashboard in Grafana, independent of its title."""
        return f"scaleray-{self.name}"

    def panels(self) -> Iterator[Panel]:
        """All panels in reading order."""
        for row in self.rows:
            yield from row.panels
