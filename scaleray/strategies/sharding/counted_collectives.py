"""Collectives of sharded training, which are counted, timed if the host waits for them, and reported to watchers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
    _get_gradient_divide_factors,
)

from scaleray.strategies.traffic.ledger import Entry


class Window:
    """Stores the callback that receives the pieces of a rank's own gradient; None without a watcher."""

    def __init__(self) -> None:
        self.see: Callable[[torch.Tensor, float], None] | None = None

    def show(self, see: Callable[[torch.Tensor, float], None] | None) -> None:
        self.see = see


class CountedAllGather(DefaultAllGather):
    """torch's all-gather, with counting. A rank contributes its shard of a unit."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.on_arrival: list[Callable[[], None]] = []
        """Function called when this rank arrives at the collective."""

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for call in self.on_arrival:
            call()
        start = partial(super().__call__, output_tensor, input_tensor, *args, **kwargs)
        return self.entry.run(start, input_tensor)


class CountedReduceScatter(DefaultReduceScatter):
    """torch's reduce-scatter, with counting. A rank contributes the whole gradient of a unit, and exposes it in
    `window`. replicas: group over which the result is all-reduced afterwards."""

    def __init__(
        self, entry: Entry, window: Window | None = None, *, replicas: dist.ProcessGroup | None = None
    ) -> None:
        self.entry, self.window, self.replicas = entry, window, replicas
        self.on_arrival: list[Callable[[], None]] = []
        """Function called when this rank arrives at the collective, with the gradients of the unit computed."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        for call in self.on_arrival:
            call()
        if self.window is not None and self.window.see is not None:
            # torch has divided by a part of the number of workers already, where sums could overflow
            before, *_ = _get_gradient_divide_factors(
                group, self.replicas, input_tensor.dtype, input_tensor.device.type
            )
            self.window.see(input_tensor, before or 1.0)
        start = partial(super().__call__, output_tensor, input_tensor, group, *args, **kwargs)
        return self.entry.run(start, input_tensor)
