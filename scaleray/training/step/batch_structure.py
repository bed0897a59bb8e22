"""Structure of the batches that a workload's `collate` makes. It must be the same on every worker; otherwise a
collective fails without naming the cause."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from scaleray.data.collate_ahead import place_of_collate
from scaleray.errors import WorkloadError
from scaleray.training.setup.rank_context import RankContext


def structure(batch: Any, path: str = "", *, with_sizes: bool = False) -> list[str]:
    """Name, type and number of dimensions of every tensor in a batch, and the type of everything else. with_sizes:
    include the sizes of dimensions instead of only their number."""
    if isinstance(batch, torch.Tensor):
        size = " x ".join(map(str, batch.shape)) if with_sizes else f"{batch.ndim} dimensions"
        return [f"{path or 'a tensor'}: {str(batch.dtype).removeprefix('torch.')}, {size}"]
    inner: list[tuple[str, Any]] | None = None
    if isinstance(batch, Mapping):
        inner = [(f"{path}[{name!r}]", batch[name]) for name in sorted(batch, key=str)]
    elif isinstance(batch, tuple | list):
        inner = [(f"{path}[{number}]", value) for number, value in enumerate(batch)]
    if inner is None:
        return [f"{path}: {type(batch).__name__}"]
    return [line for below, value in inner for line in structure(value, below, with_sizes=with_sizes)]


def check_same_structure(batch: Any, place: RankContext, collate: Any) -> None:
    """Raise WorkloadError on every rank if batches from `collate` differ in structure between ranks. Workers of one
    replica have the same rows, so sizes must agree between them as well. Collective."""
    if place.world_size == 1:
        return
    lines = structure(batch)
    # four bytes: exact in whatever the numbers travel as
    digest = float(int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:4], "little"))
    largest, smallest = place.all_reduce_max([digest, -digest])
    if largest != -smallest:
        everyone = place.gathered(lines)
        other = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
        raise _different(
            collate,
            (0, everyone[0]),
            (other, everyone[other]),
            "its batches must have the same names, types and numbers of dimensions for all rows",
            "return every column for every micro-batch, whatever its rows contain; lengths may differ",
        )
    if place.mesh.model == 1:
        return
    everyone = place.gathered(structure(batch, with_sizes=True))
    for rank, theirs in enumerate(everyone):
        first = place.mesh.replica(place.mesh.data_rank(rank))[0]
        if theirs != everyone[first]:
            raise _different(
                collate,
                (first, everyone[first]),
                (rank, theirs),
                f"the {place.mesh.model} workers of a replica have the same rows, and need the same batch",
                "make it depend on the rows, not on the rank",
            )


def _different(
    collate: Any, one: tuple[int, list[str]], other: tuple[int, list[str]], allowed: str, hint: str
) -> WorkloadError:
    (rank, lines), (other_rank, theirs) = one, other
    return WorkloadError(
        f"collate() at {place_of_collate(collate)}",
        f"different on different workers: {'; '.join(sorted(set(lines) - set(theirs))) or 'nothing more'} on rank "
        f"{rank}, {'; '.join(sorted(set(theirs) - set(lines))) or 'nothing more'} on rank {other_rank}",
        allowed,
        hint,
    )
