"""Duration of one optimizer step, and of its parts.

A step is the compute of the slowest stage for every micro-batch, plus communication that compute cannot hide, the
pipeline's bubble, the optimizer, and the wait for the slowest rank. Overlap is a window: a concurrent collective costs
the part that does not fit into the window, and `leak` of the rest, since it takes SMs and bandwidth from the compute
that hides it. Sources: pipeline, Narayanan et al. 2021, arXiv:2104.04473; FSDP, Zhao et al. 2023, arXiv:2304.11277;
ZeRO, arXiv:1910.02054.
"""

import itertools
import math
import operator
from dataclasses import dataclass

from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.planner.cost.block_pass import UNMEASURED, WORK_FIELDS, BlockPass, Measured, block_passes, block_work
from scaleray.planner.cost.communication import all_gather_s, all_reduce_s, send_s
from scaleray.planner.cost.compute import element_bytes, optimizer_s
from scaleray.planner.cost.constants import DEFAULT, Constants
from scaleray.planner.cost.layout import Group, Layout, group_of
from scaleray.planner.cost.pipeline_stages import balanced_cuts, even_cuts
from scaleray.planner.cost.remembered import remembered
from scaleray.planner.models.block_counts import ModelProfile

HIDDEN_SHARE = 0.7
"""Share of an interleaved schedule's transfers that is hidden, as they run during the compute of another part of the
model.
"""


def idle_micro_batches(layout: Layout) -> float:
    """Bubble of a stage, in micro-batches."""
    share = {"1f1b": 1.0, "gpipe": 1.0, "interleaved": 1.0 / layout.chunks, "zero_bubble": 1.0 / 3}[layout.schedule]
    return (layout.pipeline - 1) * share


def hand_overs_s(model: ModelProfile, layout: Layout, cluster: Cluster, constants: Constants) -> list[float]:
    """Seconds of each boundary between two stages for one micro-batch: sending its activations forward and their
    gradient back. In steady 1F1B this round trip is on the critical path of both stages, so a stage's most expensive
    boundary lengthens its period. Only boundaries between nodes use the network."""
    boundary = max(block.boundary_bytes for block in model.blocks) * layout.micro_batch / layout.context
    nbytes = boundary * element_bytes(layout) / 2 / (layout.tensor if layout.sequence_parallel else 1)
    exposed = 1.0 if layout.chunks == 1 else (1 - HIDDEN_SHARE) * layout.chunks
    stride = layout.tensor * layout.context * layout.data
    used = min(cluster.gpus_per_node, layout.num_gpus)
    seconds: dict[bool, float] = {}  # for a boundary inside a node, and between nodes
    found: list[float] = []
    for stage in range(layout.pipeline - 1):
        last = (stage + 1) * stride - 1
        leaves = last // used != (last + stride) // used
        if leaves not in seconds:
            pair = Group(2, 1, 2, min(stride, used)) if leaves else Group(2, 2, 1)
            seconds[leaves] = exposed * 2 * (send_s(nbytes, pair, cluster, constants) + constants.handover_s)
        found.append(seconds[leaves])
    return found


