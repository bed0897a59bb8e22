"""Everything that a training is made of between two steps: what a checkpoint holds, and what a resumed run starts from.

An item is tensors or small values under a name that a user understands, so that a difference after a resume can be
blamed on one of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from scaleray.checkpoints import sharded
from scaleray.checkpoints.manifest import Manifest, Tensor
from scaleray.checkpoints.storage import Store
from scaleray.errors import CheckpointError, WorkloadError
from scaleray.reproducibility.seeding import random_state, seed_everything, set_random_state, stream_seed
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.place import Place

Tensors = dict[str, torch.Tensor]
Values = dict[str, Any]

MODEL, BUFFERS, OPTIMIZER, SCHEDULE, SCALER, RANDOM, PROGRESS, WORKLOAD, STRATEGY, REPLICA, PRUNING = (
    "model", "buffers", "optimizer", "schedule", "scaler", "random", "progress", "workload", "strategy", "replica",
    "pruning",
)  # fmt: skip
UNNAMED, VALUE = "unnamed-", "(value)"
ITEMS = (MODEL, BUFFERS, OPTIMIZER, SCHEDULE, SCALER, PROGRESS, WORKLOAD, STRATEGY, REPLICA, PRUNING, RANDOM)
"""State items in the order in which they are restored: random numbers last, as anything before may draw some."""
SETUP_ITEMS = {"parallel": MODEL, "optimizer": OPTIMIZER, "schedule": SCHEDULE, "precision": SCALER, "pruning": PRUNING}
"""Which item holds the state of each field of Setup; the fields not named here have none."""


@dataclass(frozen=True)
class TrainState:
    """The state of one worker's training. progress: gives and takes the loop's own counters, as JSON."""

    setup: Setup
    place: Place
    workload: Any
    seed: int
    get_progress: Callable[[], Values]
    set_progress: Callable[[Values], None]

    def capture(self, *, is_saved: bool = False) -> tuple[Tensors, set[str], dict[str, Values]]:
        """(references to tensors, names of those that a forward pass may change, values by item as JSON). Collective.

        is_saved: for a checkpoint, which holds the replicas' mean beside what differs between them.
        """
        module, parallel = self.setup.parallel.module, self.setup.parallel
        tensors, extra = model_state(module)
        optimizer_tensors, optimizer_values = optimizer_state(self.setup.optimizer, module)
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        volatile = {name for name in tensors if name.removeprefix(f"{MODEL}.") not in parameters}
        volatile |= {f"{MODEL}.{name}" for name in renormalised(module)}
        if parallel.is_partitioned:
            optimizer_values = self._merged(optimizer_values)
        tensors.update(optimizer_tensors)
        if parallel.replicas_differ:
            own = f"{REPLICA}.{self.place.rank}."
            volatile |= {own + name for name in volatile}
            replica = {own + name: value for name, value in tensors.items()}
            # values of now, as the mean is gone when this context ends; without it they are those of this replica
            with parallel.averaged(True) if is_saved else contextlib.nullcontext():
                tensors = {name: value.detach().clone() for name, value in tensors.items()}
            tensors.update(replica)
        own_state = {f"{STRATEGY}.{self.place.rank}.{k}": v for k, v in parallel.state().items()}
        tensors.update(own_state)
        volatile |= own_state.keys()  # what a backward pass leaves over changes before the optimizer's step
        tensors.update(self._masks())
        tensors.update({f"{RANDOM}.{self.place.rank}.{k}": v for k, v in random_state(self.place.device).items()})
        own_tensors, own_values = self._workload_state()
        tensors.update(own_tensors)
        volatile |= own_tensors.keys()
        values = {
            MODEL: extra,
            OPTIMIZER: optimizer_values,
            SCHEDULE: {key: _plain(value) for key, value in self.setup.schedule.state_dict().items()},
            SCALER: self.setup.precision.scaler.state_dict(),
            PROGRESS: self.get_progress(),
            WORKLOAD: own_values,
        }
        return tensors, volatile, {item: as_json(item, value) for item, value in values.items()}

    def restore(self, manifest: Manifest, stores: list[Store], group: dist.ProcessGroup | None) -> None:
        """Take over a checkpoint in place. Collective over `group`. Raises CheckpointError for another model, and
        Incomplete for bytes that are missing or changed."""
        module, optimizer, parallel = self.setup.parallel.module, self.setup.optimizer, self.setup.parallel
        model, _ = model_state(module)
        check_same_tensors(manifest, model, is_part=parallel.is_partitioned and parallel.run_micro_batches is not None)
        templates, build = optimizer_templates(manifest, optimizer, module, is_part=parallel.is_partitioned)
        own = {name: torch.empty(t.shape, dtype=_dtype(t)) for name, t in _of(manifest, WORKLOAD).items()}
        same_size = manifest.world_size == self.place.world_size
        prefix = f"{RANDOM}.{self.place.rank}."
        drawn = {
            name: torch.empty(t.shape, dtype=_dtype(t))
            for name, t in _of(manifest, RANDOM).items()
            if name.startswith(prefix)
        }
        mine = f"{STRATEGY}.{self.place.rank}."
        strategy = {
            name: torch.empty(t.shape, dtype=_dtype(t))
            for name, t in _of(manifest, STRATEGY).items()
            if name.startswith(mine)
        }
        strategy = strategy if same_size else {}
        masks = {name: mask for name, mask in self._masks().items() if name in manifest.tensors}
        sharded.load({**model, **templates, **own, **drawn, **strategy, **masks}, stores, manifest, group)
        if self.setup.pruning is not None:
            self.setup.pruning.count()
        mine_too = f"{REPLICA}.{self.place.rank}."
        if parallel.replicas_differ and same_size and any(name.startswith(mine_too) for name in manifest.tensors):
            # over the mean that was just loaded, into the same memory
            replica = {f"{mine_too}{name}": tensor for name, tensor in {**model, **templates}.items()}
            sharded.load({k: v for k, v in replica.items() if k in manifest.tensors}, stores, manifest, group)
        if manifest.values.get(MODEL):
            module.load_state_dict(manifest.values[MODEL], strict=False)
        optimizer.load_state_dict(build(templates))
        schedule = {key: _unplain(value) for key, value in manifest.values[SCHEDULE].items()}
        self.setup.schedule.load_state_dict(schedule)
        if self.setup.precision.scaler.is_enabled() and manifest.values[SCALER]:
            self.setup.precision.scaler.load_state_dict(manifest.values[SCALER])
        parallel.load_state({name.removeprefix(mine): value for name, value in strategy.items()})
        self.set_progress(manifest.values[PROGRESS])
        if callable(getattr(self.workload, "load_state_dict", None)):
            restored = {name.removeprefix(f"{WORKLOAD}."): value for name, value in own.items()}
            self.workload.load_state_dict(_nested({**manifest.values[WORKLOAD], **restored}))
        if same_size and drawn:
            set_random_state({name.removeprefix(prefix): value for name, value in drawn.items()}, self.place.device)
        else:  # other workers, other streams: new ones, which depend on the step so that no mask is drawn twice
            seed_everything(stream_seed(self.seed, "dropout", self.place.data_rank, manifest.step))

    def _merged(self, values: Values) -> Values:
        """Rank 0's optimizer values with the parameters of all ranks, in rank order. Collective."""
        everyone: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(everyone, values)
        groups = [dict(group) for group in everyone[0]["groups"]]
        for number, group in enumerate(groups):
            names = (name for theirs in everyone for name in theirs["groups"][number]["params"])
            group["params"] = list(dict.fromkeys(names))
        return {"groups": groups, "others": {k: v for theirs in everyone for k, v in theirs["others"].items()}}

    def digests(self) -> dict[str, str]:
        """A hash of each item on this rank, to find the one that differs between two runs."""
        tensors, _, values = self.capture()
        measured = {"training_time_s"}  # not computed
        noise = values[PROGRESS].get("noise_scale")
        if noise and noise["averages"]["is_biased"]:
            measured.add("noise_scale")  # from pairs of steps, of which an interruption may lose one
        values[PROGRESS] = {k: v for k, v in values[PROGRESS].items() if k not in measured}
        hashes = {item: hashlib.sha256(json.dumps(values.get(item), sort_keys=True).encode()) for item in ITEMS}
        for name in sorted(tensors):
            item, _, rest = name.partition(".")
            hashes[item].update(rest.encode())
            hashes[item].update(_bytes(tensors[name]))
        return {item: digest.hexdigest()[:16] for item, digest in hashes.items()}

    def _masks(self) -> Tensors:
        """The masks of pruning by name, by reference."""
        return {f"{PRUNING}.{k}": v for k, v in self.setup.pruning.masks.items()} if self.setup.pruning else {}

    def _workload_state(self) -> tuple[Tensors, Values]:
        if not callable(getattr(self.workload, "state_dict", None)):
            return {}, {}
        state = _flat(self.workload.state_dict())
        tensors = {f"{WORKLOAD}.{k}": v for k, v in state.items() if isinstance(v, torch.Tensor)}
        return tensors, {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}


