"""An evaluation on the terminal: a row for each metric."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from scaleray.records.text.tables import Table
from scaleray.reports.terminal.printed_record import print_whole, width_of
from scaleray.reports.terminal.terminal_tables import as_rich

if TYPE_CHECKING:
    from scaleray.models.evaluate import Evaluation


def show_evaluation(console: Console, result: Evaluation) -> None:
    """Print the metrics of every split as a table, and where they were written."""
    rows = []
    for name, value in sorted(result.metrics.items()):
        split, _, metric = name.partition("/")
        rows.append((split, metric, f"{value:.6g}", f"{result.rows[split]}"))
    table = Table(f"{result.run}: {result.weights}", ("split", "metric", "value", "rows"), tuple(rows))
    print_whole(console, as_rich(table, width=width_of(console)))
    if result.recorded:
        console.print(f"MLflow:  {', '.join(result.recorded.values())}", highlight=False, markup=False, soft_wrap=True)
