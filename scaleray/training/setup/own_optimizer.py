"""Settings that a workload's own optimizer uses, and those that it ignores.

An optimizer may use values that differ from the derived ones but follow from them, such as rates that fall with a
layer's depth. So if values differ, the optimizer is built again with other settings. A value that changes with them
follows the config in some way; one that does not change ignores it."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from scaleray.config import RunConfig
from scaleray.config.optimizer_schedule import missing_rate
from scaleray.config.recipe.lr_rules import MOVED_BY_RULES
from scaleray.errors import ConfigError, WorkloadError
from scaleray.training.setup.averaging import has_modes
from scaleray.training.setup.several_optimizers import SeveralOptimizers, members


@dataclass(frozen=True)
class OptimizerValues:
    """Values passed to a workload's own `optimizer`: the configured ones, with the batch-size rule applied."""

    name: str
    learning_rate: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    momentum: float
    nesterov: bool
    total_steps: int
    """Number of optimizer steps of the whole training."""
    steps_per_epoch: int
    clip_norm: float | None = None

    def changed(self, **values: Any) -> OptimizerValues:
        """A copy with some values replaced."""
        return dataclasses.replace(self, **values)


class WithoutRate(OptimizerValues):
    """Values of a config without a learning rate; they raise an error if an optimizer reads it."""

    def __getattribute__(self, name: str) -> Any:
        if name == "learning_rate":
            raise missing_rate("the workload's own optimizer() reads it")
        return super().__getattribute__(name)

    def changed(self, **values: Any) -> OptimizerValues:
        return dataclasses.replace(self, **{"learning_rate": math.nan, **values})


@dataclass(frozen=True)
class InUse:
    """Values that a workload's own optimizer uses in place of derived ones, by name, and warnings about them."""

    values: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


Build = Callable[[OptimizerValues], Any]
GROUP_KEYS = {
    "learning_rate": "lr", "betas": "betas", "epsilon": "eps", "weight_decay": "weight_decay", "momentum": "momentum",
    "nesterov": "nesterov",
}  # fmt: skip
"""Key of each setting in the parameter groups of torch's optimizers."""
PARTS = (slice(0, 8), slice(0, 4), slice(4, 8))
"""The rows of a matrix, and of its halves."""
NOT_GIVEN = ("trust_coefficient", "adapt_vectors")
"""Settings of the optimizers that come with scaleray; `optimizer()` does not receive them."""


def build_own(
    build: Build, values: OptimizerValues, config: RunConfig, varied: Collection[str] = ()
) -> tuple[torch.optim.Optimizer | None, InUse]:
    """Build the workload's own optimizer, if it has one, and find which of the config's settings it uses.

    build: calls `optimizer()`; it is called again with other values if the optimizer lacks values that matter. varied:
    keys of the config in which this training differs from the others of a sweep. Raises ConfigError if one of these
    keys, or a rule, would have no effect."""
    own = _checked(build(values))
    if own is None:
        return None, InUse()
    matter = [name for name in GROUP_KEYS if _matters(name, values, config, varied)]
    other = [name for name in matter if not _has(own, name, values)]
    asked = [name for name in matter if name in other or f"optimizer.{name}" in varied]
    ignored = _unmoved(build, own, values, asked) if asked else {}
    asks_for_name = _is_set("name", config, varied)
    if asks_for_name:
        changed = _try(build, values.changed(name="sgd" if values.name != "sgd" else "adamw"))
        if changed is not None and _kinds(changed) == _kinds(own):
            ignored["name"] = True
    if asked or asks_for_name:
        own = _checked(build(values))  # built last, so that a workload that keeps what it made keeps this optimizer
        assert own is not None
    for name in (name for name, is_certain in ignored.items() if is_certain):
        _refuse(name, own, values, config, varied)
    warnings = [_warning(name, own, values, is_certain) for name, is_certain in ignored.items()]
    warnings += [
        f"optimizer.{name} has no effect on the workload's own optimizer()"
        for name in NOT_GIVEN
        if _is_set(name, config, varied)
    ]
    if config.optimizer.learning_rate is None:
        other = ["learning_rate", *other]
    in_use = {name: _of_groups(own, name)[0] for name in other if name in MOVED_BY_RULES and _of_groups(own, name)}
    return own, InUse(in_use, warnings)


def acts_on_elements(own: torch.optim.Optimizer) -> bool:
    """Whether halves of a matrix are updated like the whole matrix. False for optimizers that need whole matrices, such
    as Muon, Shampoo and Adafactor. True for one that fails in a trial step."""
    draw = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(3, 8, 6, generator=draw).unbind()
    for each in members(own).values():
        for number in range(len(each.param_groups)):
            try:
                with torch.random.fork_rng(devices=[]):
                    whole, *halves = (_rehearsed(each, number, start[p], [g[p] for g in gradients]) for p in PARTS)
            except Exception:  # it may want parameters of another shape
                continue
            if not torch.allclose(whole, torch.cat(halves), rtol=1e-3, atol=1e-6):
                return False
    return True


def _rehearsed(
    own: torch.optim.Optimizer, number: int, start: torch.Tensor, gradients: list[torch.Tensor]
) -> torch.Tensor:
    """Parameter after trial steps of a copy of an optimizer, as a member of the parameter group with this number."""
    rehearsal = copy.copy(own)
    parameter = torch.nn.Parameter(start.clone())
    rehearsal.param_groups = [{**own.param_groups[number], "params": [parameter]}]
    rehearsal.state = defaultdict(dict)
    if has_modes(rehearsal):
        rehearsal.train()  # type: ignore[attr-defined]
    for gradient in gradients:
        parameter.grad = gradient.clone()
        rehearsal.step()
    return parameter.detach()


