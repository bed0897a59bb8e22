"""Sharding of parameters, gradients and optimizer state: `strategy.name: fsdp`, and the data axis of tensor and
pipeline."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from scaleray.config.base import Count, Positive, Settings


class FsdpSettings(Settings):
    """Parts that are sharded, their units, and how far communication runs ahead."""

    reshard_after_forward: bool = True
    """Whether whole parameters are freed early. true (ZeRO-3): they are freed after the forward pass and gathered again
    for the backward pass; those in no unit, such as an embedding outside the blocks, stay. false (like ZeRO-2): all
    stay until the backward pass has used them, for more memory and less communication.
    """
    wrap: Literal["blocks", "size", "class"] = "blocks"
    """Modules that are gathered as one unit: the workload's `blocks`, modules from `wrap_min_parameters`, or those of
    `wrap_classes`. Parameters in none of these form a unit of their own."""
    wrap_min_parameters: Count = 1_000_000
    """With `wrap: size`: smallest number of parameters of a unit."""
    wrap_classes: tuple[str, ...] = ()
    """With `wrap: class`: names of module classes."""
    prefetch: Annotated[int, Field(ge=0, le=16)] = 1
    """Units gathered ahead of the one that computes, forward and backward."""
    max_unsharded_gib: Positive | None = None
    """Upper bound on parameters that are gathered at the same time, as the units are laid out; less is prefetched where
    it would be passed. None: no bound."""
    accumulate: Literal["whole", "sharded"] = "whole"
    """With several micro-batches: keep whole gradients on each worker and reduce them once a step, or reduce each
    micro-batch's, for the memory of a shard and as many times the communication."""
    reduce_unused: bool = False
    """Reduce a zero for parameters that a unit did not use on this worker: for units whose path depends on the data,
    where workers would otherwise reduce different parameters. One that no worker used gets a gradient of zero, not
    none. The unit itself must run on all workers or on none.
    """
    cpu_offload: bool = False
    """Keep shards and the optimizer's work on the CPU; only units in use are on the GPU."""
    parameter_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """dtype in which parameters are gathered and used; floating-point inputs of a unit are cast to it, so tables of
    positions too, and the model's output back. None: `precision.dtype` where that is bf16 or fp16, else their own. The
    run's record has it as `derived.parameter_dtype`. fp32 with bf16 gathers twice the bytes, and autocast keeps a
    16-bit copy of every unit until the backward pass; 16 bits with `precision.dtype` fp32 replace autocast and its
    exceptions. Layers with running statistics (batch normalisation) keep their own. Under `tensor` and `pipeline` too,
    where replicas are sharded."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """dtype in which gradients are reduced, and wait for the last micro-batch. None: the parameters' own, so fp32 for a
    model in fp32 whatever `parameter_dtype` is. Under `tensor` and `pipeline` too, where replicas are sharded."""
    build_gib: Positive | None = None
    """Build the model in about so much memory: parameters that were not touched lately are kept as shards meanwhile.
    For models larger than one worker; the initial values are those of an ordinary build. None: every worker builds
    it whole, then shards."""

    @model_validator(mode="after")
    def _classes_are_for_wrap_class(self) -> FsdpSettings:
        if (self.wrap == "class") != bool(self.wrap_classes):
            raise ValueError("fsdp.wrap class and fsdp.wrap_classes belong together: give both or neither")
        return self
