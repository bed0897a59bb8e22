"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

AS_OPTIONS = Parameter(name="*", negative_bool="", negative_iterable="")
"""Shows the fields of a dataclass as options of their own, without --no-NAME and --empty-NAME."""
Overrides = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]
"""Keys of the config with their values, as `--section.key value`."""
ConfigFile = Annotated[Path | None, Parameter(name=["--config", "-c"], help="YAML file of the run.")]
Json = Annotated[
    bool,
    Parameter(name="--json", negative="", help="Print the result as JSON on stdout; everything else goes to stderr."),
]
Flag = Annotated[bool, Parameter(negative="")]
"""A switch that is off unless it is named."""
Several = Annotated[tuple[str, ...], Parameter(negative="")]
"""An option that may be repeated."""
