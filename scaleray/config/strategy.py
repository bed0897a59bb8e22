"""Strategy that spreads the model over the workers, and settings of DDP. Others have a section of their own."""

from __future__ import annotations

from typing import Literal

from scaleray.config.base import Positive, Settings


class StrategySettings(Settings):
    """How the model is spread over the workers."""

    name: Literal[
        "auto", "single", "ddp", "zero1", "fsdp", "tensor", "pipeline", "local_sgd", "diloco", "gossip", "async_sgd"
    ] = "auto"
    """Name of the strategy. auto: `single` for one worker, `ddp` for more."""
    bucket_size_mib: Positive = 25.0
    """DDP: gradients are reduced in buckets of this size while the backward pass still runs."""
    gradient_as_bucket_view: bool = True
    """DDP: gradients live inside the buckets, which saves one copy and its memory."""
    static_graph: bool = False
    """DDP: promise that every step uses the same parameters in the same order."""
    find_unused_parameters: bool = False
    """DDP: for models that skip parameters in some steps; costs a walk over the graph each step."""
