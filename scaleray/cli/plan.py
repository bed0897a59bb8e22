"""`scaleray plan`: what would N GPUs of another kind give, and how sure is that?

Arithmetic only: neither torch nor Ray is imported.
"""

from __future__ import annotations

import shlex
import sys

from cyclopts import App

from scaleray.cli.options import ConfigFile, Overrides
from scaleray.cli.output import print_json
from scaleray.cli.plan_options import (
    ClusterOptions,
    MeasuredOptions,
    ModelOptions,
    OutputOptions,
    RecipeOptions,
    TargetOptions,
)

plan_app = App(
    name="plan",
    help="Predict memory, step time and efficiency on a cluster, and rank the layouts.",
    help_format="plaintext",
)


@plan_app.default
def plan(
    *overrides: Overrides,
    config: ConfigFile = None,
    model: ModelOptions = ModelOptions(),
    cluster: ClusterOptions = ClusterOptions(),
    recipe: RecipeOptions = RecipeOptions(),
    measured: MeasuredOptions = MeasuredOptions(),
    target: TargetOptions = TargetOptions(),
    output: OutputOptions = OutputOptions(),
) -> int:
    """Rank the layouts of a model on a cluster."""
    from rich.console import Console

    from scaleray.cli.plan_answer import answered
    from scaleray.cli.plan_record import plan_record
    from scaleray.cli.plan_registered import registered
    from scaleray.config.alerts import without_secrets
    from scaleray.reports.terminal.plan import plan_view
    from scaleray.reports.terminal.record import print_whole, width_of
    from scaleray.reports.terminal.tables import as_rich
    from scaleray.reports.words.plan_target import way_table

    answer = answered(model, cluster, recipe, measured, target, config=config, overrides=overrides)
    advice, seen, found, kept = answer.advice, answer.seen, answer.found, answer.checkpoints
    command = f"scaleray {shlex.join(without_secrets(sys.argv[1:]))}"
    link = registered(answer, config=config, overrides=overrides, record=output.record, command=command)
    console = Console(stderr=output.json)
    width = width_of(console)
    if found.ways:
        table = way_table(found.ways, num_gpus=advice.question.cluster.num_gpus, words=found.words)
        print_whole(console, as_rich(table, width=width))
    print_whole(console, plan_view(advice, seen, rows=output.rows, width=width, num_samples=found.samples, kept=kept))
    if output.write is not None:
        for line in answer.write_config(config, output.write):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if output.html is not None:
        answer.write_page(output.html, command=command, rows=output.rows)
        console.print(f"page: {output.html}", highlight=False, markup=False, soft_wrap=True)
    if link is not None:
        console.print(f"MLflow: {link}", highlight=False, markup=False, soft_wrap=True)
    if output.json:
        record = plan_record(advice, seen, rows=output.rows, kept=kept, ways=found.ways)
        files = {"config": output.write, "page": output.html}
        written = {name: str(path.absolute()) for name, path in files.items() if path is not None}
        summary = f"recommended: {advice.best.layout.describe()}; {seen.doubling}".removesuffix("; ")
        print_json(record, written=written, summary=summary)
    return 0


@plan_app.command
def explain(
    what: str = "constants",
    /,
    *,
    model: str | None = None,
    cluster: str | None = None,
    global_batch: int | None = None,
    sequence: int | None = None,
    precision: str | None = None,
    strategies: str = "ddp,zero1,fsdp,hsdp,tp,pp,ep",
    rows: int = 20,
) -> int:
    """Print the planner's figures with their sources, or the layouts that do not fit in memory.

    Parameters
    ----------
    what
        constants; intervals; a GPU, link or network by name; or, with --model, --cluster and --global-batch, layouts.
    rows
        Layouts to list.
    """
    from scaleray.cli.plan_explained import explained

    lines = explained(
        what,
        model=ModelOptions(model=model),
        cluster=ClusterOptions(cluster=cluster),
        recipe=RecipeOptions(global_batch=global_batch, sequence=sequence, precision=precision, strategies=strategies),
        rows=rows,
    )
    print("\n".join(lines))
    return 0
