"""`scaleray evaluate`: metrics of a run's model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from scaleray.cli.options import AS_OPTIONS, Json, Run
from scaleray.cli.output import Output, print_json
from scaleray.models.model_options import EvaluateOptions

if TYPE_CHECKING:
    from rich.console import Console

    from scaleray.models.evaluate import Evaluation


def evaluate(
    run: Run,
    *,
    data: str | None = None,
    options: Annotated[EvaluateOptions, AS_OPTIONS] = EvaluateOptions(),
    record: bool = True,
    json: Json = False,
) -> int:
    """Measure the metrics of a run's model again, on every split except train, or on other data.

    They are measured as in training, with the same results up to rounding, and written to the run in MLflow under a
    separate prefix.

    Parameters
    ----------
    data
        Other rows: a Parquet, CSV or JSON-lines file, or a folder or s3:// URI of such files.
    record
        Write the metrics to the run in MLflow.
    """
    from scaleray.models.evaluate import evaluate as run_evaluation

    output = Output(json=json)
    with output.running():
        result = run_evaluation(run, options=options, data=data, record=record, say=output.say)
    show_evaluation(output.console, result)
    if json:
        print_json(result.to_dict())
    return 0


def show_evaluation(console: Console, result: Evaluation) -> None:
    """Print the metrics of every split as a table, and where they were written."""
    from scaleray.records.terminal.printed_record import print_whole, width_of
    from scaleray.records.terminal.terminal_tables import as_rich
    from scaleray.records.text.study_sweep_tables import Table

    rows = []
    for name, value in sorted(result.metrics.items()):
        split, _, metric = name.partition("/")
        rows.append((split, metric, f"{value:.6g}", f"{result.rows[split]}"))
    table = Table(f"{result.run}: {result.weights}", ("split", "metric", "value", "rows"), tuple(rows))
    print_whole(console, as_rich(table, width=width_of(console)))
    if result.recorded:
        console.print(f"MLflow:  {', '.join(result.recorded.values())}", highlight=False, markup=False, soft_wrap=True)
