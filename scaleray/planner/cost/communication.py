"""Time of a collective, given its group, message and network.

Every operation takes a number of latencies plus a number of bytes over a bandwidth (alpha-beta model; Hockney), with
the fastest of the cluster's algorithms, as NCCL chooses it. Measured all-reduces (`Cluster.measured`) are used if
available. Bandwidths are achieved, not nominal (`Link.bus_gb_per_s`, `Transport.bandwidth_share`). Sources: ring and
tree latency, NCCL's tuning.cc; hop counts, Thakur et al. 2005.
"""

import math

from scaleray.config.hardware.hardware_kinds import TRANSPORTS, Cluster
from scaleray.planner.cost.constants import DEFAULT, Constants
from scaleray.planner.cost.layout import Group


def node_bytes_per_s(cluster: Cluster, num_nodes: int, constants: Constants = DEFAULT) -> float:
    """Bytes per second that all GPUs of a node together send to other nodes when `num_nodes` nodes communicate.
    Infinite without a network."""
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
    """Bus bandwidth of a ring over `group`, in bytes per second: that of its slowest part, the link in the node or its
    share of the node's network."""
    inside = cluster.link.bus_gb_per_s * 1e9 if group.per_node > 1 else math.inf
    if cluster.link.is_shared:
        inside /= group.per_node
    if cluster.is_meshed and group.per_node > 1:
        inside *= (group.per_node - 1) / max(1, max(cluster.board_gpus, cluster.gpus_per_node) - 1)
    between = node_bytes_per_s(cluster, group.num_nodes, constants) / group.num_rivals
    if group.num_nodes > 1 and cluster.network is not None and cluster.network.transport == "tcp":
        between /= (1 + constants.socket_jitter) ** math.log2(group.num_ranks / 2)
    return min(inside, between)


def ring_latency_s(group: Group, cluster: Cluster) -> float:
    """Latency in seconds of one round of the ring: (n - 1) hops, one of which crosses to each other node."""
    between = group.num_nodes - 1
    return ((group.num_ranks - 1 - between) * cluster.link.latency_us + between * network_latency_us(cluster)) * 1e-6


def tree_latency_s(group: Group, cluster: Cluster) -> float:
    """Latency in seconds of the path to the root: a chain in each node, then a binary tree of nodes."""
    up = 0.0
    if group.num_nodes > 1 and cluster.network is not None:
        transport = TRANSPORTS[cluster.network.transport]
        up = math.ceil(math.log2(group.num_nodes)) * (transport.tree_hop_us or transport.latency_us)
    return ((group.per_node - 1) * cluster.link.latency_us + up) * 1e-6


def network_latency_us(cluster: Cluster) -> float:
    """Latency in microseconds of a hop between nodes; 0 without a network."""
    return TRANSPORTS[cluster.network.transport].latency_us if cluster.network else 0.0


def all_reduce_s(nbytes: float, group: Group, cluster: Cluster, constants: Constants = DEFAULT) -> float:
    """Seconds to sum `nbytes` over the group, from measurements of such a group or for the fastest algorithm."""
    if group.num_ranks < 2:
        return 0.0
    for table in cluster.measured:
        if (table.num_ranks, table.num_nodes, 1) == (group.num_ranks, group.num_nodes, group.num_rivals):
            return table.all_reduce_s(nbytes)
    cheapest = min(ALGORITHMS[name](nbytes, group, cluster, constants) for name in algorithms(group, cluster))
    return cheapest * _measured_over_formula(nbytes, group, cluster, constants)


def all_gather_s(nbytes: float, group: Group, cluster: Cluster, constants: Constants = DEFAULT) -> float:
    """Seconds until every rank of the group holds all `nbytes`. A reduce-scatter of the same bytes takes as long."""
    if group.num_ranks < 2:
        return 0.0
    return _ring_gather_s(nbytes, group, cluster, constants) * _measured_over_formula(nbytes, group, cluster, constants)


def algorithms(group: Group, cluster: Cluster) -> tuple[str, ...]:
    """The cluster's algorithms that suit the group: `hierarchical` if the group has parts in several nodes,
    `in_network` if the switches on its path reduce."""
    leaves = group.num_nodes > 1
    adds_between = cluster.in_network == "all" and cluster.network is not None and cluster.network.transport == "rdma"
    adds_inside = cluster.in_network != "none" and cluster.link.switch_sum_gb_per_s is not None
    adds = (adds_between or not leaves) and (adds_inside or group.per_node == 1)
    fitting = [name for name in cluster.algorithms if name != "hierarchical" or (leaves and group.per_node > 1)]
    return (*fitting, *(["in_network"] if adds else []))


