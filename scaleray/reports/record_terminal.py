"""A study's or a sweep's result on the terminal: the verdict, the tables, and where everything is."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from scaleray.study_records import StudyRecord, SweepRecord
from scaleray.study_tables import Table, study_tables, sweep_table

WIDTH = 132
"""Columns where there is no terminal, such as in a job's log."""
MOST_ROWS = 40


def show_record(console: Console, record: StudyRecord | SweepRecord) -> None:
    """Print the tables, the sentences and the last lines of a record."""
    if not console.is_terminal:
        console.width = WIDTH
    console.print(record_view(record))
    for line in last_lines(record):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def record_view(record: StudyRecord | SweepRecord) -> RenderableType:
    """Marks, tables and sentences, for a console."""
    tables = study_tables(record) if isinstance(record, StudyRecord) else [sweep_table(record)]
    parts: list[RenderableType] = []
    if record.marks:
        parts.append(Text(", ".join(record.marks), style="bold yellow"))
    parts += [as_rich(table) for table in tables if table.rows]
    parts += [Text(sentence, style="bold" if number == 0 else "") for number, sentence in enumerate(record.words)]
    return Group(*parts)


def last_lines(record: StudyRecord | SweepRecord) -> list[str]:
    """Where the pages and the record are."""
    lines = []
    if record.mlflow_link:
        start = (
            ""
            if record.tracking_uri.startswith("http")
            else f"scaleray tracking ui --uri {record.tracking_uri}   then open "
        )
        lines.append(f"MLflow:  {start}{record.mlflow_link}")
    if record.folder:
        lines += [f"report:  {record.folder}/report.html", f"record:  {record.folder}/record.json"]
    return lines


def as_rich(table: Table) -> RichTable:
    """The table for a console; intervals stand below their values, so that it stays narrow."""
    notes = list(table.notes)
    if len(table.rows) > MOST_ROWS:
        notes.append(f"{len(table.rows) - MOST_ROWS} more rows are in the report.")
    made = RichTable(
        title=Text(table.title, style="bold"), caption=Text(" ".join(notes)), box=box.SIMPLE, padding=(0, 1), title_justify="left",
        caption_justify="left", caption_style="dim",
    )  # fmt: skip
    for number, column in enumerate(table.columns):
        made.add_column(
            Text(column), justify="left" if number == 0 or table.is_text(number) else "right", vertical="top"
        )
    for row in table.rows[:MOST_ROWS]:
        made.add_row(*(Text(cell if table.is_text(n) else cell.replace(" (", "\n(")) for n, cell in enumerate(row)))
    return made
