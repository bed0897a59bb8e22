"""Structure of the batches that a workload's `collate` makes: the same on every worker, or training would go wrong in a
collective, where nobody could say why."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from scaleray.errors import WorkloadError
from scaleray.training.setup.place import Place


def structure(batch: Any, path: str = "") -> list[str]:
    """Name, type and number of dimensions of every tensor of a batch, and the type of everything else."""
    if isinstance(batch, torch.Tensor):
        return [f"{path or 'a tensor'}: {str(batch.dtype).removeprefix('torch.')}, {batch.ndim} dimensions"]
    if isinstance(batch, Mapping):
        return [line for name in sorted(batch, key=str) for line in structure(batch[name], f"{path}[{name!r}]")]
    if isinstance(batch, tuple | list):
        return [line for place, value in enumerate(batch) for line in structure(value, f"{path}[{place}]")]
    return [f"{path}: {type(batch).__name__}"]


def check_same_structure(batch: Any, place: Place) -> None:
    """Raise WorkloadError, on every rank, where the batches of ranks differ in structure. Collective."""
    if place.world_size == 1:
        return
    lines = structure(batch)
    # four bytes: exact in whatever the numbers travel as
    digest = float(int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:4], "little"))
    largest, smallest = place.all_reduce_max([digest, -digest])
    if largest == -smallest:
        return
    everyone: list[Any] = [None] * place.world_size
    dist.all_gather_object(everyone, lines)
    other = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
    first, theirs = set(everyone[0]), set(everyone[other])
    raise WorkloadError(
        "collate()",
        f"different on different workers: {'; '.join(sorted(first - theirs)) or 'nothing more'} on rank 0, "
        f"{'; '.join(sorted(theirs - first)) or 'nothing more'} on rank {other}",
        "its batches must have the same names, types and numbers of dimensions for all rows",
        "make every column for every micro-batch, whatever its rows hold; lengths may differ",
    )