ROUNDING = 1e-9
"""Bound on the relative error of a sum over a model's blocks, in any order of summation."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step; the parts sum to `total_s`."""

    forward_s: float
    backward_s: float
    recompute_s: float
    bubble_s: float
    tensor_comm_s: float
    pipeline_comm_s: float
    data_comm_s: float
    """Exposed data parallel communication, for which the step waits; tensor and pipeline communication are exposed
    too."""
    optimizer_s: float
    straggler_s: float
    overhead_s: float
    exchange_comm_s: float = 0.0
    """Exposed exchanges: tokens sent to experts and back, and keys and values of context parallel ranks."""
    hidden_comm_s: float = 0.0
    """Communication that runs during compute; not included in the total."""
    sent_bytes: float = 0.0
    """Bytes sent by one GPU."""

    @property
    def compute_s(self) -> float:
        """Seconds in which the GPU computes, including recomputation."""
        return self.forward_s + self.backward_s + self.recompute_s

    @property
    def exposed_comm_s(self) -> float:
        """Seconds of all communication for which the step waits."""
        return self.tensor_comm_s + self.exchange_comm_s + self.pipeline_comm_s + self.data_comm_s

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return (
            self.compute_s + self.bubble_s + self.exposed_comm_s + self.optimizer_s + self.straggler_s + self.overhead_s
        )

    def parts(self) -> dict[str, float]:
        """Seconds of each part by name, in the order of a step."""
        return {
            "forward": self.forward_s,
            "backward": self.backward_s,
            "recompute": self.recompute_s,
            "tensor comm": self.tensor_comm_s,
            "exchange comm": self.exchange_comm_s,
            "pipeline bubble": self.bubble_s,
            "pipeline comm": self.pipeline_comm_s,
            "data comm": self.data_comm_s,
            "optimizer": self.optimizer_s,
            "stragglers": self.straggler_s,
            "overhead": self.overhead_s,
        }


def step_time(
    model: ModelProfile,
    layout: Layout,
    cluster: Cluster,
    *,
    measured: Measured | None = None,
    fused_attention: bool = True,
    constants: Constants = DEFAULT,
) -> StepTime:
    """Predict one optimizer step of `layout`. `measured` scales the compute to measurements of a GPU."""
    measured = measured or UNMEASURED
    hand_overs = [measured.comm_scale * one for one in hand_overs_s(model, layout, cluster, constants)]
    stages = _stages(model, layout, cluster, measured, fused_attention, constants)
    stage, wait = _slowest(stages, hand_overs)
    passes = layout.accumulation
    forward, backward, recompute = _stretched(stage, layout)
    # all stages keep the pace of the slowest, and the step ends where most work remains: often at the embedding
    ends = [
        (
            _data_comm(model, one, layout, cluster, constants, measured.comm_scale),
            optimizer_s(one.owned_params, layout, cluster.gpu, constants),
        )
        for one in {id(one): one for one in stages}.values()
    ]
    data, update = max(ends, key=lambda end: end[0].exposed_s + end[1])
    bubbles = idle_micro_batches(layout)
    shares = {
        "transformer": constants.straggler_share,
        "cnn": constants.straggler_share_input,
        "other": constants.straggler_share_uneven,
    }
    behind = shares[model.kind] * math.sqrt(2 * math.log(layout.num_gpus)) if layout.num_gpus > 1 else 0.0
    compute = (forward + backward + recompute) * passes
    return StepTime(
        forward_s=forward * passes,
        backward_s=backward * passes,
        recompute_s=recompute * passes,
        tensor_comm_s=(stage.tensor_comm_s - stage.exchange_comm_s) * passes,
        exchange_comm_s=stage.exchange_comm_s * passes,
        bubble_s=bubbles * (forward + backward + recompute + stage.tensor_comm_s),
        pipeline_comm_s=wait * passes + sum(hand_overs),
        data_comm_s=data.exposed_s,
        hidden_comm_s=data.hidden_s,
        sent_bytes=data.sent_bytes,
        optimizer_s=update,
        straggler_s=compute * behind,
        overhead_s=constants.step_overhead_s,
    )


def least_step_s(
    model: ModelProfile,
    layout: Layout,
    cluster: Cluster,
    *,
    measured: Measured | None = None,
    fused_attention: bool = True,
    constants: Constants = DEFAULT,
) -> float:
    """Lower bound on `step_time` that is much cheaper to compute: only the micro-batches and the bubble, at the pace of
    an average stage, which the slowest stage cannot beat."""
    whole = _whole(layout, model, cluster, measured or UNMEASURED, fused_attention, constants)
    passes = layout.accumulation + idle_micro_batches(layout)
    return passes * whole.total_s / layout.pipeline * (1 - ROUNDING)


