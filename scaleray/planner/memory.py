"""How much memory a GPU of a layout needs, part by part, and whether it fits.

Model states as in ZeRO (arXiv:1910.02054), activations as in Korthikanti et al. 2022 (arXiv:2205.05198), the unsharded unit of FSDP as in
Zhao et al. 2023 (arXiv:2304.11277). `allocated` is what torch.cuda.max_memory_allocated would say, `reserved` adds what the caching
allocator loses to fragmentation, `device` adds the context and the communication library, as nvidia-smi counts.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

from scaleray.planner.compute import element_bytes
from scaleray.planner.experts import held_params, state_shards
from scaleray.planner.hardware import Gpu
from scaleray.planner.layout import Layout
from scaleray.planner.profile import Block, ModelProfile
from scaleray.planner.stages import balanced_cuts, even_cuts

GIB = 2.0**30
FRAGMENTATION_SHARE = 0.05
"""Of what is allocated; 3 to 8 % in torchtitan's and nanotron's logs (reserved over allocated)."""
CONTEXT_BYTES = 1.2 * GIB
"""CUDA context with its kernels, cuBLAS workspace: 0.5 to 1.5 GiB."""
COLLECTIVE_BYTES = 1.0 * GIB
"""NCCL's channels and buffers, for each kind of group that a rank is in: 0.5 to 1.5 GiB, more with more peers."""
ALTERNATE_SHARE = 1 / 3
"""Of a block's activations that stay with alternate recomputation: torchtitan keeps every other product's output and attention's."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the fullest GPU."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    unsharded: float
    """Units of FSDP that are whole for a moment, with their gradients."""
    buckets: float
    """Second copies of gradients while they are reduced."""
    fragmentation: float
    context: float

    @property
    def allocated_bytes(self) -> float:
        """Tensors alone."""
        return (
            self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.unsharded + self.buckets
        )  # fmt: skip

    @property
    def reserved_bytes(self) -> float:
        """Tensors and what the allocator loses between them."""
        return self.allocated_bytes + self.fragmentation

    @property
    def device_bytes(self) -> float:
        """All that is gone from the card."""
        return self.reserved_bytes + self.context

    def parts(self) -> dict[str, float]:
        """By name; they add up to `device_bytes`."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def spare_bytes(self, gpu: Gpu) -> float:
        """What is left on `gpu`; negative where it does not fit."""
        return gpu.memory_gib * GIB - self.device_bytes


def memory(model: ModelProfile, layout: Layout) -> MemoryEstimate:
    """Of the fullest stage."""
    stages = _stages(model, layout)
    return max(
        (_stage_memory(stage, index, model, layout) for index, stage in enumerate(stages)),
        key=lambda one: one.device_bytes,
    )


def activation_bytes(block: Block, layout: Layout) -> float:
    """What one such block keeps of one micro-batch until its backward pass."""
    samples = layout.micro_batch / layout.context
    width = element_bytes(layout) / 2
    unsplit = layout.tensor if layout.sequence_parallel else 1
    if layout.checkpointing == "full" and block.count > 1:
        return samples * width * block.boundary_bytes / unsplit
    kept = block.kept_bytes / unsplit + block.split_kept_bytes / layout.tensor
    if layout.checkpointing != "selective":
        kept += block.score_kept_bytes / layout.tensor
    if layout.sequence_parallel and layout.keeps_gathered:
        # what is gathered along the sequence before two of the products stays whole for their weights' gradients
        kept += 2 * block.boundary_bytes * (1 - 1 / layout.tensor) if block.count > 1 else 0.0
    if layout.checkpointing == "alternate" and block.count > 1:
        kept *= ALTERNATE_SHARE
    return samples * width * kept


def micro_batches_in_flight(layout: Layout) -> float:
    """Micro-batches whose activations the first stage holds, in units of its own layers."""
    stages, passes = layout.pipeline, layout.accumulation
    if layout.schedule == "gpipe":
        return passes
    if layout.schedule == "interleaved" and stages > 1:
        return min(passes, stages) * (1 + (stages - 1) / (stages * layout.chunks))
    return min(passes, stages)


