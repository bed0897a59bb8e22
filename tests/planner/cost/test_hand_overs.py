"""What stages of a pipeline cost each other: only boundaries between nodes use the network, and the dearest decides."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaleray.config.hardware.cluster_text import parse_cluster
from scaleray.planner.cost.constants import DEFAULT
from scaleray.planner.cost.layout import Layout
from scaleray.planner.cost.step_time import hand_overs_s, idle_micro_batches, step_time
from scaleray.planner.models.names import find_model

LLAMA = find_model("llama-7b", sequence=2048)
NODES = parse_cluster("h100:8x4,net=400G-efa")


def test_only_the_boundary_between_two_nodes_uses_the_network():
    sixteen = hand_overs_s(LLAMA, Layout(pipeline=16), NODES, DEFAULT)
    assert len(sixteen) == 15
    assert [index for index, value in enumerate(sixteen) if value > 1.01 * min(sixteen)] == [7]
    # two replicas side by side put four stages on a node
    assert [
        value > 1.01 * min(sixteen) for value in hand_overs_s(LLAMA, Layout(pipeline=8, data=2), NODES, DEFAULT)
    ] == [False, False, False, True, False, False, False]
    assert hand_overs_s(LLAMA, Layout(), NODES, DEFAULT) == []


def test_a_flow_between_nodes_has_one_adapters_speed_whatever_the_node_has():
    # nanotron, llama-1B, two nodes of p5, tensor 4 x pipeline 4: 269 ms a micro-batch of 16 sequences, of which compute 160
    layout = Layout(tensor=4, pipeline=4, micro_batch=16, sequence_parallel=True)
    dearest = max(hand_overs_s(LLAMA, layout, NODES, DEFAULT))
    nbytes = 2 * 2048 * 4096 * 16 / 4
    assert dearest == pytest.approx(2 * nbytes / 1.25e9, rel=0.1)


@settings(max_examples=30)
@given(
    st.sampled_from([2, 4, 8, 16]), st.sampled_from([1, 2]), st.sampled_from([1, 4]), st.sampled_from(["10G", "8x400G"])
)
def test_a_step_is_never_shorter_than_its_hand_overs_and_a_faster_network_never_makes_it_longer(
    pipeline, data, micro_batch, net
):
    layout = Layout(pipeline=pipeline, data=data, micro_batch=micro_batch, accumulation=16)
    cluster = parse_cluster(f"h100:8x4,net={net}")
    found = step_time(LLAMA, layout, cluster)
    waits = hand_overs_s(LLAMA, layout, cluster, DEFAULT)
    assert 16 * max(waits) < found.total_s
    assert 0 <= found.pipeline_comm_s <= 16 * max(waits) + sum(waits) + 1e-12
    assert step_time(LLAMA, layout, parse_cluster("h100:8x4,net=8x800G")).total_s <= found.total_s * (1 + 1e-12)


def test_interleaving_divides_the_bubble_and_hides_most_of_the_hand_overs():
    plain = Layout(pipeline=8)
    parts = replace(plain, schedule="interleaved", chunks=2)
    assert idle_micro_batches(plain) == 2 * idle_micro_batches(parts) == 7
    assert sum(hand_overs_s(LLAMA, parts, NODES, DEFAULT)) == pytest.approx(
        0.6 * sum(hand_overs_s(LLAMA, plain, NODES, DEFAULT))
    )
