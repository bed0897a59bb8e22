"""A study's or a sweep's result on the terminal: the verdict, the tables, and where everything is."""

from __future__ import annotations

import textwrap

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
    console.print(record_view(record, width=console.width))
    for line in last_lines(record):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def record_view(record: StudyRecord | SweepRecord, *, width: int = WIDTH) -> RenderableType:
    """Marks, tables and sentences, for a console of `width` columns."""
    tables = study_tables(record, is_brief=True) if isinstance(record, StudyRecord) else [sweep_table(record)]
    parts: list[RenderableType] = []
    if record.marks:
        parts.append(Text(", ".join(record.marks), style="bold yellow"))
    parts += [as_rich(table, width=width) for table in tables if table.rows]
    parts += [
        Text(sentence, style="bold" if number == 0 else "")
        for number, sentence in enumerate(dict.fromkeys(record.words))
    ]
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


def as_rich(table: Table, *, width: int = WIDTH) -> RichTable:
    """The table for a console; intervals stand below their values. What does not fit into `width` is named below it."""
    cells = [
        [cell if table.is_text(n) else cell.replace(" (", "\n(") for n, cell in enumerate(row)]
        for row in table.rows[:MOST_ROWS]
    ]
    # figures stay whole; what gives way are headings and words
    widths = [
        max((len(line) for row in cells for line in row[n].splitlines()), default=0) if not table.is_text(n) else 8
        for n in range(len(table.columns))
    ]
    widths = [
        max([own, *(len(word) for word in column.split())]) for own, column in zip(widths, table.columns, strict=True)
    ]
    fitting = [n for n in range(len(widths)) if sum(widths[: n + 1]) + 3 * (n + 1) + 2 <= width]
    notes = list(table.notes)
    if left_out := [column for n, column in enumerate(table.columns) if n not in fitting]:
        notes.append(f"In the report, for want of room here: {', '.join(left_out)}.")
    if len(table.rows) > MOST_ROWS:
        notes.append(f"{len(table.rows) - MOST_ROWS} more rows are in the report.")
    made = RichTable(
        title=Text(table.title, style="bold"), caption=Text(" ".join(notes)), box=box.SIMPLE, padding=(0, 1), title_justify="left",
        caption_justify="left", caption_style="dim",
    )  # fmt: skip
    for n in fitting:
        is_text = table.is_text(n)
        heading = Text(textwrap.fill(table.columns[n], widths[n], break_long_words=False))
        made.add_column(heading, justify="left" if n == 0 or is_text else "right", no_wrap=not is_text)
    for row in cells:
        made.add_row(*(Text(row[n]) for n in fitting))
    return made
