"""Memory of a GPU in a layout, part by part, and whether it fits.

Model states as in ZeRO (arXiv:1910.02054), activations as in Korthikanti et al. 2022 (arXiv:2205.05198), the unsharded
unit of FSDP as in Zhao et al. 2023 (arXiv:2304.11277). `allocated` corresponds to torch.cuda.max_memory_allocated,
`reserved` adds the caching allocator's fragmentation, and `device` adds the context and the communication library, as
nvidia-smi counts them. A step has several possible peaks with different contents: logits at the loss, a recomputed
layer in the backward pass, widened gradients in the optimizer's step."""

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from scaleray.config.hardware.hardware_kinds import Gpu
from scaleray.planner.cost.compute import element_bytes
from scaleray.planner.cost.experts import held_params, state_shards
from scaleray.planner.cost.layout import Checkpointing, Layout
from scaleray.planner.cost.pipeline_stages import balanced_cuts, even_cuts, filled_cuts
from scaleray.planner.cost.remembered import remembered
from scaleray.planner.cost.uncertainty import SPREADS
from scaleray.planner.models.block_counts import Block, ModelProfile
from scaleray.records.study_record import Estimate
from scaleray.records.text.units import GIB

FRAGMENTATION_SHARE = 0.05
"""Fragmentation, as a share of allocated memory; 3 to 8 % in torchtitan's and nanotron's logs (reserved over
allocated)."""
CONTEXT_BYTES = 1.0 * GIB
"""CUDA context with its kernels, cuBLAS workspace: 0.5 to 1.5 GiB."""
COLLECTIVE_BYTES = 0.5 * GIB
"""NCCL's channels and buffers, for each group of a rank: two dozen channels with 10 MiB each in both directions."""
LIVE_PARAMS = 1e9
"""Maximum parameters that DeepSpeed's ZeRO-3 keeps unsharded at a time (stage3_max_live_parameters)."""
PIPELINE_GROUPS = 3
"""Communication groups of a rank in a pipeline: all stages, and the pairs with the next and the previous one."""
BUCKET_BYTES = 1e9
"""Bytes of a bucket in which ZeRO-1 and 2 reduce 16-bit gradients: DeepSpeed's 500 million elements."""
ALTERNATE_SHARE = 1 / 3
"""Share of a block's activations that alternate recomputation keeps, if it is unknown which operations are products."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the fullest GPU at its peak; a part that is absent at the peak is 0."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    unsharded: float
    """FSDP units that are temporarily unsharded, with their gradients."""
    buckets: float
    """Second copies of gradients while they are reduced."""
    fragmentation: float
    context: float

    @property
    def allocated_bytes(self) -> float:
        """Bytes of tensors alone."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.logits
            + self.unsharded
            + self.buckets
        )

    @property
    def reserved_bytes(self) -> float:
        """Bytes of tensors and of fragmentation between them."""
        return self.allocated_bytes + self.fragmentation

    @property
    def device_bytes(self) -> float:
        """Total bytes used on the GPU."""
        return self.reserved_bytes + self.context

    def parts(self) -> dict[str, float]:
        """Bytes of each part by name; they sum to `device_bytes`."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def spare_bytes(self, gpu: Gpu) -> float:
        """Bytes left on `gpu`; negative if the layout does not fit."""
        return gpu.memory_gib * GIB - self.device_bytes


def memory(model: ModelProfile, layout: Layout) -> MemoryEstimate:
    """The peak memory of the fullest stage."""
    groups = (layout.data > 1) + (layout.tensor > 1) + (layout.context > 1)
    groups += PIPELINE_GROUPS if layout.pipeline > 1 else 0
    context = CONTEXT_BYTES + COLLECTIVE_BYTES * groups
    share = 0.0 if layout.engine == "planned" else FRAGMENTATION_SHARE
    fullest = -1.0
    parts: tuple[float, ...] = ()
    for stage in _stages(layout, model):
        for moment, lost in _moments(stage, layout):
            allocated = sum(moment)
            fragmentation = share * allocated + lost
            taken = allocated + fragmentation + context
            if taken > fullest:
                fullest, parts = taken, (*moment, fragmentation, context)
    return MemoryEstimate(**dict(zip(MemoryEstimate.__dataclass_fields__, parts, strict=True)))


def activation_bytes(block: Block, layout: Layout, checkpointing: Checkpointing | None = None) -> float:
    """Bytes that one block keeps of one micro-batch until its backward pass. checkpointing: overrides the layout's."""
    checkpointing = checkpointing or layout.checkpointing
    samples = layout.micro_batch / layout.context
    width = element_bytes(layout) / 2
    unsplit = layout.tensor if layout.sequence_parallel else 1
    if checkpointing == "full" and block.count > 1:
        return samples * width * block.boundary_bytes / unsplit
    is_whole = block.count == 1 and not layout.splits_logits
    tensor = 1 if is_whole else layout.tensor
    if checkpointing == "alternate" and block.alternate_kept_bytes and block.count > 1:
        return samples * width * (block.boundary_bytes / unsplit + block.alternate_kept_bytes / tensor)
    kept = block.kept_bytes / unsplit + block.split_kept_bytes / tensor
    if layout.compiled:
        kept -= block.eager_kept_bytes / unsplit + block.eager_split_kept_bytes / tensor
    if checkpointing != "selective":
        kept += block.score_kept_bytes / tensor
    if layout.sequence_parallel and layout.keeps_gathered:
        # tensors gathered along the sequence before two of the products stay whole for the gradients of their weights
        kept += 2 * block.boundary_bytes * (1 - 1 / layout.tensor) if block.count > 1 else 0.0
    if checkpointing == "alternate" and block.count > 1:
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


