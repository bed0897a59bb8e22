"""Check that all ranks have built the same model before training, and compare states."""

import hashlib
import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from scaleray.common.seeding import stream_seed
from scaleray.errors import InitialisationError

Digests = dict[str, int]
"""Digest of each parameter and buffer by name: xxh3 with 64 bits, signed, which detects accidents at a tenth of the
cost of SHA-256."""


def check_equal_structure(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Check that every rank built tensors with the same names, shapes and dtypes. Collective over `group`.

    It must run before the strategy's collectives, which would hang on a difference. Raises InitialisationError on all
    ranks.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    tensors = [*module.named_parameters(), *module.named_buffers()]
    mine = [f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for name, tensor in tensors]
    digests = _gather([stream_seed(0, *mine)], module, group)
    if all(digest == digests[0] for digest in digests):
        return
    everyone: list[Any] = [None] * len(digests)
    dist.all_gather_object(everyone, mine, group=group)
    rank = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
    pairs = itertools.zip_longest(everyone[0], everyone[rank], fillvalue="nothing more")
    ours, theirs = next(pair for pair in pairs if pair[0] != pair[1])
    raise InitialisationError(
        f"before the first step, rank 0 built {ours} and rank {rank} {theirs}: "
        "build_model() must give the same model on every worker"
    )


def check_equal_parameters(
    module: nn.Module, group: dist.ProcessGroup | None, *, is_partitioned: bool = False
) -> Digests:
    """Check that all parameters and buffers are equal on every rank, and return their digests. Collective over `group`.

    Sharded tensors are gathered one by one. is_partitioned: ranks have different tensors, each counted once, by name.
    Raises InitialisationError on all ranks, with the first tensor that differs and the ranks that differ.
    """
    digests = {name: _digest(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    if is_partitioned:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, digests, group=group)
        return {name: digest for part in parts for name, digest in part.items()}
    if group is not None and dist.get_world_size(group) > 1:
        check_equal_digests(digests, module, group)
    return digests


def fingerprint_of(digests: Digests) -> str:
    """16 hex digits that identify a model's initial values, regardless of its distribution over workers."""
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]


def check_equal_digests(digests: Digests, module: nn.Module, group: dist.ProcessGroup) -> None:
    """Check that the digests are equal on every rank. Collective over `group`. Raises InitialisationError on all ranks,
    with the first tensor that differs and the ranks that have another value."""
    everyone = _gather(list(digests.values()), module, group)
    for number, name in enumerate(digests):
        others = [rank for rank, values in enumerate(everyone) if values[number] != everyone[0][number]]
        if others:
            raise InitialisationError(
                f"before the first step, {name} differs between rank 0 and rank{'s' if len(others) > 1 else ''} "
                f"{', '.join(map(str, others))}: build_model() must give the same parameters on every worker. "
                "Draw them from torch's generator, which scaleray seeds, and only from it."
            )


def _gather(values: list[int], module: nn.Module, group: dist.ProcessGroup) -> list[list[int]]:
    """Gather the values of every rank; all must have the same number. Collective over `group`."""
    device = next(module.parameters()).device if dist.get_backend(group) == "nccl" else torch.device("cpu")
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [theirs.tolist() for theirs in everyone]


def _digest(tensor: torch.Tensor) -> int:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    digest = xxhash.xxh3_64()
    for part in dense_parts(whole.detach()).values():
        digest.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.intdigest() - 2**63


def dense_parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Dense tensors by name that share a tensor's memory: itself under "", or the parts of a sparse one."""
    if tensor.layout == torch.strided:
        return {"": tensor}
    if tensor.layout == torch.sparse_coo:
        return {"indices": tensor._indices(), "values": tensor._values()}
    rows = "row" if tensor.layout in (torch.sparse_csc, torch.sparse_bsc) else "col"
    names = (f"c{'col' if rows == 'row' else 'row'}_indices", f"{rows}_indices", "values")
    return {name: getattr(tensor, name)() for name in names}


def dense_buffers(module: nn.Module) -> list[torch.Tensor]:
    """Buffers of a model as tensors that can be sent and copied; a sparse one gives parts that share its memory."""
    return [part for buffer in module.buffers() for part in dense_parts(buffer.detach()).values()]


def equal_states(one: Any, other: Any) -> bool:
    """Whether two states, made of numbers, tensors and mappings of them, are equal."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal_states(value, other[key]) for key, value in one.items())
    return bool(one == other)
