"""`scaleray evaluate`: how good is the model of a run?"""

from __future__ import annotations

from typing import Annotated

from scaleray.cli.options import AS_OPTIONS, Json, Run
from scaleray.cli.output import Output, print_json
from scaleray.models.model_options import EvaluateOptions


def evaluate(
    run: Run,
    *,
    data: str | None = None,
    options: Annotated[EvaluateOptions, AS_OPTIONS] = EvaluateOptions(),
    record: bool = True,
    json: Json = False,
) -> int:
    """Measure the metrics of a run's model again, on every split but train, or on other data.

    They are measured as in training, with the same figures to rounding, and written to the run in MLflow, in a section
    of their own.

    Parameters
    ----------
    data
        Other rows: a Parquet, CSV or JSON-lines file, or a folder or s3:// URI of such files.
    record
        Write the metrics to the run in MLflow.
    """
    from scaleray.models.evaluate import evaluate as run_evaluation
    from scaleray.models.printed_evaluation import show_evaluation

    output = Output(json=json)
    with output.running():
        result = run_evaluation(run, options=options, data=data, record=record, say=output.say)
    show_evaluation(output.console, result)
    if json:
        print_json(result.to_dict())
    return 0
