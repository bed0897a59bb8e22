"""Complete state of a training between two steps, which a checkpoint stores and a resumed run starts from.

An item consists of tensors or small values under a name that a user understands, so that a difference after a resume
can be traced to one item."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from scaleray.checkpoints.consolidated import reshape_buffers
from scaleray.checkpoints.manifest import Manifest
from scaleray.common.equal_models import dense_parts
from scaleray.common.seeding import random_state, seed_everything, set_random_state, stream_seed
from scaleray.config.parallel import Degrees
from scaleray.errors import CheckpointError
from scaleray.training.callbacks import Callbacks
from scaleray.training.health.attributes import (
    changed_attributes,
    common_attributes,
    plain_attributes,
    set_plain_attributes,
)
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.state.items import (
    ATTRIBUTES,
    AVERAGING,
    BUFFERS,
    CALLBACKS,
    ITEMS,
    MODEL,
    OPTIMIZER,
    PROGRESS,
    PRUNING,
    RANDOM,
    RATE_SCALE,
    REPLICA,
    SCALER,
    SCHEDULE,
    STRATEGY,
    WORKLOAD,
    Tensors,
    Values,
    as_json,
    dtype_of,
    flattened,
    nested,
    plain,
    tensors_of,
    unplain,
)
from scaleray.training.state.optimizer_state import optimizer_state, optimizer_templates

DEGREES = "degrees"


@dataclass(frozen=True)
class TrainState:
    """State of one worker's training. get_progress, set_progress: read and restore the loop's own counters, as JSON.
    callbacks: those of the workload, with their own state."""

    setup: Setup
    place: RankContext
    workload: Any
    seed: int
    get_progress: Callable[[], Values]
    set_progress: Callable[[Values], None]
    callbacks: Callbacks | None = None
    unsaved: Callable[[], str] = str
    """Warning, returned once, about a part of the state that checkpoints do not contain; empty if there is none."""
    attributes: Mapping[str, Any] = field(init=False)
    """Plain attributes of the model's modules before the first step. Those that differ later are part of the state."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "attributes", plain_attributes(self.setup.parallel.module))

    def capture(self, *, is_saved: bool = False) -> tuple[Tensors, set[str], dict[str, Values]]:
        """(references to tensors, names of those that a forward pass may change, this rank's values by item as JSON).
        is_saved: for a checkpoint, which holds the replicas' mean in addition to their differences; collective then if
        replicas differ."""
        module, parallel = self.setup.parallel.module, self.setup.parallel
        tensors, extra = model_state(module)
        optimizer_tensors, optimizer_values = optimizer_state(self.setup.optimizer, module)
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        volatile = {name for name in tensors if name.removeprefix(f"{MODEL}.") not in parameters}
        volatile |= {f"{MODEL}.{name}" for name in renormalised(module)}
        tensors.update(optimizer_tensors)
        if parallel.replicas_differ:
            own = f"{REPLICA}.{parallel.replica}."
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
        tensors.update(self._averages())
        tensors.update({f"{RANDOM}.{self.place.rank}.{k}": v for k, v in random_state(self.place.device).items()})
        workload_tensors, workload_values = _state_of(self.workload, WORKLOAD)
        # every rank has callbacks, with a state of their own
        callback_tensors, callback_values = _state_of(self.callbacks, f"{CALLBACKS}.{self.place.rank}")
        tensors.update(workload_tensors | callback_tensors)
        volatile |= workload_tensors.keys() | callback_tensors.keys()
        values = {
            MODEL: extra,
            OPTIMIZER: optimizer_values,
            SCHEDULE: {key: plain(value) for key, value in self.setup.schedule.state_dict().items()},
            RATE_SCALE: self.setup.rate_scale.state_dict(),
            SCALER: self.setup.precision.scaler.state_dict(),
            PROGRESS: self.get_progress(),
            AVERAGING: {"num_updates": self.setup.averaging.num_updates},
            WORKLOAD: workload_values,
            CALLBACKS: callback_values,
            ATTRIBUTES: changed_attributes(module, self.attributes),
            **({STRATEGY: {DEGREES: self.place.mesh.text()}} if parallel.replicas_differ else {}),
        }
        return tensors, volatile, {item: as_json(item, value) for item, value in values.items()}

    def combined(self, values: Mapping[str, Values], gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """Values of the whole state on rank 0, from those that `capture` returns on each rank. gather: the values of
        all ranks for this rank's value. Collective if `gather` is."""
        items = [ATTRIBUTES, *([OPTIMIZER] if self.setup.parallel.is_partitioned else [])]
        if self.callbacks is not None and self.callbacks.have_state:
            items.append(CALLBACKS)
        everyone = gather({item: values[item] for item in items})
        combined = {item: [theirs[item] for theirs in everyone] for item in items}
        callbacks = combined.get(CALLBACKS, [values[CALLBACKS]])
        found: dict[str, Any] = dict(values)
        found[ATTRIBUTES] = combined[ATTRIBUTES]
        found[CALLBACKS] = {f"{rank}": theirs for rank, theirs in enumerate(callbacks)}
        if OPTIMIZER in combined:
            found[OPTIMIZER] = _merged(combined[OPTIMIZER])
        return found

    def restore(self, manifest: Manifest, load: Callable[[Tensors], None]) -> None:
        """Restore a checkpoint in place. load: fills tensors by name, see `sharded.load`. Collective if `load` is.
        Raises CheckpointError for another model, and the errors of `load`."""
        module, optimizer, parallel = self.setup.parallel.module, self.setup.optimizer, self.setup.parallel
        for item in (MODEL, BUFFERS):
            saved = {name.partition(".")[2]: tensor for name, tensor in tensors_of(manifest, item).items()}
            reshape_buffers(module, saved, may_register=item == BUFFERS)
        model, _ = model_state(module)
        check_same_tensors(manifest, model, is_part=parallel.is_partitioned and parallel.run_micro_batches is not None)
        templates, build = optimizer_templates(manifest, optimizer, module, is_part=parallel.is_partitioned)
        own = {
            name: torch.empty(t.shape, dtype=dtype_of(t))
            for item in (WORKLOAD, CALLBACKS)
            for name, t in tensors_of(manifest, item).items()
        }
        same_size = same_replicas = manifest.world_size == self.place.world_size
        prefix = f"{RANDOM}.{self.place.rank}."
        drawn = {
            name: torch.empty(t.shape, dtype=dtype_of(t))
            for name, t in tensors_of(manifest, RANDOM).items()
            if name.startswith(prefix)
        }
        mine = f"{STRATEGY}.{self.place.rank}."
        strategy = {
            name: torch.empty(t.shape, dtype=dtype_of(t))
            for name, t in tensors_of(manifest, STRATEGY).items()
            if name.startswith(mine)
        }
        if parallel.replicas_differ:  # another division of as many workers makes other replicas
            before = manifest.values.get(STRATEGY, {}).get(DEGREES, Degrees(replicate=manifest.world_size).text())
            same_replicas = before == self.place.mesh.text()
        strategy = strategy if same_replicas else {}
        kept = {**self._masks(), **self._averages()}
        masks = {name: value for name, value in kept.items() if name in manifest.tensors}
        load({**model, **templates, **own, **drawn, **strategy, **masks})
        if self._averages().keys() <= manifest.tensors.keys():
            self.setup.averaging.num_updates = manifest.values.get(AVERAGING, {}).get("num_updates", 0)
        else:
            self.setup.averaging.reinitialise()
        if self.setup.pruning is not None:
            self.setup.pruning.count()
        mine_too = f"{REPLICA}.{parallel.replica}."
        if parallel.replicas_differ and same_replicas and any(name.startswith(mine_too) for name in manifest.tensors):
            # over the mean that was just loaded, into the same memory
            replica = {f"{mine_too}{name}": tensor for name, tensor in {**model, **templates}.items()}
            load({k: v for k, v in replica.items() if k in manifest.tensors})
        if manifest.values.get(MODEL):
            module.load_state_dict(manifest.values[MODEL], strict=False)
        set_plain_attributes(module, self._own_attributes(manifest.values.get(ATTRIBUTES, [])))
        optimizer.load_state_dict(build(templates))
        schedule = {key: unplain(value) for key, value in manifest.values[SCHEDULE].items()}
        self.setup.schedule.load_state_dict(schedule)
        if RATE_SCALE in manifest.values:
            self.setup.rate_scale.load_state_dict(manifest.values[RATE_SCALE])
        if self.setup.precision.scaler.is_enabled() and manifest.values[SCALER]:
            self.setup.precision.scaler.load_state_dict(manifest.values[SCALER])
        parallel.load_state({name.removeprefix(mine): value for name, value in strategy.items()})
        self.set_progress(manifest.values[PROGRESS])
        if WORKLOAD in manifest.values and callable(getattr(self.workload, "load_state_dict", None)):
            self.workload.load_state_dict(_restored(own, WORKLOAD, manifest.values[WORKLOAD]))
        if self.callbacks is not None:
            by_rank = manifest.values.get(CALLBACKS, {})
            ranks = sorted(filter(str.isdigit, by_rank), key=int)
            states = [_restored(own, f"{CALLBACKS}.{rank}", by_rank[rank]) for rank in ranks]
            self.callbacks.load_states(states)
        if same_size and drawn:
            set_random_state({name.removeprefix(prefix): value for name, value in drawn.items()}, self.place.device)
        else:  # other workers, other streams: new ones, which depend on the step so that no mask is drawn twice
            seed_everything(stream_seed(self.seed, "dropout", self.place.data_rank, manifest.step))

    def digests(self) -> dict[str, str]:
        """Hash of each item on this rank, for finding the one that differs between two runs."""
        tensors, _, own_values = self.capture()
        values = self.combined(own_values, self.place.gathered)
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

    def _averages(self) -> Tensors:
        """The averages of the weights by name, by reference."""
        return {f"{AVERAGING}.{k}": v for k, v in self.setup.averaging.values.items()}

    def _own_attributes(self, by_rank: list[Values]) -> Values:
        """This rank's attributes in a checkpoint. On another number of workers, those that were equal on all ranks."""
        if len(by_rank) == self.place.world_size:
            return by_rank[self.place.rank]
        return common_attributes(by_rank)


def _merged(everyone: list[Values]) -> Values:
    """Rank 0's optimizer values, with the parameters of all ranks in rank order."""
    groups = [dict(group) for group in everyone[0]["groups"]]
    for number, group in enumerate(groups):
        names = (name for theirs in everyone for name in theirs["groups"][number]["params"])
        group["params"] = list(dict.fromkeys(names))
    return {"groups": groups, "others": {k: v for theirs in everyone for k, v in theirs["others"].items()}}


def _state_of(owner: Any, item: str) -> tuple[Tensors, Values]:
    if not callable(getattr(owner, "state_dict", None)):
        return {}, {}
    state = flattened(owner.state_dict())
    tensors = {f"{item}.{k}": v for k, v in state.items() if isinstance(v, torch.Tensor)}
    return tensors, {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}


def _restored(tensors: Tensors, prefix: str, values: Values) -> Values:
    """Rebuild the state dict from the parts made by `_state_of`."""
    own = {k.removeprefix(f"{prefix}."): v for k, v in tensors.items() if k.startswith(f"{prefix}.")}
    return nested({**values, **own})


def renormalised(module: nn.Module) -> set[str]:
    """Parameters that a forward pass changes, namely those of embeddings with max_norm."""
    return {
        f"{name}.weight" if name else "weight"
        for name, part in module.named_modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None
    }


def model_state(module: nn.Module) -> tuple[Tensors, Values]:
    """A model's tensors by name, including buffers that its state dict leaves out, and the rest of its state.

    A sparse buffer is stored as its parts, and not among the model's weights, which are dense."""
    state = module.state_dict()
    sparse = {n: b for n, b in module.named_buffers() if b.layout != torch.strided}
    tensors: Tensors = {
        f"{MODEL}.{name}": value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name not in sparse
    }
    for name, value in module.named_buffers():
        if name in sparse:
            tensors.update({f"{BUFFERS}.{name}.{part}": t for part, t in dense_parts(value.detach()).items()})
        elif name not in state:
            tensors[f"{BUFFERS}.{name}"] = value
    return tensors, {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}


def check_same_tensors(manifest: Manifest, model: Mapping[str, torch.Tensor], *, is_part: bool = False) -> None:
    """Check that the checkpoint has the tensors of this model, or of the whole model of which it is a part.

    Raises CheckpointError naming the first tensor that differs."""
    saved = {
        name: f"{list(t.shape)} {t.dtype}"
        for item in (MODEL, BUFFERS)
        for name, t in tensors_of(manifest, item).items()
    }
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
        own.get(first) or "missing",
        f"the checkpoint has {saved.get(first) or 'no such tensor'} ({len(different)} of {len(saved)} tensors differ)",
        "it belongs to another model: resume with the config that wrote it",
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