def ring_all_reduce_s(nbytes: float, group: Group, cluster: Cluster, constants: Constants = DEFAULT) -> float:
    """Seconds of a reduce-scatter and an all-gather around a ring: 2 (n-1)/n of the bytes leave every rank."""
    n = group.num_ranks
    bandwidth = bus_bytes_per_s(group, cluster, constants)
    return 2 * ring_latency_s(group, cluster) + 2 * (n - 1) / n * nbytes / bandwidth


def tree_all_reduce_s(nbytes: float, group: Group, cluster: Cluster, constants: Constants = DEFAULT) -> float:
    """Seconds of an all-reduce up a tree and down again, in pieces: fewer hops, but all bytes are sent twice."""
    return 2 * tree_latency_s(group, cluster) + 2 * nbytes / bus_bytes_per_s(group, cluster, constants)


def hierarchical_all_reduce_s(nbytes: float, group: Group, cluster: Cluster, constants: Constants = DEFAULT) -> float:
    """Seconds of a reduce-scatter in the node, an all-reduce of the parts between nodes, and an all-gather in the
    node."""
    inside = Group(group.per_node, group.per_node, 1)
    between = Group(group.num_nodes, 1, group.num_nodes, group.num_rivals * group.per_node)
    part = nbytes / group.per_node
    twice = 0.0 if group.per_node < 2 else 2 * _ring_gather_s(nbytes, inside, cluster, constants)
    if group.num_nodes < 2:
        return twice
    ways = (ring_all_reduce_s, tree_all_reduce_s)
    return twice + min(way(part, between, cluster, constants) for way in ways)


def in_network_all_reduce_s(nbytes: float, group: Group, cluster: Cluster, constants: Constants = DEFAULT) -> float:
    """Seconds of an all-reduce by summing switches (NVLS in the node, SHARP between nodes): every rank sends its bytes
    once and receives the sums once."""
    if group.num_ranks < 2:
        return 0.0
    inside = math.inf
    if group.per_node > 1:
        adding = cluster.link.switch_sum_gb_per_s
        inside = (
            bus_bytes_per_s(Group(group.per_node, group.per_node, 1), cluster, constants)
            if adding is None
            else adding * 1e9
        )
    # the node's sum leaves it once, over all of its adapters
    bandwidth = min(inside, node_bytes_per_s(cluster, group.num_nodes, constants) / group.num_rivals)
    latency_us = constants.switch_sum_us + 2 * (network_latency_us(cluster) if group.num_nodes > 1 else 0.0)
    return latency_us * 1e-6 + nbytes / bandwidth


ALGORITHMS = {
    "ring": ring_all_reduce_s,
    "tree": tree_all_reduce_s,
    "hierarchical": hierarchical_all_reduce_s,
    "in_network": in_network_all_reduce_s,
}


def _ring_gather_s(nbytes: float, group: Group, cluster: Cluster, constants: Constants) -> float:
    n = group.num_ranks
    return ring_latency_s(group, cluster) + (n - 1) / n * nbytes / bus_bytes_per_s(group, cluster, constants)


def _measured_over_formula(nbytes: float, group: Group, cluster: Cluster, constants: Constants) -> float:
    """Ratio of measured to predicted time for the same bytes on the most similar measured group, which is also inside a
    node or also between nodes. 1 if there is none."""
    alike = [table for table in cluster.measured if (table.num_nodes > 1) == (group.num_nodes > 1)]
    if not alike:
        return 1.0
    table = min(alike, key=lambda one: abs(math.log(one.num_ranks / group.num_ranks)))
    same = Group(table.num_ranks, max(1, table.num_ranks // table.num_nodes), table.num_nodes)
    formula = min(ALGORITHMS[name](nbytes, same, cluster, constants) for name in algorithms(same, cluster))
    return table.all_reduce_s(nbytes) / formula


def send_s(nbytes: float, group: Group, cluster: Cluster, constants: Constants = DEFAULT) -> float:
    """Seconds to send `nbytes` from one pipeline stage to the next, with all ranks of a stage sending at once."""
    if group.num_ranks < 2:
        return 0.0
    latency_us = network_latency_us(cluster) if group.num_nodes > 1 else cluster.link.latency_us
    bandwidth = bus_bytes_per_s(group, cluster, constants)
    if group.num_nodes > 1 and cluster.network is not None:
        bandwidth = min(bandwidth, TRANSPORTS[cluster.network.transport].flow_gb_per_s * 1e9)
    return latency_us * 1e-6 + nbytes / bandwidth
