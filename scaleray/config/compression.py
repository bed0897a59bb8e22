"""What is done to gradients before they are sent."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from scaleray.config.base import Count, Positive, Settings


class CompressionSettings(Settings):
    """For DDP: fewer bytes for gradients, at the price of exactness."""

    name: Literal["none", "fp16", "bf16", "int8", "powersgd", "topk", "adaptive"] = "none"
    """adaptive chooses among the others for each bucket, by measured bandwidth, bucket size and error."""
    start_step: Annotated[int, Field(ge=0)] = 0
    """Steps that send whole gradients first."""
    rank: Count = 4
    """powersgd: rank of the approximation of each matrix."""
    density: Annotated[float, Field(gt=0, le=1)] = 0.01
    """topk: share of a bucket's values that are sent."""
    block_size: Count = 256
    """int8: values that share one scale."""
    max_error: Positive = 0.1
    """adaptive: largest relative error of a bucket's gradient that a choice may cause."""
    allowed: tuple[Literal["none", "fp16", "bf16", "int8", "powersgd", "topk"], ...] = ("none", "bf16", "int8", "topk")
    """adaptive: what it may choose among."""
    review_every: Count = 100
    """adaptive: steps between two measurements of bandwidth and error."""
