"""Settings of the workload: its class, arguments and weights."""

from typing import Any

from pydantic import Field, field_validator

from scaleray.config.base import Settings

DEEPEST_ARGUMENT = 20


class WorkloadSettings(Settings):
    """The user's class and its keyword arguments."""

    name: str = Field(min_length=1)
    """Class of the workload, as `package.module:Name` or `path/to/file.py:Name`; a relative path is resolved in the
    current folder, then next to the config.
    """
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class: numbers, text, true/false, none, and lists and mappings of them."""

    weights: str | None = None
    """Weights to start from, for fine-tuning: a run's folder or name in the storage path (its newest checkpoint, or its
    final weights if there is none), a file `.pt` or `.safetensors`, a folder of `scaleray checkpoint import`, one
    checkpoint, a folder in Hugging Face's layout (config.json and model.safetensors), or an adapter of peft
    (adapter_config.json), which only sets the adapters."""

    @property
    def stem(self) -> str:
        """Name of the class in lower case, for the names of runs and folders."""
        return self.name.rpartition(":")[2].rpartition(".")[2].lower() or "run"

    @field_validator("args", mode="after")
    @classmethod
    def _plain_arguments(cls, args: dict[str, Any]) -> dict[str, Any]:
        return {name: _plain(value, name) for name, value in args.items()}


def _plain(value: Any, name: str, depth: int = 1) -> Any:
    """Convert a value to a form that YAML and JSON preserve, so that a saved config builds the same workload."""
    if depth > DEEPEST_ARGUMENT:
        raise ValueError(f"{name} is nested more than {DEEPEST_ARGUMENT} deep")
    if isinstance(value, (list, tuple)):
        return [_plain(item, name, depth + 1) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {_plain(key, name): _plain(item, name, depth + 1) for key, item in value.items()}
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name} has text that is not valid Unicode") from None
        return value
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"{name} has a whole number that needs more than 64 bits")
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise ValueError(
        f"{name} contains a {type(value).__name__}; give numbers, text (dates in quotes), true/false, none, "
        "or lists and mappings of them"
    )
