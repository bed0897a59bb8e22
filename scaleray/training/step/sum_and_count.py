"""The pair returned by every loss and metric: a sum, and the number of samples or tokens over which it was taken."""

import math
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from scaleray.errors import WorkloadError


def check_sum_and_count(result: Any, *, what: str) -> tuple[torch.Tensor, Any]:
    """Return the pair from a loss or metric. Raises WorkloadError describing any other result."""
    if not isinstance(result, tuple) or len(result) != 2:
        found = f"a tensor of shape {list(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
        raise WorkloadError(
            what,
            found,
            "it must return (sum, count)",
            "sum the loss with reduction='sum' and return it with the number of samples or tokens",
        )
    total, count = result
    if isinstance(total, DTensor):
        raise WorkloadError(
            f"the sum returned by {what}",
            "sharded over the workers",
            "it was computed with a weight outside its layer, where a worker holds only a part of it",
            "for a penalty on weights, use optimizer.weight_decay, or use --strategy.name ddp or zero1",
        )
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        shape = f"a tensor of shape {list(total.shape)}" if isinstance(total, torch.Tensor) else type(total).__name__
        raise WorkloadError(
            f"the sum returned by {what}", shape, "it must be a tensor with one element", "sum over samples and tokens"
        )
    if isinstance(count, torch.Tensor):
        if count.numel() != 1 or count.requires_grad:
            raise WorkloadError(
                f"the count returned by {what}",
                f"a tensor of shape {list(count.shape)}",
                "it must be one number without gradient",
            )
        count = count.reshape(())
    elif (
        isinstance(count, bool) or not isinstance(count, (int, float, np.number)) or not count >= 0 or math.isinf(count)
    ):
        raise WorkloadError(
            f"the count returned by {what}", count, "it must be a number of samples or tokens, 0 or more"
        )
    return total if total.dim() == 0 else total.reshape(()), count