@dataclass(frozen=True, eq=False)
class _Stage:
    """A stage of a pipeline. index: of the first stage that holds these blocks. layers: blocks other than the head,
    each with its count."""

    index: int
    blocks: tuple[Block, ...]
    layers: tuple[tuple[int, Block], ...]
    head: tuple[Block, ...]
    last_sent: Block | None
    """Block whose output is sent on, if there is a next stage."""
    has_root: bool
    """Whether blocks that are not repeated form a separate unit of FSDP."""


@remembered("pipeline", "even_stages", "filled_stages")
def _stages(layout: Layout, model: ModelProfile) -> tuple[_Stage, ...]:
    """Return the distinct stages. Of equal ones, the first needs the most memory, for its micro-batches."""
    singles = [block for block in model.blocks for _ in range(block.count)]
    cuts = [0, len(singles)]
    if layout.pipeline > 1:
        costs = [max(block.forward_flops, 1.0) for block in singles]
        cut = filled_cuts if layout.filled_stages else balanced_cuts
        cuts = even_cuts(model, layout.pipeline) if layout.even_stages else cut(costs, layout.pipeline)
    found: dict[tuple[int, ...], _Stage] = {}
    for index, (start, end) in enumerate(itertools.pairwise(cuts)):
        blocks = tuple(singles[start:end])
        layers = [block for block in blocks if block is not model.blocks[-1] or model.kind == "cnn"]
        head = tuple(block for block in blocks if block is model.blocks[-1] and model.kind != "cnn")
        often = Counter(map(id, layers))  # equal layers are the same object
        distinct = {id(block): (often[id(block)], block) for block in layers}
        sends = layout.pipeline > 1 and layers and not head
        last = layers[-1] if sends else None
        stage = _Stage(index, blocks, tuple(distinct.values()), head, last, model.kind != "cnn")
        found.setdefault(tuple(map(id, blocks)), stage)
    return tuple(found.values())


