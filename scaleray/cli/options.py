"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
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
        help="MLflow's tracking URI, of a run recorded there; by default SCALERAY_TRACKING__URI or MLFLOW_TRACKING_URI."
    ),
]


AS_OPTIONS = Parameter(name="*", negative_bool="", negative_iterable="")
"""Parameter that shows the fields of a dataclass as separate options, without --no-NAME and --empty-NAME."""
Overrides = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]
"""Config keys with their values, as `--section.key value`."""
ConfigFile = Annotated[Path | None, Parameter(name=["--config", "-c"], help="YAML file of the run.")]
Json = Annotated[
    bool,
    Parameter(name="--json", negative="", help="Print the result as JSON on stdout; everything else goes to stderr."),
]
Flag = Annotated[bool, Parameter(negative="")]
"""Parameter for a switch that is off unless given."""
Several = Annotated[tuple[str, ...], Parameter(negative="")]
"""Parameter for an option that may be repeated."""
