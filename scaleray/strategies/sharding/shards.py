"""Arithmetic on whole tensors of which each rank has a part: sums over ranks, and offsets of parts.

A parameter is a plain tensor that is whole on every rank, or a DTensor split along some axes of a device mesh. Used by
large_batch_optimizers and pruning."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Axes = tuple[tuple[DeviceMesh, int], ...]
"""Axes of device meshes, each as (mesh, number of the axis)."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, sharing its memory. Must be called without gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut_along(tensor: torch.Tensor) -> Axes:
    """Axes along which a tensor is split; the same on all ranks of these axes."""
    return _axes(tensor, is_replicated=False)


def copied_along(tensor: torch.Tensor) -> Axes:
    """The axes of its mesh along which a DTensor's parts are copies; none for a plain tensor, which has no mesh."""
    return _axes(tensor, is_replicated=True)


def _axes(tensor: torch.Tensor, *, is_replicated: bool) -> Axes:
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    placements = enumerate(tensor.placements)
    return tuple((mesh, a) for a, where in placements if where.is_replicate() == is_replicated and mesh.size(a) > 1)


def by_layout(tensors: Sequence[torch.Tensor]) -> dict[Axes, list[int]]:
    """Positions of the tensors by the axes along which they are split, in an order that all ranks share."""
    members: dict[Axes, list[int]] = {}
    for position, tensor in enumerate(tensors):
        members.setdefault(cut_along(tensor), []).append(position)
    return members


def sum_over(axes: Axes, values: torch.Tensor) -> torch.Tensor:
    """Sum of `values` over the ranks of these axes. Collective; one all-reduce per axis."""
    if not axes:
        return values
    # a mesh of GPUs may hold its shards on the CPU (offload), where NCCL cannot sum
    own = values.to(axes[0][0].device_type, copy=True)
    for mesh, axis in axes:
        dist.all_reduce(own, group=mesh.get_group(axis))
    return own.to(values.device)


def offset(tensor: torch.Tensor) -> tuple[int, ...]:
    """Index in the whole tensor at which this rank's part begins, along each dim."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    # also what torch's own checkpoints rely on
    _, begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(begin)