def _moments(stage: _Stage, layout: Layout) -> tuple[tuple[tuple[float, ...], float], ...]:
    """Memory of the stage at each possible peak of a step: the allocated parts of a `MemoryEstimate`, and bytes lost to
    fragmentation. Plain numbers, for speed, since there are thousands of layouts.
    """
    accumulates = layout.accumulation > 1
    held = _held(layout, stage, accumulates)
    one_kept, sent, logits, again = _activations(layout, stage)
    in_flight = (
        min(layout.accumulation, max(1, layout.pipeline - stage.index))
        if layout.schedule == "1f1b"
        else micro_batches_in_flight(layout)
    )
    # the output sent on is kept too, for the backward pass
    kept = in_flight * one_kept + in_flight * sent
    # without accumulation, FSDP and a single GPU have no gradients before the backward pass
    waits = accumulates or layout.pipeline > 1 or (layout.data > 1 and layout.sharding != "zero3")
    before = held.gradients if waits else 0.0
    whole = held.unsharded + held.reduced
    # a long row does not fit into the shorter blocks of freed activations, and keeps its own
    row = held.update if layout.engine == "deepspeed" else 0.0
    params, after, state, buckets = held.parameters, held.gradients, held.optimizer, held.buckets
    return (
        ((params, before, state, kept, logits, held.unsharded, buckets), row),  # the loss is computed
        ((params, before, state, kept + again, 0.0, whole, buckets), row),  # the last layer's backward pass
        ((params, after, state, again, 0.0, whole, buckets), row),  # the first layer's
        ((params, after, state + held.update, 0.0, 0.0, 0.0, buckets), 0.0),  # the optimizer steps
    )


@remembered(
    "micro_batch", "context", "tensor", "precision", "checkpointing", "sequence_parallel", "splits_logits", "compiled",
    "keeps_gathered",
)  # fmt: skip
def _activations(layout: Layout, stage: _Stage) -> tuple[float, float, float, float]:
    """Bytes of one micro-batch in a stage: kept by its layers, sent on, the head's logits, and the extra needs of the
    largest layer's backward pass."""
    kept = sum(count * activation_bytes(block, layout) for count, block in stage.layers)
    sent = _sent_bytes(stage.last_sent, layout) if stage.last_sent else 0.0
    logits = sum(activation_bytes(block, layout) for block in stage.head)
    return kept, sent, logits, max((_again_bytes(block, layout) for _, block in stage.layers), default=0.0)


@dataclass(frozen=True)
class _Held:
    """Bytes of a stage that do not depend on the micro-batch. `update`: needed only in the optimizer's step;
    `unsharded`: of FSDP units that are gathered during a pass; `reduced`: of the gradient being reduced."""

    parameters: float
    gradients: float
    optimizer: float
    update: float
    buckets: float
    unsharded: float
    reduced: float


@remembered(
    "data", "shard", "tensor", "pipeline", "context", "expert", "sharding", "precision", "is_mixed", "gradient_bytes",
    "optimizer_bytes", "accumulates_whole", "engine", "offloads",
)  # fmt: skip
def _held(layout: Layout, of: _Stage, accumulates: bool) -> _Held:
    stage = of.blocks
    copies = sum(block.tied_params for block in stage) if layout.pipeline > 1 else 0.0
    params = sum(held_params(block, layout) for block in stage) + copies / layout.tensor
    shards = state_shards(stage, layout)
    cut_states = shards if layout.sharding != "none" else 1
    cut_gradients = shards if layout.sharding in ("zero2", "zero3") else 1
    cut_params = shards if layout.sharding == "zero3" else 1
    narrow = layout.is_mixed and layout.sharding != "zero3"
    param_bytes, master_bytes = (2.0, 4) if narrow else (4.0 if layout.is_mixed else element_bytes(layout), 0)
    # FSDP keeps 32-bit shards, and gradients of the same width; compression applies only to communication
    gradient_bytes = (
        (4 if layout.sharding == "zero3" else max(2.0, layout.gradient_bytes))
        if layout.is_mixed
        else element_bytes(layout)
    )
    waits_whole = layout.sharding in ("zero2", "zero3") and layout.accumulates_whole
    if (waits_whole or (layout.sharding == "zero3" and layout.pipeline > 1)) and accumulates:
        # whole gradients kept for the last micro-batch, as in a pipeline, have the width of their reduction
        gradient_bytes, cut_gradients = max(2.0, layout.gradient_bytes), 1
    is_in_rows = layout.engine == "deepspeed"
    if is_in_rows and narrow and gradient_bytes > 2:
        gradient_bytes += 2  # 16-bit gradients are kept next to the 32-bit row to which they are added
    # 16-bit gradients of the part that this rank updates are widened for the update; DeepSpeed first
    # copies them to a row
    is_widened = narrow and layout.gradient_bytes < 4
    # DDP's buckets are the gradients themselves (gradient_as_bucket_view)
    buckets = 0.0
    if layout.sharding in ("zero1", "zero2") and is_widened and is_in_rows:
        buckets = min(BUCKET_BYTES, params * gradient_bytes)
    optimizer = 0.0 if layout.offloads else params * (master_bytes + layout.optimizer_bytes) / cut_states
    unsharded, reduced = _unsharded(of, layout)
    return _Held(
        parameters=params * param_bytes / cut_params,
        gradients=params * gradient_bytes / cut_gradients,
        optimizer=optimizer,
        update=params * (6 if is_in_rows else 4) / cut_states if is_widened and not layout.offloads else 0.0,
        buckets=buckets,
        unsharded=unsharded,
        reduced=reduced,
    )


