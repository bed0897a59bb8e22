"""Settings for sharding parameters, gradients and optimizer state: `strategy.name: fsdp`, and the data axis of tensor
and pipeline."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from scaleray.config.base import Count, Positive, Settings


class FsdpSettings(Settings):
    """Sharding units, when they are gathered and freed, and dtypes."""

    reshard_after_forward: bool = True
    """Whether gathered parameters are freed early. true (ZeRO-3): free them after the forward pass and gather them
    again for the backward pass, except those outside any unit, such as an embedding outside the blocks. false (like
    ZeRO-2): keep them until the backward pass has used them, with more memory and less communication.
    """
    wrap: Literal["blocks", "size", "class"] = "blocks"
    """Modules that are gathered as one unit: the workload's `blocks`, modules with at least `wrap_min_parameters`, or
    those in `wrap_classes`. All other parameters form a unit of their own."""
    wrap_min_parameters: Count = 1_000_000
    """With `wrap: size`: smallest number of parameters of a unit."""
    wrap_classes: tuple[str, ...] = ()
    """With `wrap: class`: names of module classes."""
    prefetch: Annotated[int, Field(ge=0, le=16)] = 1
    """Number of units gathered ahead of the current one, forward and backward."""
    max_unsharded_gib: Positive | None = None
    """Upper bound on the number of parameters gathered at the same time; fewer units are prefetched if they would
    exceed it. None: no bound."""
    accumulate: Literal["whole", "sharded"] = "whole"
    """With several micro-batches: keep whole gradients on each worker and reduce them once per step, or reduce after
    each micro-batch, which needs only the memory of a shard and correspondingly more communication."""
    reduce_unused: bool = False
    """Reduce zeros for parameters that a unit did not use on this worker. Needed if a unit's path depends on the data,
    as workers would otherwise reduce different parameters. Parameters that no worker used get a zero gradient, not
    None. The unit itself must run on all workers or on none.
    """
    cpu_offload: bool = False
    """Keep the shards and the optimizer's computation on the CPU; only units in use are on the GPU."""
    parameter_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """dtype in which parameters are gathered and used; floating-point inputs of a unit, including position tables, are
    cast to it, and the model's output is cast back. None: `precision.dtype` if that is bf16 or fp16, otherwise their
    own. It is recorded as `derived.parameter_dtype`. fp32 with bf16 gathers twice the bytes, and autocast keeps a
    16-bit copy of every unit until the backward pass; 16 bits with `precision.dtype` fp32 replace autocast and its
    exceptions. Layers with running statistics (batch normalisation) keep their own. Also used under `tensor` and
    `pipeline` if replicas are sharded."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """dtype in which gradients are reduced and accumulated until the last micro-batch. None: the parameters' own, so
    fp32 for a model in fp32, independent of `parameter_dtype`. Also used under `tensor` and `pipeline` if replicas are
    sharded."""
    build_gib: Positive | None = None
    """Build the model in about this much memory: parameters that have not been touched recently are stored as shards
    during the build. For models larger than one worker; initial values are the same as otherwise. None: every worker
    builds the whole model, then shards it."""

    @model_validator(mode="after")
    def _classes_are_for_wrap_class(self) -> FsdpSettings:
        if (self.wrap == "class") != bool(self.wrap_classes):
            raise ValueError("fsdp.wrap class and fsdp.wrap_classes belong together: give both or neither")
        return self
