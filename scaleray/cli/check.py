"""`scaleray check`: test a workload quickly before training it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scaleray.cli.options import ConfigFile, Json, Overrides
from scaleray.cli.output import Output, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from scaleray.records.check_record import CheckRecord


def check(*overrides: Overrides, config: ConfigFile = None, processes: bool = True, json: Json = False) -> int:
    """Check a workload before training it: one batch, in about ten seconds, without Ray.

    It checks shapes and types of the data, repeated rows, the loss as sum and count, gradients and parameters without
    one, metrics, labels out of range, memory, the speed of the input, and whether two processes train as one does.
    Config keys can be given as options, as for train. Exit code 0 if all checks pass, 1 otherwise.

    Parameters
    ----------
    processes
        Compare two gloo processes with one, for two steps in float64.
    """
    from scaleray.planner.ask.auto_layout import load_planned

    resolved = load_planned(config, overrides)
    if processes:
        from scaleray.launch.workers.forks import OF_A_CHECK, begin_imports

        begin_imports(OF_A_CHECK)  # concurrently with this process's own imports
    from scaleray.verification.check.check import check as run

    output = Output(json=json)
    with output.running():
        output.say(f"checking {resolved.workload.name}")
        record = run(
            resolved, processes=processes, base_dir=config.resolve().parent if config else None, say=output.say
        )
    show_check(output.console, record)
    if json:
        print_json(record.to_dict())
    return 0 if record.passed else 1


def show_check(console: Console, record: CheckRecord) -> None:
    """Print the first batch's columns and the verdict; the findings were printed as they were made."""
    from scaleray.records.terminal.printed_record import print_whole, width_of
    from scaleray.records.terminal.terminal_tables import as_rich
    from scaleray.records.text.study_sweep_tables import Table

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
