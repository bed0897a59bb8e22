"""Sharding of parameters, gradients and optimizer state: `strategy.name: fsdp`, and the data axis of tensor and pipeline."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from scaleray.config.base import Count, Positive, Settings


class FsdpSettings(Settings):
    """What is sharded, in which units, and how far communication runs ahead."""

    reshard_after_forward: bool = True
    """true (ZeRO-3): whole parameters are freed after the forward pass and gathered again for the backward pass. false
    (like ZeRO-2): they stay until the step's end, for more memory and less communication."""
    replicas: Count = 1
    """HSDP: groups of workers that each hold all shards between them. 1 shards over all workers."""
    wrap: Literal["blocks", "size", "class"] = "blocks"
    """What is gathered as one unit: the workload's `blocks`, modules from `wrap_min_parameters`, or those of `wrap_classes`."""
    wrap_min_parameters: Count = 1_000_000
    """With `wrap: size`: smallest number of parameters of a unit."""
    wrap_classes: tuple[str, ...] = ()
    """With `wrap: class`: names of module classes."""
    prefetch: Annotated[int, Field(ge=0, le=16)] = 1
    """Units gathered ahead of the one that computes, forward and backward."""
    cpu_offload: bool = False
    """Shards and the optimizer's work live on the CPU; only units in use are on the device."""
    parameter_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """dtype in which parameters are gathered and used. None: their own."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """dtype in which gradients are reduced. None: that of the parameters as used."""
    meta_init: bool = False
    """Build the model without memory and fill each worker's shards only: for models larger than one worker. Needs
    a model whose modules have `reset_parameters`, or that has `init_weights`."""
    max_unsharded_gib: Positive | None = None
    """Upper bound on parameters gathered at the same time, by prefetching less. None: no bound."""
