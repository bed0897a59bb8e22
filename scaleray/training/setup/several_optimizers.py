"""Several optimizers of a workload, handled as one: for checkpoints, schedules, checks, and the steps of a single loss.

With several losses, each optimizer takes its steps with the gradients of its own loss, see
`training.step.several_losses`."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from scaleray.config import RunConfig
from scaleray.config.strategy_traits import TRAITS, traits_of
from scaleray.errors import ConfigError, WorkloadError
from scaleray.strategies.ddp import looking_for_unused
from scaleray.training.setup.weighted_losses import losses_of


class SeveralOptimizers(torch.optim.Optimizer):
    """Groups, state and steps of several optimizers, in the order of their names.

    parameters_of: all parameters of each optimizer by name, including those that other ranks update."""

    def __init__(self, by_name: Mapping[str, torch.optim.Optimizer]) -> None:
        # not torch's own: what it would set up is here found in the optimizers
        self.by_name, self.defaults = dict(by_name), {}
        self.parameters_of: dict[str, list[nn.Parameter]] = {
            name: [p for group in own.param_groups for p in group["params"]] for name, own in by_name.items()
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers, shared with them."""
        return [group for own in self.by_name.values() for group in own.param_groups]

    @property
    def state(self) -> dict[Any, dict[str, Any]]:  # type: ignore[override]
        """State of all optimizers by parameter, for reading. Keys name the optimizer, as several may update one
        parameter."""
        found: dict[Any, dict[str, Any]] = {}
        for name, own in self.by_name.items():
            for parameter, entries in own.state.items():
                found.setdefault(parameter, {}).update({f"{name}/{key}": value for key, value in entries.items()})
        return found

    def state_dict(self) -> dict[str, Any]:
        """State in torch's form, with parameters numbered across all optimizers."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        before = 0
        for own in self.by_name.values():
            found = own.state_dict()
            state.update({before + number: entries for number, entries in found["state"].items()})
            groups += [{**g, "params": [before + number for number in g["params"]]} for g in found["param_groups"]]
            before += sum(len(group["params"]) for group in own.param_groups)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give each optimizer its part of a result of `state_dict`."""
        groups = iter(state_dict["param_groups"])
        for own in self.by_name.values():
            mine = [next(groups) for _ in own.param_groups]
            numbers = [number for group in mine for number in group["params"]]
            state = {at: state_dict["state"][n] for at, n in enumerate(numbers) if n in state_dict["state"]}
            at = iter(range(len(numbers)))
            mine = [{**group, "params": [next(at) for _ in group["params"]]} for group in mine]
            own.load_state_dict({"state": state, "param_groups": mine})

    def zero_grad(self, set_to_none: bool = True) -> None:
        for own in self.by_name.values():
            own.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Let each optimizer take a step with the gradients of a single loss."""
        for own in self.by_name.values():
            own.step()

    def register_step_pre_hook(self, hook: Any) -> Any:
        return [own.register_step_pre_hook(hook) for own in self.by_name.values()]

    def register_step_post_hook(self, hook: Any) -> Any:
        return [own.register_step_post_hook(hook) for own in self.by_name.values()]


class SeveralSchedules(LRScheduler):
    """The schedules of several optimizers as one."""

    def __init__(self, optimizer: SeveralOptimizers, by_name: Mapping[str, LRScheduler]) -> None:
        self.optimizer, self.by_name = optimizer, dict(by_name)

    @property
    def plateaus(self) -> list[Any]:
        """The schedulers that follow evaluations."""
        return [plateau for own in self.by_name.values() for plateau in getattr(own, "plateaus", ())]

    def follow_evaluation(self, value: float) -> None:
        """Advance the schedulers that follow evaluations with the value of an evaluation."""
        for own in self.by_name.values():
            if callable(follow := getattr(own, "follow_evaluation", None)):
                follow(value)

    def step(self, epoch: int | None = None) -> None:
        for own in self.by_name.values():
            own.step()

    def get_last_lr(self) -> list[Any]:
        return [rate for own in self.by_name.values() for rate in own.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        return {name: own.state_dict() for name, own in self.by_name.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, own in self.by_name.items():
            own.load_state_dict(state_dict[name])


def members(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """The optimizers that take steps, by name; a single optimizer has the name ""."""
    return optimizer.by_name if isinstance(optimizer, SeveralOptimizers) else {"": optimizer}


def check_losses(workload: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise WorkloadError unless there is a loss for each optimizer, under the same name, or a single loss for
    optimizers that share no parameter."""
    losses, names = losses_of(workload), list(members(optimizer))
    if losses is None:
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        if len(held) == len(set(held)):
            return
        raise WorkloadError(
            "optimizer()",
            f"a mapping of {', '.join(names)}",
            "some of them share a parameter, which a single loss would update more than once",
            "give each parameter to one of them, or return {name: function(model, batch)} from losses(), in the "
            "order of their steps",
        )
    if names == [""] or set(losses) != set(names):
        raise WorkloadError(
            "losses()",
            f"a mapping of {', '.join(losses)}",
            f"optimizer() returns {'a single one' if names == [''] else ', '.join(names)}",
            "return an optimizer for each loss from optimizer(), under the same names",
        )


def config_for(losses: Collection[str] | None, config: RunConfig, strategy: str) -> RunConfig:
    """Adapt the config to several losses; without any it is unchanged. Raises ConfigError for settings that do not
    support several losses."""
    if not losses:
        return config
    traits = traits_of(strategy)
    why = f"the workload has {len(losses)} losses ({', '.join(losses)})"
    if traits.trains_apart or strategy == "pipeline":
        reason = "replicas average after steps of one optimizer" if traits.trains_apart else "stages run only one loss"
        able = [n for n, t in TRAITS.items() if not t.trains_apart and n not in ("pipeline", "single")]
        raise ConfigError("strategy.name", strategy, f"{why}, and {reason}", f"use {', '.join(able)}")
    refused = {
        "compression.name": (
            config.compression.name != "none",
            "the compression error of one loss would be added to another",
        ),
        "noise_scale.measure": (config.noise_scale.measure is not False, "each has a noise scale of its own"),
        "pruning.method": (config.pruning.method != "none", "each would need its own masks"),
        "memory.find_micro_size": (config.memory.find_micro_size, "the search tries steps of one optimizer"),
        "memory.on_out_of_memory": (
            config.memory.on_out_of_memory != "raise",
            "a step cannot be repeated once one optimizer has taken its step",
        ),
    }
    for key, (is_asked, reason) in refused.items():
        if is_asked:
            section, _, name = key.partition(".")
            value = getattr(getattr(config, section), name)
            raise ConfigError(key, value, f"{why}, and {reason}", f"leave {key} out")
    # a loss leaves the parameters of others' optimizers without a gradient
    return looking_for_unused(config)
