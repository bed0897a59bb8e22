"""Collectives: against bus bandwidths and latencies that others measured, and laws of volume and size."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaleray.config.hardware.cluster_text import parse_cluster
from scaleray.config.hardware.measured_collectives import MeasuredTable
from scaleray.planner.cost.communication import (
    ALGORITHMS,
    algorithms,
    all_gather_s,
    all_reduce_s,
    bus_bytes_per_s,
    hierarchical_all_reduce_s,
    in_network_all_reduce_s,
    node_bytes_per_s,
    send_s,
)
from scaleray.planner.cost.layout import Group, group_of


def whole(cluster):
    return group_of(cluster, cluster.num_gpus, 1, num_gpus=cluster.num_gpus)


# nccl-tests' bus bandwidth of large messages: one node and several (NVIDIA, GTC 2024; ml-engineering, network)
@pytest.mark.parametrize(
    ("text", "gb_per_s"),
    [
        ("v100:16,net=100G", 122),
        ("a100-80:8", 232),
        ("h100:8", 370),
        ("a100-pcie:8", 24),
        ("a100-80:8x2,net=8x200G", 192),
        ("h100:8x2,net=8x400G", 370),
        ("h100:1x2,net=400G", 48),
        ("a100-80:1x2,net=200G", 24),
        ("h100:1x4,net=100G-tuned-tcp", 10),
    ],
)
def test_large_all_reduces_reach_the_bus_bandwidth_that_was_measured(text, gb_per_s):
    cluster = parse_cluster(text.replace("v100:16,net=100G", "v100:16x1"))
    group, nbytes = whole(cluster), 16 * 2**30
    seconds = all_reduce_s(nbytes, group, cluster)
    n = group.num_ranks
    assert 2 * (n - 1) / n * nbytes / seconds / 1e9 == pytest.approx(gb_per_s, rel=0.06)


def test_small_all_reduces_cost_latency_that_grows_with_the_ranks():
    # 8 bytes on EFA with V100, 16 and 64 ranks: 163 and 631 us (ml-engineering, network)
    for nodes, measured_us in ((2, 163.4), (8, 631.3)):
        cluster = parse_cluster(f"v100:8x{nodes},net=100G-efa")
        group = whole(cluster)
        ring_us = 2 * 1e6 * all_gather_s(8, group, cluster)
        assert ring_us == pytest.approx(measured_us, rel=0.5)


def test_no_collective_is_faster_than_the_nominal_link():
    cluster = parse_cluster("h100:8x4,net=8x400G")
    nbytes = 2**30
    assert all_reduce_s(nbytes, whole(cluster), cluster) > 2 * (31 / 32) * nbytes / 400e9


CLUSTERS = ["h100:8x16", "a100-80:8x4,net=200G", "v100:4x2,net=10G", "t4:4x4,net=50G-tcp", "mi300x:8x2"]


@settings(max_examples=40)
@given(st.sampled_from(CLUSTERS), st.floats(1, 1e10), st.floats(1.1, 4))
def test_times_grow_with_the_bytes_and_ranks(text, nbytes, factor):
    cluster = parse_cluster(text)
    group = whole(cluster)
    for operation in (all_reduce_s, all_gather_s, hierarchical_all_reduce_s, in_network_all_reduce_s, send_s):
        assert 0 < operation(nbytes, group, cluster) < operation(nbytes * factor, group, cluster)
    if cluster.num_nodes > 2:
        fewer = replace(cluster, num_nodes=cluster.num_nodes - 1)
        assert all_reduce_s(nbytes, whole(fewer), fewer) <= all_reduce_s(nbytes, group, cluster) * (1 + 1e-12)


@settings(max_examples=20)
@given(st.sampled_from(CLUSTERS), st.floats(1e6, 1e10))
def test_an_all_reduce_is_a_reduce_scatter_and_a_gather_at_most(text, nbytes):
    cluster = parse_cluster(text)
    assert all_reduce_s(nbytes, whole(cluster), cluster) <= 2 * all_gather_s(nbytes, whole(cluster), cluster) * (
        1 + 1e-12
    )


def test_one_rank_has_nothing_to_say():
    cluster = parse_cluster("h100:8")
    group = Group(1, 1, 1)
    assert {
        operation(1e9, group, cluster) for operation in (all_reduce_s, all_gather_s, send_s, in_network_all_reduce_s)
    } == {0.0}


def test_groups_that_leave_the_node_share_its_network():
    cluster = parse_cluster("h100:8x4,net=8x400G")
    alone = group_of(cluster, 32, 1, num_gpus=32)
    strided = group_of(cluster, 4, 8, num_gpus=32)
    assert (alone.num_rivals, strided.num_rivals, strided.per_node, strided.num_nodes) == (1, 8, 1, 4)
    assert bus_bytes_per_s(strided, cluster) == pytest.approx(
        bus_bytes_per_s(replace(strided, num_rivals=1), cluster) / 8
    )


def test_two_gpus_of_a_board_without_a_switch_have_a_part_of_its_links():
    four = parse_cluster("h200:4")
    pair = replace(parse_cluster("h200:2"), board_gpus=4)
    assert bus_bytes_per_s(whole(pair), pair) == pytest.approx(bus_bytes_per_s(whole(four), four) / 3)


def test_a_measured_table_is_met_and_interpolated():
    table = MeasuredTable([1e3, 1e6], [1e-5, 1e-3], 8)
    assert table.all_reduce_s(1e3) == 1e-5 and table.all_reduce_s(10) == 1e-5
    assert table.all_reduce_s(1e6) == 1e-3 and table.all_reduce_s(4e6) == 4e-3
    assert math.isclose(table.all_reduce_s(10**4.5), 1e-4)


ADDING = [
    replace(parse_cluster(text), in_network="all")
    for text in ("h100:8", "h100:8x4,net=8x400G", "h200:8x2", "h100:1x8,net=400G")
]


@settings(max_examples=40)
@given(st.sampled_from([*(parse_cluster(text) for text in CLUSTERS), *ADDING]), st.floats(1, 1e10), st.booleans())
def test_the_cheapest_algorithm_of_the_cluster_is_taken(cluster, nbytes, in_parts):
    if in_parts:
        cluster = replace(cluster, algorithms=("ring", "tree", "hierarchical"))
    group = whole(cluster)
    times = {name: ALGORITHMS[name](nbytes, group, cluster) for name in algorithms(group, cluster)}
    assert all_reduce_s(nbytes, group, cluster) == min(times.values())
    assert ("hierarchical" in times) == (in_parts and cluster.num_nodes > 1 and cluster.gpus_per_node > 1)
    assert ("in_network" in times) == (cluster.in_network == "all")


# 8 H200 with NVLS, torch 2.9, bus bandwidth in GB/s from 64 MiB on, read off ml-engineering's plot
@pytest.mark.parametrize(
    ("mib", "gb_per_s"), [(64, 348.9), (128, 402.7), (256, 428.5), (512, 452.4), (1024, 463.0), (16384, 482.2)]
)
def test_switches_that_add_reach_what_was_measured_on_h200(mib, gb_per_s):
    cluster = replace(parse_cluster("h200:8"), in_network="node")
    seconds = all_reduce_s(mib * 2**20, whole(cluster), cluster)
    assert 2 * 7 / 8 * mib * 2**20 / seconds / 1e9 == pytest.approx(gb_per_s, rel=0.08)


def test_nodes_joined_by_adding_switches_reach_what_nvidia_reports():
    # DGX H100, 8 x 400 Gb/s with SHARP: 480 GB/s of bus bandwidth (NVIDIA, GTC 2024)
    cluster = replace(parse_cluster("h100:8x8,net=8x400G"), in_network="all")
    seconds = all_reduce_s(16 * 2**30, whole(cluster), cluster)
    assert 2 * 63 / 64 * 16 * 2**30 / seconds / 1e9 == pytest.approx(480, rel=0.15)


@pytest.mark.parametrize(
    ("text", "in_network"), [("h100:8x2", "node"), ("a100-80:8", "all"), ("t4:1x8,net=10G-tcp", "all")]
)
def test_switches_that_cannot_add_are_not_counted_on(text, in_network):
    cluster = replace(parse_cluster(text), in_network=in_network)
    assert "in_network" not in algorithms(whole(cluster), cluster)


@settings(max_examples=30)
@given(st.integers(1, 8), st.sampled_from([1, 2, 4, 8]), st.floats(1e9, 1e11))
def test_all_adapters_of_a_node_carry_its_bytes_and_no_more(adapters, strided, nbytes):
    # whatever the groups: together they send what one group of the node's GPUs would, over the same adapters
    cluster = parse_cluster(f"h100:8x4,net={adapters}x100G")
    assert node_bytes_per_s(cluster, 4) == pytest.approx(
        adapters * node_bytes_per_s(parse_cluster("h100:8x4,net=100G"), 4)
    )
    group = group_of(cluster, 32 // strided, strided, num_gpus=32)
    rates = bus_bytes_per_s(group, cluster) * group.num_rivals
    assert group.num_rivals * group.per_node == 8 and rates <= node_bytes_per_s(cluster, 4) * (1 + 1e-12)
    n = group.num_ranks
    leaving = (
        group.num_rivals * 2 * (n - 1) / n * nbytes
    )  # of each node, on the edge of every rival's ring that leaves it
    assert all_reduce_s(nbytes, group, cluster) >= leaving / node_bytes_per_s(cluster, 4)


@settings(max_examples=30)
@given(st.sampled_from(CLUSTERS), st.floats(1, 1e10), st.floats(0.3, 3))
def test_a_measured_table_takes_the_place_of_the_formula_and_corrects_it_elsewhere(text, nbytes, factor):
    cluster = parse_cluster(text)
    group, sizes = whole(cluster), [10.0**power for power in range(11)]
    slower = MeasuredTable(
        tuple(sizes),
        tuple(factor * all_reduce_s(size, group, cluster) for size in sizes),
        group.num_ranks,
        group.num_nodes,
    )
    known = replace(cluster, measured=(slower,))
    assert all_reduce_s(nbytes, group, known) == slower.all_reduce_s(nbytes)
    size = sizes[-1]
    assert all_gather_s(size, group, known) == pytest.approx(factor * all_gather_s(size, group, cluster))
    half = replace(group, num_ranks=group.num_ranks // 2, num_nodes=group.num_nodes // 2, num_rivals=group.num_rivals)
    if half.num_nodes > 1:
        assert all_reduce_s(size, half, known) == pytest.approx(factor * all_reduce_s(size, half, cluster))
    inside = Group(group.per_node, group.per_node, 1)
    assert all_reduce_s(size, inside, known) == all_reduce_s(size, inside, cluster), "another kind of link"
