"""Broadcast of many tensors in a few flat buffers of one dtype and limited size."""

from collections.abc import Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from scaleray.strategies.traffic.ledger import Entry

BUCKET_BYTES = 25 * 2**20


@torch.no_grad()
def broadcast(
    tensors: Iterable[torch.Tensor],
    group: dist.ProcessGroup,
    *,
    source: int = 0,
    bucket_bytes: float = BUCKET_BYTES,
    entry: Entry | None = None,
) -> int:
    """Give every rank the values of rank `source` of the group, in place. Returns the number of bytes and counts them
    in `entry`. Collective over `group`, with tensors of the same shapes and dtypes in the same order."""
    is_source, sent = dist.get_rank(group) == source, 0
    for bucket in _buckets(tensors, bucket_bytes):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        start = partial(dist.broadcast, flat, group=group, group_src=source)
        start() if entry is None else entry.run(start, flat)
        sent += flat.numel() * flat.element_size()
        if not is_source:
            for tensor, values in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(values.view_as(tensor))
    return sent


def _buckets(tensors: Iterable[torch.Tensor], bucket_bytes: float) -> Iterator[list[torch.Tensor]]:
    """Group tensors of one dtype and device, in order, into buckets of at most `bucket_bytes`; a larger tensor gets its
    own bucket."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in by_kind.values():
        bucket: list[torch.Tensor] = []
        size = 0
        for tensor in same:
            num_bytes = tensor.numel() * tensor.element_size()
            if bucket and size + num_bytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += num_bytes
        yield bucket
