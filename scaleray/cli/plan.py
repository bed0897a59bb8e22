"""`scaleray plan`: predict the performance of N GPUs of another type, with its uncertainty.

Arithmetic only: neither torch nor Ray is imported.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App

from scaleray.cli.options import AS_OPTIONS, ConfigFile, Json, Overrides
from scaleray.cli.output import print_json
from scaleray.planner.ask.plan_options import LayoutOptions, PlanOptions

plan_app = App(
    name="plan",
    help="Predict memory, step time and efficiency on a cluster, and rank the layouts.",
    help_format="plaintext",
)


@plan_app.default
def plan(
    *overrides: Overrides,
    config: ConfigFile = None,
    options: Annotated[PlanOptions, AS_OPTIONS] = PlanOptions(),
    rows: int = 10,
    json: Json = False,
) -> int:
    """Rank the layouts of a model on a cluster.

    Parameters
    ----------
    rows
        Layouts to show.
    """
    from rich.console import Console

    from scaleray.config.alerts import without_secrets
    from scaleray.planner.ask.plan import answered
    from scaleray.planner.ask.plan_record import plan_record, registered
    from scaleray.planner.report.plan_table import plan_view
    from scaleray.planner.report.target_text import way_table
    from scaleray.records.terminal.printed_record import print_whole, width_of
    from scaleray.records.terminal.terminal_tables import as_rich

    answer = answered(options, config=config, overrides=overrides)
    advice, seen, found, kept = answer.advice, answer.seen, answer.found, answer.checkpoints
    command = f"scaleray {shlex.join(without_secrets(sys.argv[1:]))}"
    link = registered(answer, record=options.record, command=command)
    console = Console(stderr=json)
    width = width_of(console)
    if found.ways:
        table = way_table(found.ways, num_gpus=advice.question.cluster.num_gpus, words=found.words)
        print_whole(console, as_rich(table, width=width))
    print_whole(console, plan_view(advice, seen, rows=rows, width=width, num_samples=found.samples, kept=kept))
    if options.write is not None:
        for line in answer.write_config(config, Path(options.write)):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if options.html is not None:
        answer.write_page(Path(options.html), command=command, rows=rows)
        console.print(f"page: {options.html}", highlight=False, markup=False, soft_wrap=True)
    if link is not None:
        console.print(f"MLflow: {link}", highlight=False, markup=False, soft_wrap=True)
    if json:
        record = plan_record(advice, seen, rows=rows, kept=kept, ways=found.ways)
        files = {"config": options.write, "page": options.html}
        written = {name: str(Path(path).absolute()) for name, path in files.items() if path is not None}
        summary = f"recommended: {advice.best.layout.describe()}; {seen.doubling}".removesuffix("; ")
        print_json(record, written=written, summary=summary)
    return 0


@plan_app.command
def explain(
    what: str = "constants", /, *, options: Annotated[LayoutOptions, AS_OPTIONS] = LayoutOptions(), rows: int = 20
) -> int:
    """Print the planner's constants with their sources, or the layouts that do not fit in memory.

    Parameters
    ----------
    what
        constants; intervals; a GPU, link or network by name; or, with --model, --cluster and --global-batch, layouts.
    rows
        Layouts to list.
    """
    from scaleray.planner.ask.plan import explain_plan

    print("\n".join(explain_plan(what, options=options, rows=rows)))
    return 0
