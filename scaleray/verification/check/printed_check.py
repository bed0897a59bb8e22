"""The outcome of `scaleray check` on the terminal: the columns of a batch, and the verdict."""

from __future__ import annotations

from rich.console import Console

from scaleray.records.check_record import CheckRecord
from scaleray.records.text.tables import Table
from scaleray.reports.terminal.printed_record import print_whole, width_of
from scaleray.reports.terminal.terminal_tables import as_rich


def show_check(console: Console, record: CheckRecord) -> None:
    """Print the first batch's columns and the verdict; the findings were said as they were made."""
    rows = tuple(
        (column.name, column.shape, column.dtype, _number(column.low), _number(column.high))
        for column in record.columns
    )
    if rows:
        table = Table("The first batch", ("column", "shape", "type", "smallest", "largest"), rows)
        print_whole(console, as_rich(table, width=width_of(console)))
    console.print(f"{record.verdict} ({record.duration_s:.1f} s)", highlight=False, markup=False, soft_wrap=True)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
