"""Options of the commands that take the model of a run."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

Run = Annotated[
    str,
    Parameter(
        help="Folder or bucket of the run, its name in the default storage path, or its id or name in MLflow.",
        show_default=False,
    ),
]
Step = Annotated[
    str | None,
    Parameter(
        help="Which checkpoint: its number, best (by checkpoint.best), or a metric and its direction, such as "
        '"val/loss min". By default the final weights.'
    ),
]
WhichWeights = Annotated[
    str | None,
    Parameter(
        name="--weights",
        help="averaged or trained, of a run that keeps an average of its weights (averaging.decay). By default the "
        "average. With `predict -c FILE` it names the run.",
    ),
]
WorkloadName = Annotated[
    str | None,
    Parameter(
        name="--workload",
        help="path/to/file.py:Name or package.module:Name of the workload, where the run's own is not found again.",
    ),
]
Uri = Annotated[
    str | None,
    Parameter(
        help="MLflow's tracking URI, for a run that is found there; else SCALERAY_TRACKING__URI or MLFLOW_TRACKING_URI."
    ),
]


def step_of(text: str | None) -> Any:
    """The step as a number, where it is one."""
    return int(text) if text is not None and text.isdecimal() else text
