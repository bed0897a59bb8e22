"""Collectives started by a strategy: count, bytes and duration."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from scaleray.records.phases import Enter, Phase
from scaleray.records.profile_record import CollectiveRow


@dataclass
class Entry:
    """One kind of collective in one group."""

    group: str
    group_size: int
    operation: str
    count: int = 0
    num_bytes: float = 0.0
    seconds: float | None = None
    """Seconds that the host waited for these collectives; None if it did not, or on a GPU, where the queue waits."""

    enter: Enter | None = None
    """Enters a phase while the host waits."""
    on_host: bool = True
    """Whether the last payload was in the host's memory."""

    def add(self, tensor: torch.Tensor) -> None:
        """Count a collective with this payload."""
        self.count += 1
        self.num_bytes += tensor.numel() * tensor.element_size()
        self.on_host = tensor.device.type == "cpu"

    def waited(self, seconds: float) -> None:
        """Add seconds for which the host waited; does nothing on a GPU, where the host only queues waits."""
        if self.on_host:
            self.seconds = (self.seconds or 0.0) + seconds

    def run(self, start: Callable[[], Any], tensor: torch.Tensor) -> Any:
        """Run a collective with this payload and return its result. On the CPU, synchronous ones are timed."""
        self.add(tensor)
        if not self.on_host:
            return start()  # the host only puts it into a queue
        left = None if self.enter is None else self.enter(Phase.COMMUNICATION)
        begun = time.perf_counter()
        result = start()
        if result is None:
            self.waited(time.perf_counter() - begun)
        if self.enter is not None and left is not None:
            self.enter(left)
        return result


class Ledger:
    """All entries of a strategy on this rank. stands_still: whether training blocks while collectives are timed."""

    def __init__(self, *, stands_still: bool = True) -> None:
        self._exposed_share = 1.0 if stands_still else None
        self._entries: dict[tuple[str, str], Entry] = {}

    def entry(self, group: str, group_size: int, operation: str) -> Entry:
        """Entry of an operation in a group, created if it does not exist."""
        return self._entries.setdefault((group, operation), Entry(group, group_size, operation))

    def tell_phases(self, enter: Enter) -> None:
        """See `Parallel.tell_phases`; to be called when all entries exist."""
        for entry in self._entries.values():
            entry.enter = enter

    @property
    def num_bytes(self) -> float:
        """Total bytes of all collectives."""
        return sum(entry.num_bytes for entry in self._entries.values())

    def rows(self) -> list[CollectiveRow]:
        """Counts so far."""
        return [
            CollectiveRow(
                rank=dist.get_rank(),
                group=one.group,
                group_size=one.group_size,
                operation=one.operation,
                count=one.count,
                num_bytes=one.num_bytes,
                seconds=one.seconds,
                exposed_share=None if one.seconds is None else self._exposed_share,
            )
            for one in self._entries.values()
            if one.count
        ]
