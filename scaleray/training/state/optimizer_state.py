"""An optimizer's state, keyed by the names of its parameters for checkpoints, and converted back for torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from scaleray.checkpoints.manifest import Manifest
from scaleray.errors import CheckpointError
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.optimizers import Schedule
from scaleray.training.setup.plateaus import OwnPlateau
from scaleray.training.setup.several_optimizers import SeveralSchedules, members
from scaleray.training.state.items import OPTIMIZER, Tensors, Values, dtype_of, plain, tensors_of, unplain

UNNAMED, VALUE = "unnamed-", "(value)"
# how torch computes a step, not which one: chosen for the layout that the parameters have now (torch 2.13 has no fused
# SGD for shards, and one process uses it)
KERNELS = ("foreach", "fused")


def optimizer_state(optimizer: torch.optim.Optimizer, module: nn.Module) -> tuple[Tensors, Values]:
    """An optimizer's state by parameter name: tensors and other values."""
    names = _names(optimizer, module)
    state = optimizer.state_dict()
    tensors: Tensors = {f"{OPTIMIZER}.{name}.{VALUE}": p for name, p in _unnamed(optimizer, names).items()}
    others: Values = {}
    for number, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{OPTIMIZER}.{names[number]}.{key}"] = value
            else:
                others.setdefault(names[number], {})[key] = value
    groups = [
        {
            **{k: plain(v) for k, v in group.items() if k != "params"},
            "params": [names[number] for number in group["params"]],
        }
        for group in state["param_groups"]
    ]
    return tensors, {"groups": groups, "others": others}


def optimizer_templates(
    manifest: Manifest, optimizer: torch.optim.Optimizer, module: nn.Module, *, is_part: bool = False
) -> tuple[Tensors, Callable[[Tensors], dict[str, Any]]]:
    """Empty tensors for the saved state of an optimizer, and a function that builds torch's own state dict from them.

    is_part: this optimizer has only some of the saved parameters. Raises CheckpointError if the optimizer has other
    parameters or groups than the checkpoint."""
    names = _names(optimizer, module)
    values = manifest.values[OPTIMIZER]
    saved_groups = [group["params"] for group in values["groups"]]
    counts = iter(range(len(names)))
    own_groups = [[names[next(counts)] for _ in group["params"]] for group in optimizer.param_groups]
    # parameters go by name, whatever the order: that follows from which rank owned what
    is_same = len(saved_groups) == len(own_groups) and all(
        set(own) <= set(saved) if is_part else set(own) == set(saved)
        for own, saved in zip(own_groups, saved_groups, strict=True)
    )
    if not is_same:
        raise CheckpointError.problem(
            "the optimizer",
            f"has {sum(map(len, own_groups))} parameters in {len(own_groups)} groups, but the checkpoint has "
            f"{sum(map(len, saved_groups))} in {len(saved_groups)}: names or groups differ",
            "resume with the same model and the same frozen parameters",
        )
    parameters = dict(zip(names, (p for group in optimizer.param_groups for p in group["params"]), strict=True))
    by_length = sorted((name for group in saved_groups for name in group), key=len, reverse=True)
    templates: Tensors = {}
    place: dict[str, tuple[str, str]] = {}
    for full, tensor in tensors_of(manifest, OPTIMIZER).items():
        rest = full.removeprefix(f"{OPTIMIZER}.")
        name = next(n for n in by_length if rest.startswith(n + "."))
        if name not in parameters:
            continue  # another rank's
        parameter = parameters[name]
        place[full] = name, rest[len(name) + 1 :]
        if place[full][1] == VALUE:  # a parameter that no module holds is filled in place
            templates[full] = parameter.detach()
        elif tuple(parameter.shape) == tensor.shape and tensor.shape:
            templates[full] = torch.empty_like(parameter, dtype=dtype_of(tensor), requires_grad=False)  # sharded alike
        else:
            templates[full] = torch.empty(tensor.shape, dtype=dtype_of(tensor))

    def build(filled: Tensors) -> dict[str, Any]:
        numbers = {name: number for number, name in enumerate(names)}
        others = ((n, entries) for n, entries in values["others"].items() if n in numbers)
        state: dict[int, dict[str, Any]] = {numbers[n]: dict(entries) for n, entries in others}
        for full, tensor in filled.items():
            name, key = place[full]
            if key == VALUE:
                continue
            state.setdefault(numbers[name], {})[key] = tensor
        groups = [
            {
                **{k: unplain(v) for k, v in group.items()},
                **{k: here[k] for k in KERNELS if k in here},
                "params": [numbers[n] for n in own],
            }
            for group, here, own in zip(values["groups"], optimizer.param_groups, own_groups, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    return templates, build


@dataclass(frozen=True)
class Rates:
    """Hyperparameters of an optimizer and its schedule, which would be replaced when a checkpoint is restored.

    schedule: state of the schedule before its first step."""

    groups: list[dict[str, Any]]
    schedule: dict[str, Any]

    @classmethod
    def of(cls, setup: Setup) -> Rates:
        """Read the current hyperparameters of a set-up."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in setup.optimizer.param_groups]
        return cls(groups, copy.deepcopy(setup.schedule.state_dict()))

    def put_back(self, setup: Setup, *, position: int) -> None:
        """Restore these hyperparameters, and set the schedule to `position` steps after its start."""
        for group, own in zip(setup.optimizer.param_groups, self.groups, strict=True):
            group.update(own)
        _restart(setup.schedule, self.schedule, position)


def _restart(schedule: LRScheduler, first: dict[str, Any], position: int) -> None:
    """Move a schedule to `position` steps after its start, where its state was `first`. A schedule that follows
    evaluations keeps its reductions."""
    if isinstance(schedule, SeveralSchedules):
        for name, own in schedule.by_name.items():
            _restart(own, first[name], position)
    elif isinstance(schedule, (Schedule, OwnPlateau)):
        schedule.restart(first, position)
    else:
        schedule.load_state_dict(copy.deepcopy(first))
        for _ in range(position):  # a workload's own may find a rate from the one before
            schedule.step()


def _names(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[str]:
    by_id = {id(parameter): name for name, parameter in module.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # of several optimizers, more than one may hold a parameter
    owners = [
        f"{name}/" if name else ""
        for name, own in members(optimizer).items()
        for group in own.param_groups
        for _ in group["params"]
    ]
    # an optimizer of the user's may hold parameters that the model does not register
    return [
        f"{owner}{by_id[id(p)]}" if id(p) in by_id else f"{UNNAMED}{number}"
        for number, (owner, p) in enumerate(zip(owners, parameters, strict=True))
    ]


def _unnamed(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, torch.Tensor]:
    """Parameters of the optimizer that the model does not register, by their names in checkpoints."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return {name: p for name, p in zip(names, parameters, strict=True) if name.startswith(UNNAMED)}
