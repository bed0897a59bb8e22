"""The collectives of sharded training, with the bytes that they are given counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
    _get_gradient_divide_factors,
)


class Counter:
    """Sum of the bytes of all tensors given to `count`."""

    def __init__(self) -> None:
        self.num_bytes = 0.0

    def count(self, tensor: torch.Tensor) -> None:
        self.num_bytes += tensor.numel() * tensor.element_size()


class Window:
    """Holder of the callback that sees pieces of a rank's own gradient; None while nobody looks."""

    def __init__(self) -> None:
        self.see: Callable[[torch.Tensor, float], None] | None = None

    def show(self, see: Callable[[torch.Tensor, float], None] | None) -> None:
        self.see = see


class CountedAllGather(DefaultAllGather):
    """torch's all-gather, counted. A rank gives its shard of a unit."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.counter.count(input_tensor)
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


class CountedReduceScatter(DefaultReduceScatter):
    """torch's reduce-scatter, counted. A rank gives the whole gradient of a unit, and shows it in `window`. replicas:
    the group over which the result is all-reduced afterwards."""

    def __init__(
        self, counter: Counter, window: Window | None = None, *, replicas: dist.ProcessGroup | None = None
    ) -> None:
        self.counter, self.window, self.replicas = counter, window, replicas

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self.counter.count(input_tensor)
        if self.window is not None and self.window.see is not None:
            # torch has divided by a part of the number of workers already, where sums could overflow
            before, *_ = _get_gradient_divide_factors(
                group, self.replicas, input_tensor.dtype, input_tensor.device.type
            )
            self.window.see(input_tensor, before or 1.0)
        return super().__call__(output_tensor, input_tensor, group, *args, **kwargs)