@dataclass(frozen=True)
class Rates:
    """The hyperparameters of an optimizer and its schedule, which a checkpoint would replace by its own."""

    groups: list[dict[str, Any]]
    base_lrs: list[Any]

    @classmethod
    def of(cls, setup: Setup) -> Rates:
        """The hyperparameters that a set-up has now."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in setup.optimizer.param_groups]
        return cls(groups, list(setup.schedule.base_lrs))

    def put_back(self, setup: Setup, *, position: int) -> None:
        """Use these hyperparameters again, with the schedule `position` steps after its start."""
        for group, own in zip(setup.optimizer.param_groups, self.groups, strict=True):
            group.update(own)
        schedule = setup.schedule
        schedule.base_lrs, schedule.last_epoch, schedule._step_count = list(self.base_lrs), position, position + 1
        rates: list[Any] = [
            base * factor(position) for base, factor in zip(self.base_lrs, schedule.lr_lambdas, strict=True)
        ]
        for group, rate in zip(setup.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        schedule._last_lr = rates


def renormalised(module: nn.Module) -> set[str]:
    """Parameters that a forward pass changes: embeddings with max_norm."""
    return {
        f"{name}.weight" if name else "weight"
        for name, part in module.named_modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None
    }


def model_state(module: nn.Module) -> tuple[Tensors, Values]:
    """A model's tensors by name, buffers that its state dict leaves out included, and its state that is no tensor."""
    state = module.state_dict()
    tensors: Tensors = {f"{MODEL}.{name}": value for name, value in state.items() if isinstance(value, torch.Tensor)}
    tensors.update({f"{BUFFERS}.{name}": value for name, value in module.named_buffers() if name not in state})
    return tensors, {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}


