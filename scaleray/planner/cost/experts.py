"""Mixtures of experts over many GPUs: a rank's part of a block, its exchanges with other ranks, and the utilisation of
its products.

Expert parallelism uses the ranks that hold the same layers (data, context and tensor parallel together). If there are
enough of them, tensor parallelism also splits the experts; otherwise each expert stays whole. The remaining ranks are
replicas of the expert group. Tokens are assumed to be spread evenly over experts, which is approximately true with a
balancing loss or bias. Sources: GShard, arXiv:2006.16668; DeepSpeed-MoE, arXiv:2201.05596; sending tokens to each node
only once, DeepSeek-V3, arXiv:2412.19437, section 3.2."""

import math
from collections.abc import Sequence

from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.planner.cost.communication import network_latency_us, node_bytes_per_s
from scaleray.planner.cost.compute import element_bytes
from scaleray.planner.cost.constants import DEFAULT, Constants
from scaleray.planner.cost.layout import Group, Layout, group_of
from scaleray.planner.models.block_counts import Block

MESH_SHARE = 0.7
"""Share of a link's all-reduce bandwidth that an all-to-all reaches, since each pair sends little at once. nccl-tests
on NVSwitch show 0.6 to 0.8 (from memory)."""


def expert_tensor_degree(layout: Layout) -> int:
    """Number of ranks over which one expert is split."""
    return layout.tensor if layout.data * layout.context % layout.expert == 0 else 1


def expert_replicas(layout: Layout) -> int:
    """Number of ranks that hold the same part of the same experts, and sum its gradient."""
    ranks = layout.data * layout.context * layout.tensor
    return max(1, ranks // (layout.expert * expert_tensor_degree(layout)))


def held_params(block: Block, layout: Layout) -> float:
    """Parameters of the block on one rank, before any sharding of state."""
    dense = (block.num_params - block.expert_params) / layout.tensor
    return dense + block.expert_params / (layout.expert * expert_tensor_degree(layout))


def owned_params(block: Block, layout: Layout) -> float:
    """Parameters of the block that one rank updates: all that it holds, or its shard."""
    if layout.sharding == "none":
        return held_params(block, layout)
    return held_params(block, layout) / state_shards([block], layout)


def state_shards(blocks: Sequence[Block], layout: Layout) -> float:
    """Number of ranks over which the state of `blocks` is sharded, if at all; an effective number if dense and expert
    parts differ."""
    experts = sum(block.expert_params for block in blocks) / (layout.expert * expert_tensor_degree(layout))
    if not experts:
        return float(layout.num_shards)
    dense = sum(block.num_params - block.expert_params for block in blocks) / layout.tensor
    # hybrid sharding is limited to its part of the replicas
    expert_shards = max(1.0, expert_replicas(layout) * layout.num_shards / (layout.data * layout.context))
    return (dense + experts) / (dense / layout.num_shards + experts / expert_shards)


def reduced_params(block: Block, layout: Layout) -> float:
    """Number of parameters whose reduction over the data parallel group takes as long as this block's over its actual
    groups.

    Each of n replicas sends (n - 1)/n of its reduced parameters. Experts have fewer replicas than the rest, or only one
    if they are all on different ranks.
    """
    if not block.expert_params:
        return block.num_params / layout.tensor
    ranks, replicas = layout.data * layout.context, expert_replicas(layout)
    share = (1 - 1 / replicas) / (1 - 1 / ranks) if ranks > 1 else 0.0
    dense = (block.num_params - block.expert_params) / layout.tensor
    return dense + block.expert_params / (layout.expert * expert_tensor_degree(layout)) * share


def expert_exchange_s(block: Block, layout: Layout, cluster: Cluster, constants: Constants = DEFAULT) -> float:
    """Seconds to send the tokens of one micro-batch to their experts and back, in the forward pass."""
    if layout.expert == 1 or not block.num_experts:
        return 0.0
    group = group_of(cluster, layout.expert, expert_tensor_degree(layout), num_gpus=layout.num_gpus)
    # ranks of a tensor parallel group hold the same tokens; each sends its part of them
    nbytes = block.routed_bytes * layout.micro_batch / layout.context / layout.tensor * element_bytes(layout) / 2
    return 2 * all_to_all_s(nbytes, group, cluster, copies=block.active_experts, constants=constants)


def all_to_all_s(
    nbytes: float, group: Group, cluster: Cluster, *, copies: int = 1, constants: Constants = DEFAULT
) -> float:
    """Seconds for every rank to send `nbytes` in equal parts to the ranks of `group`.

    `copies`: number of copies of each token in the bytes. Only one is sent to each other node, and forwarded there.
    """
    if group.num_ranks < 2:
        return 0.0
    n, nodes = group.num_ranks, group.num_nodes
    inside_bus = cluster.link.bus_gb_per_s * 1e9 * MESH_SHARE
    if cluster.link.is_shared:
        inside_bus /= group.per_node
    latency_us = math.log2(n) * cluster.link.latency_us + (network_latency_us(cluster) if nodes > 1 else 0.0)
    inside = nbytes * (group.per_node - 1) / group.per_node / inside_bus if group.per_node > 1 else 0.0
    between = 0.0
    if nodes > 1:
        # expected number of other nodes among the nodes drawn by `copies`, each counted once
        others = (nodes - 1) * (1 - (1 - 1 / nodes) ** copies)
        speed = node_bytes_per_s(cluster, nodes, constants) / group.num_rivals / group.per_node
        between = nbytes / copies * others / speed
    return latency_us * 1e-6 + max(inside, between)