def _unsharded(of: _Stage, layout: Layout) -> tuple[float, float]:
    """Bytes of FSDP units that are gathered during a pass, and of the gradient being reduced."""
    stage = of.blocks
    if layout.sharding != "zero3" or layout.num_shards == 1:
        return 0.0, 0.0
    unit = max(
        (held_params(block, layout) for block in stage if block.count > 1), default=held_params(stage[0], layout)
    )
    # parameters outside the layers, embedding and head, form a separate unit that stays whole
    root = sum(held_params(block, layout) for block in stage if block.count == 1) if of.has_root else 0.0
    # two of the layers' units are whole: the one in use and the one being fetched; those sent in a narrower type
    # are widened before use
    wide = 2.0 if layout.is_mixed else element_bytes(layout)
    whole = 2 * unit + root
    if layout.pipeline > 1:
        # a stage's units would be gathered for each of the micro-batches in flight: they stay whole
        whole = sum(held_params(block, layout) for block in stage)
    if layout.engine == "deepspeed":
        whole = max(whole, min(LIVE_PARAMS, sum(held_params(block, layout) for block in stage)))
    return whole * wide, unit * (wide + max(2.0, layout.gradient_bytes))


def _sent_bytes(block: Block, layout: Layout) -> float:
    split = layout.tensor if layout.sequence_parallel else 1
    return layout.micro_batch / layout.context * element_bytes(layout) / 2 * block.boundary_bytes / split


def _again_bytes(block: Block, layout: Layout) -> float:
    """Extra bytes of the backward pass of one block: recomputed activations, and gradients of activations."""
    whole = activation_bytes(block, layout, "none")
    products = max((2.0 * product.rows * product.columns for product in block.matmuls), default=0.0)
    passing = layout.micro_batch / layout.context * element_bytes(layout) / 2 * products / layout.tensor
    return whole - activation_bytes(block, layout) + passing + 2 * _sent_bytes(block, layout)


Verdict = Literal["fits", "may not fit", "does not fit"]

HEADROOM = 0.05

"""Share of the GPU's memory to keep free. A published run failed although the planner predicted 3.8 % free."""


def memory_interval(needed: MemoryEstimate) -> Estimate:
    """Bytes used on the GPU, with the interval that holds 90 % of published measurements."""
    spread = SPREADS["memory"]
    value = needed.device_bytes
    return Estimate(value, value * math.exp(spread.low), value * math.exp(spread.high))


def verdict(needed: MemoryEstimate, gpu: Gpu) -> Verdict:
    """Verdict on whether the prediction and its interval fit into the GPU's memory that is available to a process."""
    card = gpu.memory_gib * GIB
    if needed.spare_bytes(gpu) < HEADROOM * card:
        return "does not fit"
    return "fits" if memory_interval(needed).high <= card else "may not fit"
