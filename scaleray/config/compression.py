"""Compression of gradients before they are sent."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from scaleray.config.base import Count, Positive, Settings

OWNERS = {
    "rank": "powersgd",
    "density": "topk",
    "block_size": "int8",
    "max_error": "adaptive",
    "allowed": "adaptive",
    "review_every": "adaptive",
}
"""Method that each setting belongs to."""


class CompressionSettings(Settings):
    """Compression of gradients under DDP: fewer bytes, at the price of exactness."""

    name: Literal["none", "fp16", "bf16", "int8", "powersgd", "topk", "adaptive"] = "none"
    """Method of compression. adaptive chooses among the others for each bucket, by measured bandwidth, bucket size and
    error."""
    start_step: Annotated[int, Field(ge=0)] = 0
    """Number of first steps that send whole gradients."""
    rank: Count = 4
    """powersgd: rank of the approximation of each matrix."""
    density: Annotated[float, Field(gt=0, le=1)] = 0.01
    """topk: share of a bucket's values that are sent."""
    block_size: Count = 256
    """int8: values that share one scale."""
    max_error: Positive = 0.1
    """adaptive: largest relative error of a bucket's gradient that a choice may cause. Whole gradients are sent where
    the error of every choice is larger."""
    allowed: tuple[Literal["none", "fp16", "bf16", "int8", "powersgd", "topk"], ...] = ("none", "bf16", "int8", "topk")
    """adaptive: methods that it may choose among."""
    review_every: Count = 100
    """adaptive: steps between two measurements of bandwidth and error."""

    @model_validator(mode="after")
    def _says_what_it_uses(self) -> CompressionSettings:
        # compared by value, not by which keys were given: the resolved config of a run, read again, gives every key
        for key, owner in OWNERS.items():
            is_used = self.name == owner or (self.name == "adaptive" and owner in self.allowed)
            if not is_used and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key}: it is a setting of {owner}, but compression.name is {self.name}")
        if self.name == "none" and self.start_step:
            raise ValueError("start_step: it has no effect while compression.name is none")
        if not self.allowed or len(set(self.allowed)) != len(self.allowed):
            raise ValueError("allowed: at least one method, each once")
        return self
