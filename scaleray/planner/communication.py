"""How long a collective takes, by group, message and network.

Every operation is a number of latencies and a number of bytes over a bandwidth (alpha-beta; Hockney), for the cheaper of ring and tree
as NCCL chooses. Bandwidths are achieved ones (`Link.bus_gb_per_s`, `Transport.bandwidth_share`), not nominal.
Source of ring and tree latency: NCCL's tuning.cc; of the hop counts, Thakur et al. 2005.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from scaleray.planner.constants import DEFAULT, Constants
from scaleray.planner.hardware import TRANSPORTS, Cluster
from scaleray.planner.layout import Group


@dataclass(frozen=True)
class MeasuredTable:
    """All-reduce times of one group on one cluster, as `scaleray`'s communication lab or nccl-tests print them."""

    message_bytes: Sequence[float]
    time_s: Sequence[float]
    num_ranks: int

    def all_reduce_s(self, nbytes: float) -> float:
        """Interpolated in logarithms; beyond the ends, latency of the smallest and bandwidth of the largest message."""
        if nbytes <= self.message_bytes[0]:
            return self.time_s[0]
        if nbytes >= self.message_bytes[-1]:
            return self.time_s[-1] * nbytes / self.message_bytes[-1]
        right = bisect.bisect_left(self.message_bytes, nbytes)
        low, high = self.message_bytes[right - 1], self.message_bytes[right]
        share = math.log(nbytes / low) / math.log(high / low)
        return self.time_s[right - 1] ** (1 - share) * self.time_s[right] ** share


def node_bytes_per_s(cluster: Cluster, num_nodes: int, constants: Constants = DEFAULT) -> float:
    """What all GPUs of a node together send to other nodes when `num_nodes` talk. Infinite without a network."""
    if cluster.network is None or num_nodes < 2:
        return math.inf
    transport = TRANSPORTS[cluster.network.transport]
    reached = min(cluster.network.gb_per_s * transport.bandwidth_share, transport.most_gb_per_s)
    if cluster.network.transport == "tcp" and num_nodes == 2:
        reached *= constants.two_node_tcp_share
    if cluster.network.transport != "tcp":
        reached /= (1 + constants.congestion) ** math.log2(num_nodes / 2)
    return reached * 1e9


def bus_bytes_per_s(group: Group, cluster: Cluster, constants: Constants = DEFAULT) -> float:
    """Bus bandwidth of a ring over `group`: its narrowest part, the link in the node or its share of the node's network."""
    inside = cluster.link.bus_gb_per_s * 1e9 if group.per_node > 1 else math.inf
    if cluster.link.is_shared:
        inside /= group.per_node
    if cluster.is_meshed and group.per_node > 1:
        inside *= (group.per_node - 1) / max(1, max(cluster.board_gpus, cluster.gpus_per_node) - 1)
    return min(inside, node_bytes_per_s(cluster, group.num_nodes, constants) / group.num_rivals)


def ring_latency_s(group: Group, cluster: Cluster) -> float:
    """Of one turn around the ring, (n - 1) hops, of which as many leave the node as there are other nodes."""
    between = group.num_nodes - 1
    return ((group.num_ranks - 1 - between) * cluster.link.latency_us + between * network_latency_us(cluster)) * 1e-6


def tree_latency_s(group: Group, cluster: Cluster) -> float:
    """Of the way to the root: a chain in each node, then a binary tree of nodes."""
    up = math.ceil(math.log2(group.num_nodes)) * network_latency_us(cluster) if group.num_nodes > 1 else 0.0
    return ((group.per_node - 1) * cluster.link.latency_us + up) * 1e-6


def network_latency_us(cluster: Cluster) -> float:
    """Of a hop between nodes; 0 where there is one node only."""
    return TRANSPORTS[cluster.network.transport].latency_us if cluster.network else 0.0


def all_reduce_s(nbytes: float, group: Group, cluster: Cluster, constants: Constants = DEFAULT) -> float:
    """Seconds to sum `nbytes` over the group. 2 (n-1)/n of them leave every rank."""
    if group.num_ranks < 2:
        return 0.0
    n = group.num_ranks
    bandwidth = bus_bytes_per_s(group, cluster, constants)
    ring = 2 * ring_latency_s(group, cluster) + 2 * (n - 1) / n * nbytes / bandwidth
    tree = 2 * tree_latency_s(group, cluster) + 2 * nbytes / bandwidth
    return min(ring, tree)


def all_gather_s(nbytes: float, group: Group, cluster: Cluster, constants: Constants = DEFAULT) -> float:
    """Seconds until every rank of the group holds all `nbytes`. A reduce-scatter of as many takes as long."""
    if group.num_ranks < 2:
        return 0.0
    n = group.num_ranks
    return ring_latency_s(group, cluster) + (n - 1) / n * nbytes / bus_bytes_per_s(group, cluster, constants)


def send_s(nbytes: float, group: Group, cluster: Cluster, constants: Constants = DEFAULT) -> float:
    """Seconds to send `nbytes` from one pipeline stage to the next, where all ranks of a stage send at once."""
    if group.num_ranks < 2:
        return 0.0
    latency_us = network_latency_us(cluster) if group.num_nodes > 1 else cluster.link.latency_us
    return latency_us * 1e-6 + nbytes / bus_bytes_per_s(group, cluster, constants)


def hierarchical_all_reduce_s(nbytes: float, group: Group, cluster: Cluster, constants: Constants = DEFAULT) -> float:
    """Reduce-scatter in the node, all-reduce of the parts between nodes, all-gather in the node."""
    inside = Group(group.per_node, group.per_node, 1)
    between = Group(group.num_nodes, 1, group.num_nodes, group.num_rivals * group.per_node)
    part = nbytes / group.per_node
    return 2 * all_gather_s(nbytes, inside, cluster, constants) + all_reduce_s(part, between, cluster, constants)


def in_network_all_reduce_s(nbytes: float, group: Group, cluster: Cluster, constants: Constants = DEFAULT) -> float:
    """With switches that add (SHARP, NVLS): every rank sends once and receives once."""
    if group.num_ranks < 2:
        return 0.0
    latency_us = 2 * (network_latency_us(cluster) if group.num_nodes > 1 else cluster.link.latency_us)
    return latency_us * 1e-6 + nbytes / bus_bytes_per_s(group, cluster, constants)