def _checked(own: Any) -> torch.optim.Optimizer | None:
    is_several = isinstance(own, Mapping) and len(own) > 0
    wrong = [o for o in (own.values() if is_several else [own]) if not isinstance(o, torch.optim.Optimizer)]
    if own is not None and wrong:
        allowed = "it must return a torch.optim.Optimizer, several of them by name, or None"
        raise WorkloadError("optimizer()", type(wrong[0]).__name__, allowed)
    return SeveralOptimizers({str(name): each for name, each in own.items()}) if is_several else own


def _kinds(own: torch.optim.Optimizer) -> list[str]:
    return [type(each).__name__ for each in members(own).values()]


def _matters(name: str, values: OptimizerValues, config: RunConfig, varied: Collection[str]) -> bool:
    """Whether the value was requested: by the user, with a value other than the default, or by a rule."""
    if getattr(config.optimizer, name) is None:
        return False
    is_moved = name in MOVED_BY_RULES and getattr(values, name) != getattr(config.optimizer, name)
    return is_moved or _is_set(name, config, varied)


def _is_set(name: str, config: RunConfig, varied: Collection[str]) -> bool:
    default = type(config.optimizer).model_fields[name].default
    return f"optimizer.{name}" in varied or getattr(config.optimizer, name) != default


def _of_groups(own: torch.optim.Optimizer, name: str) -> list[Any]:
    """Plain numeric values of the setting in the parameter groups that have it."""
    found = [group[GROUP_KEYS[name]] for group in own.param_groups if group.get(GROUP_KEYS[name]) is not None]
    return [tuple(float(v) for v in value) if isinstance(value, (tuple, list)) else _plain(value) for value in found]


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool) else float(value)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, tuple) or isinstance(right, tuple):
        return (
            isinstance(left, tuple)
            and isinstance(right, tuple)
            and len(left) == len(right)
            and all(map(_same, left, right))
        )
    return math.isclose(left, right, rel_tol=1e-6)  # a rate may be a tensor in float32


def _has(own: torch.optim.Optimizer, name: str, values: OptimizerValues) -> bool:
    """Whether any group has the value; the others may have shares of it, or none (such as no decay for biases)."""
    return any(_same(value, getattr(values, name)) for value in _of_groups(own, name))


def _unmoved(build: Build, own: torch.optim.Optimizer, values: OptimizerValues, names: list[str]) -> dict[str, bool]:
    """Settings that stay the same when other values are passed, and whether this is certain; it is not if the optimizer
    cannot be built with those values."""
    changed = _try(build, _other(values))
    if changed is None or len(changed.param_groups) != len(own.param_groups):
        return dict.fromkeys(names, False)
    pairs = {name: (_of_groups(own, name), _of_groups(changed, name)) for name in names}
    return {
        name: True
        for name, (ours, theirs) in pairs.items()
        if len(ours) == len(theirs) and all(map(_same, ours, theirs))
    }


def _other(values: OptimizerValues) -> OptimizerValues:
    """Values that differ in every setting and are equally valid."""
    part = lambda value: 0.25 if value == 0.5 else 0.5
    rate = {} if isinstance(values, WithoutRate) else {"learning_rate": values.learning_rate / 2}
    return values.changed(
        **rate,
        betas=(part(values.betas[0]), part(values.betas[1])),
        epsilon=2 * values.epsilon,
        weight_decay=2 * values.weight_decay + 0.01,
        momentum=part(values.momentum),
        nesterov=not values.nesterov,
    )


def _try(build: Build, values: OptimizerValues) -> torch.optim.Optimizer | None:
    try:
        return _checked(build(values))
    except Exception:  # it may know some values only
        return None


def _refuse(
    name: str, own: torch.optim.Optimizer, values: OptimizerValues, config: RunConfig, varied: Collection[str]
) -> None:
    key, advice = f"optimizer.{name}", f"use settings.{name} in optimizer()"
    if name == "learning_rate":
        advice += " (of a LightningModule: a hyperparameter lr or learning_rate, which workload.args leaves out)"
    if key in varied:
        raise ConfigError(
            key,
            getattr(config.optimizer, name),
            f"the workload's own optimizer() ignores it and uses {_shown(own, name)} in every trial",
            f"{advice}, or leave {key} out of the sweep",
        )
    if name == "learning_rate" and (config.optimizer.rule != "none" or "optimizer.rule" in varied):
        raise ConfigError(
            "optimizer.rule",
            config.optimizer.rule,
            f"the workload's own optimizer() ignores the derived learning rate: it uses {_shown(own, name)}, "
            f"not {values.learning_rate:g}",
            f"{advice}, or --optimizer.rule none",
        )


def _warning(name: str, own: torch.optim.Optimizer, values: OptimizerValues, is_certain: bool) -> str:
    verb = "ignores" if is_certain else "does not have"
    asked = getattr(values, name)
    shown = f"{asked:g}" if isinstance(asked, float) else str(asked)
    return (
        f"the workload's own optimizer() {verb} optimizer.{name}: it uses {_shown(own, name)}, not {shown}; use "
        f"settings.{name} there, or leave optimizer.{name} out"
    )


def _shown(own: torch.optim.Optimizer, name: str) -> str:
    if name == "name":
        return ", ".join(dict.fromkeys(_kinds(own)))
    found = list(dict.fromkeys(_of_groups(own, name)))
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in found[:4]) or "none"
