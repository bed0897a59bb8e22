"""Config settings supplied by a workload, such as those of Lightning's callbacks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scaleray.config.run import RunConfig
from scaleray.errors import ConfigError


@dataclass(frozen=True)
class Brought:
    """Value of one config key. by: its source. is_default: whether a value in the config overrides it."""

    value: Any
    by: str
    is_default: bool = False


def with_brought(config: RunConfig, workload: Any) -> RunConfig:
    """Add the settings of the workload's `brought_settings(config)`, if it has that method.

    Raises ConfigError if the config has a different value.
    """
    bring = getattr(workload, "brought_settings", None)
    found: Mapping[str, Brought] = {} if bring is None else bring(config)
    taken = {}
    for key, brought in found.items():
        section, _, name = key.partition(".")
        settings = getattr(config, section)
        before = getattr(settings, name)
        is_given = section in config.model_fields_set and name in settings.model_fields_set
        if not is_given:
            taken[key] = brought.value
        elif before != brought.value and not brought.is_default:
            allowed = f"{brought.by} of the workload sets {brought.value}"
            shown = "null" if before is None else before if isinstance(before, (int, float)) else str(before)
            raise ConfigError(key, shown, allowed, "omit one of them")
    return config.changed(taken) if taken else config
