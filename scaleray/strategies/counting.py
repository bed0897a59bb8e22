"""The collectives of sharded training, with the bytes that they are given counted."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter


class Counter:
    """Sums up the bytes of the tensors it sees."""

    def __init__(self) -> None:
        self.num_bytes = 0.0

    def count(self, tensor: torch.Tensor) -> None:
        self.num_bytes += tensor.numel() * tensor.element_size()


class CountedAllGather(DefaultAllGather):
    """torch's own. A rank gives its shard of a unit."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.counter.count(input_tensor)
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


class CountedReduceScatter(DefaultReduceScatter):
    """torch's own. A rank gives the whole gradient of a unit."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.counter.count(input_tensor)
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)
