"""Mixtures of experts: sizes that model cards give, what a rank holds and exchanges, limits in which experts cost nothing, and plans."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaleray.cli.main import run_command
from scaleray.config.hardware.cluster_text import parse_cluster
from scaleray.errors import ConfigError
from scaleray.planner.answers.advise import advise
from scaleray.planner.answers.layouts import layouts
from scaleray.planner.answers.plan_question import Question
from scaleray.planner.answers.written_config import config_keys
from scaleray.planner.cost.compute import filled_share
from scaleray.planner.cost.experts import all_to_all_s, expert_replicas, held_params, owned_params, reduced_params
from scaleray.planner.cost.layout import Layout, group_of
from scaleray.planner.cost.memory import memory
from scaleray.planner.cost.step_time import step_time
from scaleray.planner.models.names import find_model, find_shape, usual_mixture
from scaleray.planner.models.transformers import TransformerShape, transformer

# total and active parameters in 10^9, from the models' cards and papers; active ones of gpt-oss are given without embeddings
SIZES = {
    "mixtral-8x7b": (46.7, 12.9), "mixtral-8x22b": (141, 39), "qwen3-30b-a3b": (30.5, 3.3), "qwen3-235b-a22b": (235, 22),
    "deepseek-v2": (236, 21), "deepseek-v2-lite": (15.7, 2.4), "deepseek-v3": (671, 37), "kimi-k2": (1026, 32), "gpt-oss-120b": (117, None),
    "dbrx": (132, 36), "grok-1": (314, None), "llama-4-scout": (109, 17), "llama-4-maverick": (400, 17), "olmoe-1b-7b": (6.9, 1.3), "glm-4.5-air": (106, None),
}  # fmt: skip
MIXTRAL = find_model("mixtral-8x7b", sequence=2048)
LAYER = next(block for block in MIXTRAL.blocks if block.num_experts)
CLUSTER = parse_cluster("h100:8x8")


@pytest.mark.parametrize("name", SIZES)
def test_a_mixture_has_the_parameters_that_its_card_gives(name):
    total, active = SIZES[name]
    found = find_model(name)
    assert found.num_params / 1e9 == pytest.approx(total, rel=0.015)
    # embeddings that a token only looks up are counted by some and not by others
    assert active is None or found.num_active_params / 1e9 == pytest.approx(active, rel=0.12)


def test_only_active_parameters_compute():
    # 2 a parameter and token, besides attention and the embedding, which only looks up
    attention = sum(block.attention_flops * block.count for block in MIXTRAL.blocks)
    matrices = (MIXTRAL.forward_flops - attention) / 2 / MIXTRAL.tokens_per_sample
    assert matrices == pytest.approx(MIXTRAL.num_active_params - 32000 * 4096, rel=0.001)


def test_one_expert_that_every_token_visits_is_a_dense_model():
    shape = {"layers": 4, "hidden": 1024, "heads": 8, "vocab": 1000, "sequence": 512, "ffn": 4096, "is_gated": True}
    dense, mixed = (
        transformer(TransformerShape(**shape, **more)) for more in ({}, {"experts": 1, "active_experts": 1})
    )
    router = 4 * 1024
    assert mixed.num_params == dense.num_params + router and mixed.num_active_params == mixed.num_params
    assert mixed.forward_flops == pytest.approx(dense.forward_flops + 2 * 512 * router)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([2, 4, 8, 64]),
    st.sampled_from(["zero1", "zero3"]),
)
def test_every_parameter_is_held_and_updated_somewhere_and_shards_are_equal(expert, tensor, data, sharding):
    if data * tensor % expert:
        return
    layout = Layout(
        data=data, tensor=tensor, expert=expert, sharding=sharding, shard=data if sharding == "zero3" else 1
    )
    ranks = data * tensor
    # shards of all ranks together are the block once; what is held is never less than that, and never more than the whole block
    assert owned_params(LAYER, layout) * ranks == pytest.approx(LAYER.num_params)
    assert LAYER.num_params / ranks <= held_params(LAYER, layout) * (1 + 1e-9) <= LAYER.num_params * (1 + 2e-9)
    assert reduced_params(LAYER, layout) <= held_params(LAYER, layout) * (1 + 1e-9)
    assert 1 <= expert_replicas(layout) <= ranks


def test_experts_that_are_all_apart_reduce_no_gradients():
    apart = Layout(data=8, expert=8)
    dense = LAYER.num_params - LAYER.expert_params
    assert reduced_params(LAYER, apart) == dense
    assert held_params(LAYER, apart) == pytest.approx(dense + LAYER.expert_params / 8)


def test_spreading_experts_saves_memory_and_sends_tokens():
    together, spread = (step_time(MIXTRAL, Layout(data=8, expert=expert), CLUSTER) for expert in (1, 8))
    assert together.exchange_comm_s == 0 < spread.exchange_comm_s
    assert spread.data_comm_s < together.data_comm_s
    held = [memory(MIXTRAL, Layout(data=8, expert=expert)).parameters for expert in (1, 2, 4, 8)]
    assert held == sorted(held, reverse=True)


@settings(max_examples=30, deadline=None)
@given(st.floats(1e3, 1e9), st.integers(1, 16), st.sampled_from([2, 8, 16, 64]))
def test_an_exchange_grows_with_its_bytes_and_is_not_faster_than_its_links(nbytes, copies, ranks):
    group = group_of(CLUSTER, ranks, 1, num_gpus=64)
    once = all_to_all_s(nbytes, group, CLUSTER, copies=copies)
    assert all_to_all_s(2 * nbytes, group, CLUSTER, copies=copies) > once
    inside = nbytes * (group.per_node - 1) / group.per_node
    assert once > inside / (CLUSTER.link.nominal_gb_per_s * 1e9)
    # the same bytes as copies of fewer tokens cross fewer nodes
    assert once <= all_to_all_s(nbytes, group, CLUSTER) * (1 + 1e-9)
    assert all_to_all_s(nbytes, group_of(CLUSTER, 1, 1, num_gpus=64), CLUSTER) == 0


def test_leaving_the_node_makes_an_exchange_slower():
    inside, outside = (all_to_all_s(1e8, group_of(CLUSTER, ranks, 1, num_gpus=64), CLUSTER) for ranks in (8, 16))
    assert outside > 2 * inside


def test_few_rows_for_each_expert_leave_tiles_empty():
    layout = Layout()
    assert filled_share(100, 1, layout) == 1
    assert filled_share(1280, 10, layout) == 1
    assert filled_share(640, 10, layout) == 0.5
    # with experts apart each sees the tokens of all ranks
    assert filled_share(640, 10, Layout(data=2, expert=2)) == 1


def test_sizes_alone_become_a_mixture_of_those_sizes():
    for total, active in ((671e9, 37e9), (46.7e9, 12.9e9), (30e9, 3e9)):
        found = transformer(usual_mixture(total, active, sequence=1024))
        assert (found.num_params, found.num_active_params) == (
            pytest.approx(total, rel=0.02),
            pytest.approx(active, rel=0.02),
        )


def test_a_name_with_a_task_or_date_is_found_and_one_of_another_size_is_not():
    assert find_shape("Qwen3-30B-A3B-Instruct-2507") == find_shape("qwen3-30b-a3b")
    assert find_shape("DeepSeek-V3 671B") == find_shape("deepseek-v3")
    assert find_shape("GPT-2 8B") is None and find_shape("Mixtral 8x22B") != find_shape("mixtral-8x7b")


@pytest.mark.parametrize("more", [{"experts": 4}, {"experts": 4, "active_experts": 5}, {"dense_layers": 3}])
def test_impossible_experts_are_refused(more):
    with pytest.raises(ConfigError):
        TransformerShape(layers=2, hidden=64, heads=1, vocab=8, sequence=8, **more)
    with pytest.raises(ConfigError, match="expert"):
        Layout(data=8, expert=3)


def test_a_plan_spreads_experts_where_it_is_asked_to():
    question = Question(model=MIXTRAL, cluster=CLUSTER, global_batch=512, strategies=("fsdp", "ep"))
    found = advise(question)
    assert {choice.layout.expert for choice in found.choices} == {1, 2, 4, 8}
    assert found.best.layout.expert > 1 and "ep" in found.best.layout.describe()
    assert any("experts" in words for words in found.best.doubts)
    assert config_keys(found.best.layout, found.question)["parallel"]["expert"] == found.best.layout.expert
    dense = Question(model=find_model("llama-7b"), cluster=CLUSTER, global_batch=512, strategies=("fsdp", "ep"))
    assert {layout.expert for layout in layouts(dense)} == {1}


def test_the_command_plans_a_mixture(capsys):
    code = run_command(
        ["plan", "--model", "mixtral-8x7b", "--cluster", "h100:8x8", "--strategies", "fsdp,ep", "--global-batch", "512"]
    )
    assert code == 0 and "ep8" in capsys.readouterr().out
