"""Options of the commands that take the model of a run."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

Run = Annotated[
    str,
    Parameter(
        help="Folder or bucket of the run, its name in the default storage path, or its id or name in MLflow.",
        show_default=False,
    ),
]
Uri = Annotated[
    str | None,
    Parameter(
        help="MLflow's tracking URI, for a run that is found there; else SCALERAY_TRACKING__URI or MLFLOW_TRACKING_URI."
    ),
]
