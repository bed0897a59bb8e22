"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scaleray.errors import ConfigError


def whole_numbers(option: str, text: str) -> list[int]:
    """Whole numbers of an option such as `1,2,4`. Raises ConfigError naming the option."""
    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise ConfigError(option, text, "it must be whole numbers with commas, such as 1,2,4") from None


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
