"""Time of one micro-batch through a block of the model, forward and backward, including communication.

A pipeline stage is a sum of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.planner.cost.communication import all_gather_s, all_reduce_s, ring_latency_s
from scaleray.planner.cost.compute import block_times, element_bytes
from scaleray.planner.cost.constants import DEFAULT, Constants
from scaleray.planner.cost.experts import expert_exchange_s, owned_params, reduced_params
from scaleray.planner.cost.layout import Layout, group_of
from scaleray.planner.cost.remembered import remembered
from scaleray.planner.models.block_counts import Block, ModelProfile

# Exchange of context parallelism: every rank holds a part of each sequence, and needs the keys and values of the
# others.
#
# Ring attention (Liu et al. 2023, arXiv:2310.01889) sends them while the scores of the last part are computed, so
# that only the excess over attention is exposed; gathering them first (Llama 3, arXiv:2407.21783, section
# 3.3.2) is fully exposed, but needs few bytes if keys and values have few heads. The planner counts the ring, and
# the latency of its hops.


def key_value_exchange_s(
    block: Block, layout: Layout, cluster: Cluster, attention_s: float, constants: Constants = DEFAULT
) -> float:
    """Seconds that one micro-batch's forward pass waits for keys and values; `attention_s`: this rank's attention,
    which runs concurrently.
    """
    if layout.context == 1 or not block.kv_bytes:
        return 0.0
    group = group_of(cluster, layout.context, layout.tensor, num_gpus=layout.num_gpus)
    nbytes = block.kv_bytes * layout.micro_batch / layout.tensor * element_bytes(layout) / 2
    ring = all_gather_s(nbytes, group, cluster, constants)
    latency = ring_latency_s(group, cluster)
    # the first part is local; the transfer of each other part overlaps with attention on the one before it
    beside = attention_s * (1 - 1 / layout.context)
    return latency + max(0.0, ring - latency - beside) + constants.leak * min(beside, ring - latency)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Corrections measured at a small size: ratios of measured to predicted time for compute and collectives."""

    compute_scale: float = 1.0
    comm_scale: float = 1.0
    sample_s: float | None = None
    """Seconds of one sample's forward and backward pass, if the profile lacks them; also scaled."""


UNMEASURED = Measured()

WORK_FIELDS = (
    "micro_batch", "data", "tensor", "pipeline", "context", "expert", "precision", "checkpointing", "compiled",
    "sequence_parallel", "channels_last", "overlaps_tensor",
)  # fmt: skip
"""Properties of a layout that determine the time of a micro-batch through a block."""


@dataclass(frozen=True)
class BlockPass:
    """Times of one micro-batch through one stage (or a block)."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    recompute_s: float = 0.0
    tensor_comm_s: float = 0.0
    """Communication inside the layers for which the compute waits, including `exchange_comm_s`."""
    exchange_comm_s: float = 0.0
    """Communication of experts and context parallelism."""
    launch_s: float = 0.0
    reduced_params: float = 0.0
    """Parameters that gather and reduction move; fewer than are held if experts have fewer replicas than the rest."""
    owned_params: float = 0.0
    """Parameters that the optimizer of this rank updates."""

    def __add__(self, other: BlockPass) -> BlockPass:
        # written out for speed: the planner spends a tenth of its time here
        return BlockPass(
            self.forward_s + other.forward_s,
            self.backward_s + other.backward_s,
            self.recompute_s + other.recompute_s,
            self.tensor_comm_s + other.tensor_comm_s,
            self.exchange_comm_s + other.exchange_comm_s,
            self.launch_s + other.launch_s,
            self.reduced_params + other.reduced_params,
            self.owned_params + other.owned_params,
        )

    def times(self, count: float) -> BlockPass:
        return BlockPass(
            self.forward_s * count,
            self.backward_s * count,
            self.recompute_s * count,
            self.tensor_comm_s * count,
            self.exchange_comm_s * count,
            self.launch_s * count,
            self.reduced_params * count,
            self.owned_params * count,
        )

    @property
    def total_s(self) -> float:
        return max(self.forward_s + self.backward_s + self.recompute_s, self.launch_s) + self.tensor_comm_s


def block_passes(
    model: ModelProfile,
    layout: Layout,
    cluster: Cluster,
    *,
    measured: Measured | None = None,
    fused_attention: bool = True,
    constants: Constants = DEFAULT,
) -> list[tuple[int, BlockPass]]:
    """Number of repeats of each block, with the pass of one micro-batch through one of them."""
    works = [
        block_work(layout, block, model, cluster, measured or UNMEASURED, fused_attention, constants)
        for block in model.blocks
    ]
    return [(block.count, work + _held(layout, block)) for block, work in zip(model.blocks, works, strict=True)]


@remembered("data", "shard", "tensor", "context", "expert", "sharding")
def _held(layout: Layout, block: Block) -> BlockPass:
    """Parameters of a block, which take no time in a pass."""
    return BlockPass(reduced_params=reduced_params(block, layout), owned_params=owned_params(block, layout))


@remembered(*WORK_FIELDS)
def block_work(
    layout: Layout,
    block: Block,
    model: ModelProfile,
    cluster: Cluster,
    measured: Measured,
    fused: bool,
    constants: Constants,
) -> BlockPass:
    """Pass of one micro-batch through one block, without the parameters that the block holds."""
    if measured.sample_s is not None:
        # only the time of a whole step is known: a third of it is the forward pass
        share = block.num_params / model.num_params * measured.sample_s * layout.micro_batch * measured.compute_scale
        return BlockPass(share / 3, share * 2 / 3)
    times = block_times(block, layout, cluster.gpu, fused_attention=fused, constants=constants)
    is_layer = block.count > 1 or model.kind == "cnn"
    again = {"none": 0.0, "selective": times.attention_s, "alternate": 0.5 * times.forward_s, "full": times.forward_s}
    recompute = again[layout.checkpointing] if is_layer else 0.0
    scale = measured.compute_scale
    comm = 0.0
    if layout.tensor > 1 and block.num_all_reduces:
        group = group_of(cluster, layout.tensor, 1, num_gpus=layout.num_gpus)
        nbytes = block.boundary_bytes * layout.micro_batch / layout.context * element_bytes(layout) / 2
        once = all_reduce_s(nbytes, group, cluster, constants) * block.num_all_reduces * measured.comm_scale
        comm = (
            once
            * (2 + (1 if layout.checkpointing == "full" and is_layer else 0))
            * (0.3 if layout.overlaps_tensor else 1.0)
        )
    # the backward exchange is as large as the forward one, and recomputation repeats it; ring attention also
    # sends the gradients of keys and values
    again_too = 1 if layout.checkpointing == "full" and is_layer else 0
    keys_and_values = key_value_exchange_s(block, layout, cluster, times.attention_s * scale, constants)
    tokens = expert_exchange_s(block, layout, cluster, constants)
    exchange = measured.comm_scale * (tokens * (2 + again_too) + keys_and_values * (3 + again_too))
    # the forward pass has a third of a block's kernels, and recomputation launches its part again
    launches = times.launch_s * (1 + recompute / times.forward_s / 3 if times.forward_s else 1.0)
    return BlockPass(
        forward_s=times.forward_s * scale,
        backward_s=times.backward_s * scale,
        recompute_s=recompute * scale,
        tensor_comm_s=comm + exchange,
        exchange_comm_s=exchange,
        launch_s=launches * scale,
    )
