"""Collectives on flat tensors that count their bytes, and their cost on a link."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from scaleray.profiling.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL
from scaleray.strategies.traffic.ledger import Ledger


@dataclass(frozen=True)
class Message:
    """One collective of a codec. payload_bytes: bytes contributed by one rank."""

    kind: str
    """Kind of collective: all_reduce, all_gather or all_to_all."""
    payload_bytes: int

    def link_bytes(self, world_size: int) -> float:
        """Bytes that each rank sends over its link with bandwidth-optimal algorithms (Thakur et al. 2005, section 4).

        A ring all-reduce sends a rank's payload nearly twice. An all-gather forwards the payloads of all ranks, so it
        grows with their number. An all-to-all sends all but the rank's own part once."""
        others = world_size - 1
        factor = {"all_reduce": 2 * others / world_size, "all_gather": others, "all_to_all": others / world_size}
        return self.payload_bytes * factor[self.kind]


class GroupCollectives:
    """Collectives of one group. Each one blocks, and its payload is counted once in `ledger`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.world_size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.ledger = Ledger(stands_still=False)  # a thread of its own, or a device, waits for them

    @property
    def sent_bytes(self) -> int:
        """Total bytes sent."""
        return int(self.ledger.num_bytes)

    def mean_(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over all ranks, in place. Divides first, like DDP, so that the sum overflows only if the mean does."""
        return self.sum_(values.div_(self.world_size))

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place."""
        self._run(ALL_REDUCE, partial(dist.all_reduce, values, group=self.group), values)
        return values

    def largest_(self, values: torch.Tensor) -> torch.Tensor:
        """Maximum over all ranks, in place."""
        self._run(ALL_REDUCE, partial(dist.all_reduce, values, op=dist.ReduceOp.MAX, group=self.group), values)
        return values

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Gather the values (n,) of each rank as (world_size, n)."""
        gathered = values.new_empty(self.world_size, values.numel())
        self._run(ALL_GATHER, partial(dist.all_gather, list(gathered), values, group=self.group), values)
        return gathered

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Exchange rows (world_size, n): row i goes to rank i, and row i of the result comes from rank i."""
        arrived = torch.empty_like(rows)
        self._run(ALL_TO_ALL, partial(dist.all_to_all_single, arrived, rows, group=self.group), rows)
        return arrived

    def _run(self, operation: str, start: Callable[[], object], payload: torch.Tensor) -> None:
        self.ledger.entry("dp", self.world_size, operation).run(start, payload)


def pack(*parts: torch.Tensor) -> torch.Tensor:
    """Join tensors (rows, n_i) of any dtypes into one tensor of bytes (rows, m), since each message costs a latency."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def unpack(message: torch.Tensor, *parts: tuple[torch.dtype, int]) -> list[torch.Tensor]:
    """Split what `pack` has joined. parts: (dtype, n) of each tensor."""
    found, start = [], 0
    for dtype, count in parts:
        stop = start + count * dtype.itemsize
        # a copy, as a view of another dtype needs its own alignment
        found.append(message[:, start:stop].clone(memory_format=torch.contiguous_format).view(dtype))
        start = stop
    return found