@remembered(*WORK_FIELDS)
def _whole(
    layout: Layout, model: ModelProfile, cluster: Cluster, measured: Measured, fused: bool, constants: Constants
) -> BlockPass:
    """One micro-batch through all blocks of the model."""
    works = ((one.count, block_work(layout, one, model, cluster, measured, fused, constants)) for one in model.blocks)
    return sum((work.times(count) for count, work in works), BlockPass())


def _stages(
    model: ModelProfile, layout: Layout, cluster: Cluster, measured: Measured, fused: bool, constants: Constants
) -> list[BlockPass]:
    """Work of each stage of the pipeline for a micro-batch."""
    passes = block_passes(model, layout, cluster, measured=measured, fused_attention=fused, constants=constants)
    if layout.pipeline == 1:
        return [sum((one.times(count) for count, one in passes), BlockPass())]
    # cuts as planned, without measurements: otherwise a step's time would jump when a block
    # changes its stage
    planned = UNMEASURED if model.has_flops else measured
    cuts = (
        even_cuts(model, layout.pipeline)
        if layout.even_stages
        else _cuts(layout, model, cluster, planned, fused, constants)
    )
    blocks = [index for index, (count, _) in enumerate(passes) for _ in range(count)]
    sums: dict[tuple[int, ...], BlockPass] = {}  # most stages hold the same blocks
    stages: list[BlockPass] = []
    for start, end in itertools.pairwise(cuts):
        held = tuple(blocks[start:end])
        if held not in sums:
            sums[held] = sum((passes[index][1] for index in held), BlockPass())
        stages.append(sums[held])
    return stages


@remembered(*WORK_FIELDS)
def _cuts(
    layout: Layout, model: ModelProfile, cluster: Cluster, measured: Measured, fused: bool, constants: Constants
) -> list[int]:
    """Positions at which the pipeline cuts the model's blocks, each counted as often as it is repeated."""
    works = [(one.count, block_work(layout, one, model, cluster, measured, fused, constants)) for one in model.blocks]
    return balanced_cuts([one.total_s for count, one in works for _ in range(count)], layout.pipeline)


def _slowest(stages: list[BlockPass], hand_overs: list[float]) -> tuple[BlockPass, float]:
    """The stage with the most compute, and the time that transfers add to each micro-batch at that stage, or at one
    that they make even slower."""
    seconds = [stage.total_s for stage in stages]
    most = max(seconds)
    slowest = stages[seconds.index(most)]
    if len(stages) == 1:
        return slowest, 0.0
    waits = map(max, [0.0, *hand_overs], [*hand_overs, 0.0])
    return slowest, max(map(operator.add, seconds, waits)) - most


def _stretched(stage: BlockPass, layout: Layout) -> tuple[float, float, float]:
    """Seconds of one micro-batch's forward pass, backward pass and recomputation."""
    # the host launches kernels while the GPU runs them: a stage cannot be faster than its launches
    stretch = max(1.0, stage.launch_s / max(stage.forward_s + stage.backward_s + stage.recompute_s, 1e-12))
    # statistics of gradients are computed as these appear, concurrently with communication
    backward = stage.backward_s * stretch + layout.extra_s / layout.accumulation
    return stage.forward_s * stretch, backward, stage.recompute_s * stretch


@dataclass(frozen=True)
class _DataComm:
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    sent_bytes: float = 0.0


