"""Context parallelism: what its ranks show each other, and where attention hides it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaleray.config.hardware.cluster_text import parse_cluster
from scaleray.planner.cost.block_pass import key_value_exchange_s
from scaleray.planner.cost.layout import Layout
from scaleray.planner.cost.step_time import step_time
from scaleray.planner.models.names import find_model

CLUSTER = parse_cluster("h100:8x2,net=100G")
MODEL = find_model("llama-3-8b", sequence=32768)
LAYER = MODEL.blocks[1]


def test_keys_and_values_have_the_bytes_of_their_heads():
    # 8 heads of 128 for keys and as many for values, in 16 bit
    assert LAYER.kv_bytes == 2 * 8 * 128 * 2 * 32768
    everywhere = find_model("llama-7b", sequence=32768).blocks[1]
    assert everywhere.kv_bytes == 4 * LAYER.kv_bytes


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([2, 4, 8, 16]), st.floats(0.0, 0.1))
def test_the_exchange_is_bounded_by_the_ring_and_shrinks_with_attention(context, attention_s):
    layout = Layout(context=context)
    alone = key_value_exchange_s(LAYER, layout, CLUSTER, 0.0)
    beside = key_value_exchange_s(LAYER, layout, CLUSTER, attention_s)
    assert 0 < beside <= alone * (1 + 1e-9)
    assert alone >= LAYER.kv_bytes * (context - 1) / context / (CLUSTER.link.nominal_gb_per_s * 1e9)


def test_without_context_parallelism_nothing_is_exchanged():
    assert key_value_exchange_s(LAYER, Layout(tensor=2), CLUSTER, 0.0) == 0
    assert step_time(MODEL, Layout(), CLUSTER).exchange_comm_s == 0


def test_tensor_parallel_ranks_share_out_the_heads():
    # no latency to speak of at these sizes
    node = parse_cluster("h100:8x1")
    whole, cut = (key_value_exchange_s(LAYER, Layout(context=2, tensor=tensor), node, 0.0) for tensor in (1, 4))
    assert cut == pytest.approx(whole / 4, rel=0.1)


def test_short_sequences_wait_for_keys_and_values_and_long_ones_hide_them():
    def share(sequence):
        model = find_model("llama-3-8b", sequence=sequence)
        found = step_time(model, Layout(context=16), replace(CLUSTER))
        return found.exchange_comm_s / found.total_s

    assert share(8192) > share(131072) > 0


def test_parts_of_a_step_add_up_with_the_exchange_among_them():
    found = step_time(MODEL, Layout(context=8), CLUSTER)
    assert sum(found.parts().values()) == pytest.approx(found.total_s)
    assert found.parts()["exchange comm"] == found.exchange_comm_s > 0
