"""Final weights of a model, divided among the ranks that write them, so that no rank holds more than its share. Each
sharded tensor is gathered separately and stays on the rank that writes it. Writing involves no collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class Placed(NamedTuple):
    """Location of one tensor: the rank that has the whole of it, and its size in bytes."""

    rank: int
    num_bytes: int


@dataclass(frozen=True)
class WeightShare:
    """Weights that one rank is to write. tensors: by name, whole and on the CPU; if unsharded, with extra state.

    layout: every tensor of the model in order, the same on all ranks; empty if rank 0 has them all. left_out: names of
    entries that are not dense tensors, which the files of shares cannot hold."""

    tensors: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Placed] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    adapters: WeightShare | None = None
    """Low-rank adapters that have been merged into the layers in `tensors`."""


def whole(module: nn.Module, *, keeps: bool) -> WeightShare:
    """Weights of a model that is not sharded, copied on a rank that keeps them. Not collective."""
    if not keeps:
        return WeightShare()
    return WeightShare(
        {
            name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            for name, value in module.state_dict().items()
        }
    )


def sizes(module: nn.Module) -> dict[str, int]:
    """Bytes of each tensor in a module's state, counted as a whole tensor."""
    state = module.state_dict()
    return {n: v.numel() * v.element_size() for n, v in state.items() if _is_dense(v)}


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def shared_out(sizes: Mapping[str, int], num: int) -> dict[str, int]:
    """Assign each name to one of `num` parts, which consist of consecutive names with about equal total bytes.

    Tensors of one layer stay together. No part has more than its share of all bytes plus one layer."""
    layers: dict[str, list[str]] = {}
    for name in sizes:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    total, before = max(1, sum(sizes.values())), 0
    found = {}
    for names in layers.values():
        own = sum(sizes[name] for name in names)
        middle = before + own // 2
        found.update(dict.fromkeys(names, min(num - 1, middle * num // total)))
        before += own
    return found


def share_among(module: nn.Module, ranks: Sequence[int], *, rank: int) -> WeightShare:
    """This rank's share of a model whose tensors or shards are on all of `ranks`. Collective, like `share_of`."""
    whole_sizes = sizes(module)
    parts = shared_out(whole_sizes, len(ranks))
    return share_of(module, {n: Placed(ranks[parts[n]], size) for n, size in whole_sizes.items()}, rank=rank)


def share_of(module: nn.Module, layout: Mapping[str, Placed], *, rank: int) -> WeightShare:
    """Tensors that `layout` assigns to `rank`. Collective over the meshes of sharded tensors, one after another, so
    that only one whole tensor is on the device at a time."""
    names: dict[int, list[str]] = {}
    values: dict[int, Any] = {}
    left_out = []
    for name, value in module.state_dict(keep_vars=True).items():
        if _is_dense(value):
            names.setdefault(id(value), []).append(name)  # tied ones are gathered once
            values[id(value)] = value
        else:
            left_out.append(name)
    mine: dict[str, torch.Tensor] = {}
    for key, value in values.items():
        own = [name for name in names[key] if layout[name].rank == rank]
        tensor = _gathered(value.detach())
        if own:
            mine.update(dict.fromkeys(own, tensor.to("cpu", copy=True)))
    in_order = {name: mine[name] for name in layout if name in mine}
    return WeightShare(in_order, dict(layout), tuple(left_out))


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    device = tensor.device_mesh.device_type
    # an offloaded shard is on the CPU, and the mesh's collectives may know no other device than their own
    sharded: DTensor = tensor if tensor.device.type == device else tensor.to(device)  # type: ignore[assignment]
    return sharded.full_tensor()
