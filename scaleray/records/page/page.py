"""One self-contained HTML page: headline, figures, tables and facts. No script, no network, printable."""

import csv
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaleray.common.filesystems import write_whole
from scaleray.records.page.drawing import Drawing
from scaleray.records.study_record import Conditions
from scaleray.records.text.study_sweep_tables import Table
from scaleray.records.text.units import seconds

LONGEST_FACT = 300
BESIDE = "This page works offline; figures as PNG and numbers as CSV are next to it."


@dataclass(frozen=True)
class Fact:
    """A single number to show. note: its interval or reference."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A heading, followed by sentences, figures and tables."""

    title: str
    words: Sequence[str] = ()
    drawings: Sequence[Drawing] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Page:
    """Content of a page. Text may come from configs, so the template escapes it.

    kind: the page's subject, such as `Scaling study`. headline: the result in one line. verdicts: the full result, as
    paragraphs. words: conclusions. marks: conditions that the reader must see. facts: names and values by heading,
    shown at the end of the page."""

    kind: str
    name: str
    when: str
    headline: str
    verdicts: Sequence[str] = ()
    words: Sequence[str] = ()
    marks: Sequence[str] = ()
    figures: Sequence[Fact] = ()
    sections: Sequence[Section] = ()
    command: str = ""
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    closing: str = BESIDE

    @property
    def drawings(self) -> list[Drawing]:
        """The drawings of all sections."""
        return [drawing for section in self.sections for drawing in section.drawings]


def render(page: Page) -> str:
    """The page as HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("scaleray.records"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["flat"] = lambda values: list(flat(values))
    return environment.get_template("page.html").render(page=page)


def write(page: Page, folder: str | Path, *, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Path]:
    """Write report.html, a CSV for each of `rows`, and the figures as PNG into a folder; returns their paths,
    report.html first.

        rows: the numbers behind the page by name, as dictionaries with the same keys. Files of an earlier
    report are replaced.
    """
    folder = Path(folder)
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    html = folder / "report.html"
    write_whole(html, render(page))
    written = [html]
    for name, table in rows.items():
        write_whole(folder / f"{name}.csv", as_csv(table))
        written.append(folder / f"{name}.csv")
    for drawing in page.drawings:
        write_whole(figures / f"{drawing.name}.png", drawing.png())
    return [*written, figures]


def facts(conditions: Conditions, config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Facts that influence a figure, by heading."""
    hashes = {
        "config": conditions.config_hash,
        "code": conditions.code_hash,
        "environment": conditions.environment_hash,
        "topology": conditions.topology_hash,
    }
    return {"Topology": conditions.topology, "Environment": conditions.environment, "Hashes": hashes, "Config": config}


def when(started_at: float, duration_s: float) -> str:
    """Date in this machine's time zone, and the duration."""
    return f"{time.strftime('%Y-%m-%d %H:%M %Z', time.localtime(started_at))}, took {seconds(duration_s)}"


def where(mlflow_link: str, folder: str) -> list[str]:
    """Lines with the location of the record, as plain text: a shared page must not link to a server."""
    return ([f"MLflow: {mlflow_link}"] if mlflow_link else []) + ([f"Record: {folder}/record.json"] if folder else [])


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV with a header. Numbers are unchanged; unknown values are empty."""
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(
        buffer, fieldnames=list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n"
    )
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _cell(value) for key, value in row.items()})
    return buffer.getvalue()


def flat(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested mappings and lists as (dotted name, text); equal items of a list appear once, with their count."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(values, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in values):
        for number, item in enumerate(values):
            yield from flat(item, f"{prefix}.{number}")
    else:
        text = (
            ", ".join(map(str, values)) if isinstance(values, (list, tuple)) else "" if values is None else str(values)
        )
        yield prefix, text if len(text) <= LONGEST_FACT else text[: LONGEST_FACT - 3] + "..."


def _cell(value: Any) -> Any:
    """The value for a spreadsheet; text that looks like a formula gets a leading quote, so that it remains text."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
