"""`scaleray evaluate`: how good is the model of a run?"""

from __future__ import annotations

from scaleray.cli.options import Flag, Json
from scaleray.cli.output import Output, print_json
from scaleray.cli.run_options import Run, Step, Uri, WhichWeights, WorkloadName, step_of


def evaluate(
    run: Run,
    *,
    data: str | None = None,
    split: str | None = None,
    step: Step = None,
    weights: WhichWeights = None,
    workload: WorkloadName = None,
    workers: int = 1,
    local: Flag = False,
    record: bool = True,
    uri: Uri = None,
    json: Json = False,
) -> int:
    """Measure the metrics of a run's model again, on every split but train, or on other data.

    They are measured as in training, with the same figures to rounding, and written to the run in MLflow, in a section
    of their own.

    Parameters
    ----------
    data
        Other rows: a Parquet, CSV or JSON-lines file, or a folder or s3:// URI of such files.
    split
        One split of the run's own; train too.
    workers
        Workers with a whole model and a share of the rows each.
    local
        Without Ray: in this process, or in gloo processes where there are several workers.
    record
        Write the metrics to the run in MLflow.
    """
    from scaleray.launch.model.evaluate import evaluate as run_evaluation
    from scaleray.reports.terminal.evaluation import show_evaluation

    output = Output(json=json)
    with output.running():
        result = run_evaluation(
            run,
            data=data,
            split=split,
            step=step_of(step),
            weights=weights,
            workload=workload,
            workers=workers,
            local=local,
            record=record,
            uri=uri,
            say=output.say,
        )
    show_evaluation(output.console, result)
    if json:
        print_json(result.to_dict())
    return 0