def _data_comm(
    model: ModelProfile, stage: BlockPass, layout: Layout, cluster: Cluster, constants: Constants, scale: float
) -> _DataComm:
    if layout.data == 1 or not stage.reduced_params:
        return _DataComm()
    forward_s, backward_s, recompute_s = _stretched(stage, layout)
    backward_s += recompute_s
    stride = layout.tensor  # a context parallel group shards its state like replicas
    group = group_of(cluster, layout.data * layout.context, layout.tensor, num_gpus=layout.num_gpus)
    if layout.sharding == "zero3":
        return _sharded_comm(model, stage, layout, cluster, forward_s, backward_s, stride, constants, scale)
    gradients = stage.reduced_params * layout.gradient_bytes
    # the last bucket is filled at random, unless it holds a tensor that cannot be split
    last = max(
        min(gradients, constants.bucket_bytes) / 2, model.largest_tensor_params / layout.tensor * layout.gradient_bytes
    )
    last = min(gradients, last)
    buckets = max(1, math.ceil(gradients / constants.bucket_bytes))
    reduce = all_reduce_s if layout.sharding == "none" else all_gather_s
    total = reduce(gradients, group, cluster, constants)
    latency = reduce(0.0, group, cluster, constants)
    total = scale * (total + latency * (buckets - 1))
    window = constants.hiding_share * backward_s if layout.overlaps_data else 0.0
    tail = total * last / gradients
    exposed, hidden = _hide(total, window, tail, constants)
    n = group.num_ranks
    sent = (2 if layout.sharding == "none" else 1) * gradients * (n - 1) / n
    times = layout.accumulation if layout.reduces_every_micro_batch else 1
    exposed, hidden, sent = exposed * times, hidden * times, sent * times
    if layout.sharding in ("zero1", "zero2"):
        params = stage.reduced_params * layout.gather_bits / 8
        gather = scale * all_gather_s(params, group, cluster, constants)
        # parameters are gathered layer by layer, during the next forward pass if that is implemented
        late, early = _hide(
            gather, constants.prefetch_share * forward_s if layout.overlaps_gather else 0.0, 0.0, constants
        )
        exposed, hidden = exposed + late, hidden + early
        sent += params * (n - 1) / n
    return _DataComm(exposed, hidden, sent)


def _sharded_comm(
    model: ModelProfile,
    stage: BlockPass,
    layout: Layout,
    cluster: Cluster,
    forward_s: float,
    backward_s: float,
    stride: int,
    constants: Constants,
    scale: float,
) -> _DataComm:
    shards = layout.num_shards
    group = group_of(cluster, shards, stride, num_gpus=layout.num_gpus)
    num_units = max(1, round(model.num_layers / layout.pipeline))
    unit = stage.reduced_params / num_units
    gather_unit = scale * all_gather_s(unit * layout.gather_bits / 8, group, cluster, constants)
    reduce_unit = scale * all_gather_s(unit * layout.gradient_bytes, group, cluster, constants)
    gathers, reduces = gather_unit * num_units, reduce_unit * num_units
    share = constants.prefetch_share
    ahead, hidden_ahead = _hide(gathers, share * forward_s, gather_unit, constants)
    back, hidden_back = _hide(gathers + reduces, share * backward_s, reduce_unit, constants)
    times = layout.accumulation
    exposed, hidden = (ahead + back) * times, (hidden_ahead + hidden_back) * times
    n = group.num_ranks
    sent = stage.reduced_params * (2 * layout.gather_bits / 8 + layout.gradient_bytes) * (n - 1) / n * times
    replicas = layout.data * layout.context // shards
    if replicas > 1:
        part = stage.reduced_params * layout.gradient_bytes / shards
        between = group_of(cluster, replicas, stride * shards, num_gpus=layout.num_gpus)
        again, hidden_again = _hide(
            scale * all_reduce_s(part, between, cluster, constants), 0.5 * share * backward_s, 0.0, constants
        )
        exposed, hidden = exposed + again, hidden + hidden_again
        sent += 2 * part * (replicas - 1) / replicas
    return _DataComm(exposed, hidden, sent)


def _hide(comm_s: float, window_s: float, tail_s: float, constants: Constants) -> tuple[float, float]:
    """(exposed, hidden) seconds. Exposed is the part that does not fit into the compute, but at least the tail, plus
    the leak of the rest.
    """
    exposed = min(comm_s, max(tail_s, comm_s - window_s))
    hidden = comm_s - exposed
    return exposed + constants.leak * hidden, hidden * (1 - constants.leak)
