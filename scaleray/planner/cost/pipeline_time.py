"""Costs between pipeline stages: idle micro-batches at the ends of a step, and transfers of activations and gradients.

A stage waits for its neighbours in every micro-batch: in steady 1F1B the round trip is on the critical path of both, so
the most expensive boundary of a stage lengthens its period. Only boundaries between nodes use the network. Source:
Narayanan et al. 2021, arXiv:2104.04473."""

from __future__ import annotations

from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.planner.cost.communication import send_s
from scaleray.planner.cost.compute import element_bytes
from scaleray.planner.cost.constants import Constants
from scaleray.planner.cost.layout import Group, Layout
from scaleray.planner.models.block_counts import ModelProfile

HIDDEN_SHARE = 0.7
"""Share of an interleaved schedule's transfers that is hidden: they run during the compute of another part of the
model.
"""


def idle_micro_batches(layout: Layout) -> float:
    """Bubble of a stage, in micro-batches."""
    share = {"1f1b": 1.0, "gpipe": 1.0, "interleaved": 1.0 / layout.chunks, "zero_bubble": 1.0 / 3}[layout.schedule]
    return (layout.pipeline - 1) * share


def hand_overs_s(model: ModelProfile, layout: Layout, cluster: Cluster, constants: Constants) -> list[float]:
    """Seconds of each boundary between two stages, for one micro-batch: its activations forward and their gradient
    back."""
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
