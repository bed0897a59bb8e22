"""Bytes sent by DDP's own collectives: it starts them in C++, the same ones in every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from scaleray.profiling.collectives import ALL_REDUCE, BROADCAST
from scaleray.records.profile import CollectiveRow

BROADCAST_BYTES = 250 * 2**20
"""Bytes of buffers that DDP broadcasts at a time; see `broadcast_bucket_size` of DistributedDataParallel."""


def rows(
    wrapped: DistributedDataParallel, num_steps: int, compressed: list[CollectiveRow] | None = None
) -> list[CollectiveRow]:
    """All collectives of so many synchronised steps. compressed: those of a hook that sends gradients instead of
    DDP."""
    gradients = _gradient_rows(wrapped, num_steps) if compressed is None else compressed
    return [*gradients, *_other_rows(wrapped, num_steps)]


def _gradient_rows(wrapped: DistributedDataParallel, num_steps: int) -> list[CollectiveRow]:
    """The all-reduces of gradients in so many synchronised steps: of every bucket. The layout of buckets changes once,
    after the first step; all of them together are as large as the trained parameters."""
    if not num_steps:
        return []
    data = wrapped._get_ddp_logging_data()
    at_first = _count(data, "bucket_sizes")
    later = _count(data, "rebuilt_bucket_sizes") if data.get("has_rebuilt_buckets") else at_first
    trained = [p for p in wrapped._module_parameters if p.requires_grad]
    num_bytes = sum(p.numel() * p.element_size() for p in trained)
    return [_row(wrapped, ALL_REDUCE, at_first + (num_steps - 1) * later, num_steps * num_bytes)]


def _other_rows(wrapped: DistributedDataParallel, num_steps: int) -> list[CollectiveRow]:
    """Bytes that DDP sends in addition to gradients: buffers, at the begin of a step, and which parameters were used,
    if it looks for unused ones.
    """
    found = []
    if wrapped.find_unused_parameters and not wrapped.static_graph:
        num_parameters = sum(p.requires_grad for p in wrapped._module_parameters)
        found.append(_row(wrapped, ALL_REDUCE, num_steps, num_steps * num_parameters * torch.int32.itemsize))
    buffers: Sequence[torch.Tensor] = wrapped.modules_buffers if wrapped.forward_sync_buffers else ()
    if sizes := _in_pieces(buffers):
        found.append(_row(wrapped, BROADCAST, num_steps * len(sizes), num_steps * sum(sizes)))
    return [row for row in found if row.count]


def _count(data: dict[str, object], key: str) -> int:
    return len(str(data[key]).split(","))


def _in_pieces(buffers: Sequence[torch.Tensor]) -> list[int]:
    """Bytes of each broadcast: buffers of a type together, as torch packs them."""
    pieces: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for buffer in buffers:
        own = pieces.setdefault((buffer.dtype, buffer.device), [0])
        own[-1] += buffer.numel() * buffer.element_size()
        if own[-1] >= BROADCAST_BYTES:
            own.append(0)
    return [size for own in pieces.values() for size in own if size]


def _row(wrapped: DistributedDataParallel, operation: str, count: int, num_bytes: float) -> CollectiveRow:
    group = wrapped.process_group
    return CollectiveRow(
        rank=dist.get_rank(),
        group="dp",
        group_size=dist.get_world_size(group),
        operation=operation,
        count=count,
        num_bytes=num_bytes,
    )
