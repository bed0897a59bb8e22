"""Settings of gradient compression."""

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
"""Method to which each setting belongs."""


class CompressionSettings(Settings):
    """Compression of gradients under DDP: fewer bytes, less accuracy."""

    name: Literal["none", "fp16", "bf16", "int8", "powersgd", "topk", "adaptive"] = "none"
    """Method of compression. adaptive: choose among the other methods for each bucket, by measured bandwidth, bucket
    size and error."""
    start_step: Annotated[int, Field(ge=0)] = 0
    """Number of initial steps without compression."""
    rank: Count = 4
    """powersgd: rank of the approximation of each matrix."""
    density: Annotated[float, Field(gt=0, le=1)] = 0.01
    """topk: share of a bucket's values that is sent."""
    block_size: Count = 256
    """int8: number of values that share one scale."""
    max_error: Positive = 0.1
    """adaptive: largest relative error allowed in a bucket's gradient. A bucket is sent uncompressed if every method
    exceeds it."""
    allowed: tuple[Literal["none", "fp16", "bf16", "int8", "powersgd", "topk"], ...] = ("none", "bf16", "int8", "topk")
    """adaptive: methods to choose from."""
    review_every: Count = 100
    """adaptive: steps between two measurements of bandwidth and error."""

    @model_validator(mode="after")
    def _says_what_it_uses(self) -> CompressionSettings:
        # compared by value, not by which keys were given: the resolved config of a run lists every key
        for key, owner in OWNERS.items():
            is_used = self.name == owner or (self.name == "adaptive" and owner in self.allowed)
            if not is_used and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key}: it is a setting of {owner}; compression.name is {self.name}")
        if self.name == "none" and self.start_step:
            raise ValueError("start_step: it has no effect while compression.name is none")
        if not self.allowed or len(set(self.allowed)) != len(self.allowed):
            raise ValueError("allowed: it must list at least one method, each once")
        return self