def optimizer_state(optimizer: torch.optim.Optimizer, module: nn.Module) -> tuple[Tensors, Values]:
    """An optimizer's state by parameter name: tensors, and everything else as values."""
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
            **{k: _plain(v) for k, v in group.items() if k != "params"},
            "params": [names[number] for number in group["params"]],
        }
        for group in state["param_groups"]
    ]
    return tensors, {"groups": groups, "others": others}


def optimizer_templates(
    manifest: Manifest, optimizer: torch.optim.Optimizer, module: nn.Module, *, is_part: bool = False
) -> tuple[Tensors, Callable[[Tensors], dict[str, Any]]]:
    """Empty tensors for the saved state of an optimizer, and a function that makes torch's own state dict of them.

    is_part: this optimizer has only some of the saved parameters. Raises CheckpointError where the optimizer holds
    other parameters or groups.
    """
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
        raise CheckpointError(
            "the optimizer's parameters",
            f"{sum(map(len, own_groups))} in {len(own_groups)} groups",
            f"the checkpoint has {sum(map(len, saved_groups))} in {len(saved_groups)}, or in another order",
            "resume with the same model and the same frozen parameters",
        )
    parameters = dict(zip(names, (p for group in optimizer.param_groups for p in group["params"]), strict=True))
    by_length = sorted((name for group in saved_groups for name in group), key=len, reverse=True)
    templates: Tensors = {}
    place: dict[str, tuple[str, str]] = {}
    for full, tensor in _of(manifest, OPTIMIZER).items():
        rest = full.removeprefix(f"{OPTIMIZER}.")
        name = next(n for n in by_length if rest.startswith(n + "."))
        if name not in parameters:
            continue  # another rank's
        parameter = parameters[name]
        place[full] = name, rest[len(name) + 1 :]
        if place[full][1] == VALUE:  # a parameter that no module holds is filled in place
            templates[full] = parameter.detach()
        elif tuple(parameter.shape) == tensor.shape and tensor.shape:
            templates[full] = torch.empty_like(parameter, dtype=_dtype(tensor), requires_grad=False)  # sharded alike
        else:
            templates[full] = torch.empty(tensor.shape, dtype=_dtype(tensor))

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
            {**{k: _unplain(v) for k, v in group.items()}, "params": [numbers[n] for n in own]}
            for group, own in zip(values["groups"], own_groups, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    return templates, build


def check_same_tensors(manifest: Manifest, model: Mapping[str, torch.Tensor], *, is_part: bool = False) -> None:
    """Check that the checkpoint holds the tensors of this model, or of the whole of which it is a part.

    Raises CheckpointError with the first that differs.
    """
    saved = {name: f"{list(t.shape)} {t.dtype}" for item in (MODEL, BUFFERS) for name, t in _of(manifest, item).items()}
    own = {name: f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in model.items()}
    if is_part:
        saved = {name: text for name, text in saved.items() if name in own}
    if saved == own:
        return
    different = [name for name in sorted(saved.keys() | own.keys()) if saved.get(name) != own.get(name)]
    first = different[0].partition(".")[2]
    saved, own = ({k.partition(".")[2]: v for k, v in names.items()} for names in (saved, own))
    raise CheckpointError(
        f"the model's {first}",
        own.get(first) or "not there",
        f"the checkpoint has {saved.get(first) or 'no such tensor'} ({len(different)} of {len(saved)} tensors differ)",
        "it belongs to another model: resume with the config that wrote it",
    )


def _names(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[str]:
    by_id = {id(parameter): name for name, parameter in module.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # an optimizer of the user's may hold parameters that the model does not register
    return [by_id.get(id(p), f"{UNNAMED}{number}") for number, p in enumerate(parameters)]


def _unnamed(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, torch.Tensor]:
    """The optimizer's parameters that the model does not register, by the name they have here."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return {name: p for name, p in zip(names, parameters, strict=True) if name.startswith(UNNAMED)}


def _of(manifest: Manifest, item: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in manifest.tensors.items() if name.startswith(item + ".")}


def _dtype(tensor: Tensor) -> torch.dtype:
    found: torch.dtype = getattr(torch, tensor.dtype)
    return found


def as_json(item: str, value: Any) -> Any:
    """A copy of small values. Raises WorkloadError for what a checkpoint cannot hold."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as exc:
        raise WorkloadError(
            f"the state of the {item}",
            str(exc),
            "a checkpoint holds tensors, numbers, text, true/false, none, lists and mappings of them",
            "keep it in such values, or switch checkpoints off: --checkpoint.every-minutes null",
        ) from exc


def _flat(state: Mapping[str, Any], prefix: str = "") -> Values:
    """A state dict of any depth by path; each part of a path is quoted, so that it can hold anything."""
    flat: Values = {}
    for key, value in state.items():
        path = f"{prefix}{quote(str(key), safe='')}"
        if isinstance(value, Mapping) and value:
            flat.update(_flat(value, f"{path}/"))
        else:
            flat[path] = value
    return flat


def _nested(flat: Values) -> Values:
    """Nest again what `_flat` made flat."""
    nested: Values = {}
    for path, value in flat.items():
        *parents, last = (unquote(part) for part in path.split("/"))
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return nested


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {"tuple": list(value)} if isinstance(value, tuple) else value


def _unplain(value: Any) -> Any:
    return tuple(value["tuple"]) if isinstance(value, dict) and value.keys() == {"tuple"} else value


def _bytes(tensor: torch.Tensor) -> bytes:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
