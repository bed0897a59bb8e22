"""Context parallelism's exchange: every rank holds a part of each sequence, and needs the keys and
values of the others.

Ring attention (Liu et al. 2023, arXiv:2310.01889) passes them on while the scores of the last part are computed, so
that only what takes longer than attention is exposed; gathering them first (Llama 3, arXiv:2407.21783, section 3.3.2)
is exposed whole, but needs few bytes where keys and values have few heads. The planner counts the ring, and the
latency of its hops.
"""

from __future__ import annotations

from scaleray.planner.cost.communication import all_gather_s, ring_latency_s
from scaleray.planner.cost.compute import element_bytes
from scaleray.planner.cost.constants import DEFAULT, Constants
from scaleray.planner.cost.layout import Layout, group_of
from scaleray.planner.hardware.kinds import Cluster
from scaleray.planner.models.profile import Block


def key_value_exchange_s(
    block: Block, layout: Layout, cluster: Cluster, attention_s: float, constants: Constants = DEFAULT
) -> float:
    """Seconds of one micro-batch's forward pass that wait for keys and values; `attention_s`: this rank's attention,
    during which they travel.
    """
    if layout.context == 1 or not block.kv_bytes:
        return 0.0
    group = group_of(cluster, layout.context, layout.tensor, num_gpus=layout.num_gpus)
    nbytes = block.kv_bytes * layout.micro_batch / layout.tensor * element_bytes(layout) / 2
    ring = all_gather_s(nbytes, group, cluster, constants)
    latency = ring_latency_s(group, cluster)
    # the first part is there, and each of the others is waited for as far as the part before it is not computed yet
    beside = attention_s * (1 - 1 / layout.context)
    return latency + max(0.0, ring - latency - beside) + constants.leak * min(beside, ring - latency)