def _stages(model: ModelProfile, layout: Layout) -> list[list[Block]]:
    singles = [block for block in model.blocks for _ in range(block.count)]
    if layout.pipeline == 1:
        return [singles]
    cuts = _cuts(model, layout.pipeline, layout.even_stages)
    return [singles[start:end] for start, end in itertools.pairwise(cuts)]


@functools.lru_cache(maxsize=256)
def _cuts(model: ModelProfile, pipeline: int, is_even: bool) -> list[int]:
    if is_even:
        return even_cuts(model, pipeline)
    return balanced_cuts(
        [max(block.forward_flops, 1.0) for block in model.blocks for _ in range(block.count)], pipeline
    )


def _stage_memory(stage: list[Block], index: int, model: ModelProfile, layout: Layout) -> MemoryEstimate:
    copies = sum(block.tied_params for block in stage) if layout.pipeline > 1 else 0.0
    params = sum(held_params(block, layout) for block in stage) + copies / layout.tensor
    shards = state_shards(stage, layout)
    cut_states = shards if layout.sharding != "none" else 1
    cut_gradients = shards if layout.sharding in ("zero2", "zero3") else 1
    cut_params = shards if layout.sharding == "zero3" else 1
    narrow = layout.is_mixed and layout.sharding != "zero3"
    param_bytes, master_bytes = (2, 4) if narrow else (4 if layout.is_mixed else element_bytes(layout), 0)
    # FSDP keeps 32-bit shards, and gradients of the same width
    gradient_bytes = 4 if layout.sharding == "zero3" and layout.is_mixed else layout.gradient_bytes
    # 16-bit gradients are widened for the update, of the part that this rank updates
    widened = 4 if narrow and layout.gradient_bytes < 4 else 0
    optimizer = 0.0 if layout.offloads else params * (master_bytes + widened + layout.optimizer_bytes) / cut_states
    in_flight = micro_batches_in_flight(layout)
    if layout.schedule == "1f1b":
        in_flight = min(layout.accumulation, max(1, layout.pipeline - index))
    layers = [block for block in stage if block is not model.blocks[-1] or model.kind == "cnn"]
    head = [block for block in stage if block is model.blocks[-1] and model.kind != "cnn"]
    activations = in_flight * sum(activation_bytes(block, layout) for block in layers)
    if layout.checkpointing == "full" and any(block.count > 1 for block in stage):
        # while a layer is computed again it keeps everything
        whole = max((block for block in stage if block.count > 1), key=lambda block: block.split_kept_bytes)
        activations += activation_bytes(whole, replace(layout, checkpointing="none"))
    unit = max((held_params(block, layout) for block in stage if block.count > 1), default=params)
    unsharded = 0.0
    if layout.sharding == "zero3" and shards > 1:
        # the unit in use, the one that is fetched, and a gradient that is not reduced yet
        unsharded = 2 * unit * layout.gather_bits / 8 + unit * layout.gradient_bytes
    buckets = params * layout.gradient_bytes if layout.sharding == "none" and layout.data > 1 and not narrow else 0.0
    num_kinds = sum(degree > 1 for degree in (layout.data, layout.tensor, layout.pipeline, layout.context))
    pieces = {
        "parameters": params * param_bytes / cut_params,
        "gradients": params * gradient_bytes / cut_gradients,
        "optimizer": optimizer,
        "activations": activations,
        "logits": sum(activation_bytes(block, layout) for block in head),
        "unsharded": unsharded,
        "buckets": buckets,
    }
    return MemoryEstimate(
        **pieces,
        fragmentation=FRAGMENTATION_SHARE * sum(pieces.values()),
        context=CONTEXT_BYTES + COLLECTIVE_BYTES * num_kinds,
    )
