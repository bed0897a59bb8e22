"""Differences between two configs of a run, and whether they alter the training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scaleray.config.decides import Decides, decides
from scaleray.config.run import RunConfig
from scaleray.config.strategy_traits import TRAITS


@dataclass(frozen=True)
class Change:
    """A key whose value changed."""

    key: str
    before: Any
    after: Any
    follows_evaluations: bool = False
    """Whether evaluations decide the learning rate or the end of the training."""

    @property
    def alters_training(self) -> bool:
        """Whether the run would continue as another training."""
        if self.key == "strategy.name":
            exact = {"auto", *(name for name, traits in TRAITS.items() if not traits.trains_apart)}
            return not {self.before, self.after} <= exact
        is_followed = self.follows_evaluations and self.key == "evaluation.every"
        return is_followed or decides(self.key) is Decides.RESULT

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def changes(before: Mapping[str, Any], after: RunConfig) -> list[Change]:
    """Return every key whose value differs. before: result of `RunConfig.to_dict`, possibly from an older version."""
    old, new = dict(_flat(before)), dict(_flat(after.to_dict()))
    defaults = dict(_flat(_defaults(after)))
    found = []
    for key in sorted(old.keys() | new.keys()):
        # a key that the older version lacked is equivalent to its present default
        was = old[key] if key in old else defaults.get(key)
        if was != new.get(key):
            found.append(Change(key, was, new.get(key), after.follows_evaluations))
    return found


def training_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flat keys that determine the result: equal for two runs of the same training."""
    return {key: value for key, value in _flat(config) if decides(key) is Decides.RESULT}


def _defaults(config: RunConfig) -> dict[str, Any]:
    """The config without optional keys."""
    required = {
        "workload": {"name": config.workload.name},
        "batch": {"global_size": config.batch.global_size},
        "optimizer": {"learning_rate": config.optimizer.learning_rate},
        "stop": {"after": config.stop.after},
    }
    return RunConfig.model_validate(required).to_dict()


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name.count(".") < 1 and name not in ("workload.args",):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value
