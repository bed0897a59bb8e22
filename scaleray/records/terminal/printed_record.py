"""Print the result of a study or a sweep: the verdict, the tables, and the location of its files."""

import io
import shlex

from rich.console import Console, Group, RenderableType
from rich.text import Text

from scaleray.records.study_record import StudyRecord
from scaleray.records.sweep_record import SweepRecord
from scaleray.records.terminal.terminal_tables import as_rich
from scaleray.records.text.headlines import study_headline, sweep_headline
from scaleray.records.text.study_sweep_tables import study_tables, sweep_table

PIPE_WIDTH = 4000
"""Width in columns of output without a terminal, such as a job's log, so that nothing is omitted or wrapped."""


def show_record(console: Console, record: StudyRecord | SweepRecord) -> None:
    """Print the tables, the headline, the sentences and the last lines of a record."""
    print_whole(console, record_view(record, width=width_of(console)))
    for line in last_lines(record):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def width_of(console: Console) -> int:
    """Number of columns available for a table; unlimited in a file or a pipe."""
    return console.width if console.is_terminal else PIPE_WIDTH


def print_whole(console: Console, view: RenderableType) -> None:
    """Print a view at the terminal's width; in a file or a pipe, each sentence is one line without trailing spaces."""
    if console.is_terminal:
        console.print(view)
        return
    plain = Console(file=io.StringIO(), width=PIPE_WIDTH, color_system=None)
    with plain.capture() as captured:
        plain.print(view)
    for line in captured.get().splitlines():
        console.print(line.rstrip(), highlight=False, markup=False, soft_wrap=True)


def record_view(record: StudyRecord | SweepRecord, *, width: int) -> RenderableType:
    """Marks, tables, the headline and sentences, for a console of `width` columns."""
    tables = study_tables(record, is_brief=True) if isinstance(record, StudyRecord) else [sweep_table(record)]
    headline = study_headline(record) if isinstance(record, StudyRecord) else sweep_headline(record)
    parts: list[RenderableType] = []
    if record.marks:
        parts.append(Text(", ".join(record.marks), style="bold yellow"))
    parts += [as_rich(table, width=width) for table in tables if table.rows]
    parts.append(Text(headline, style="bold"))
    parts += [Text(sentence) for sentence in dict.fromkeys(record.words)]
    return Group(*parts)


def last_lines(record: StudyRecord | SweepRecord) -> list[str]:
    """Lines with the locations of the pages and the record."""
    lines = []
    if record.mlflow_link:
        start = (
            ""
            if record.tracking_uri.startswith("http")
            else f"scaleray tracking ui --uri {shlex.quote(record.tracking_uri)}   then open "
        )
        lines.append(f"MLflow:  {start}{record.mlflow_link}")
    if record.folder:
        lines += [f"report:  {record.folder}/report.html", f"record:  {record.folder}/record.json"]
    return lines
