"""Memory by part: against the figures that the paper of activation recomputation prints, and laws that any layout keeps."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaleray.planner.cost.layout import Layout
from scaleray.planner.cost.memory import activation_bytes, memory, micro_batches_in_flight
from scaleray.planner.cost.pipeline_stages import filled_cuts
from scaleray.planner.models.names import find_model
from scaleray.planner.models.transformers import TransformerShape, transformer
from scaleray.records.text.units import GIB


def gpt(layers, hidden, heads):
    return transformer(
        TransformerShape(
            layers=layers,
            hidden=hidden,
            heads=heads,
            vocab=51200,
            sequence=2048,
            fused_attention=False,
            has_dropout=True,
        )
    )


# Korthikanti et al. 2022, arXiv:2205.05198, figures of its first pipeline stage, in GiB
@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "micro_batch", "pipeline", "chunks", "plain", "both"),
    [
        (48, 6144, 64, 4, 1, 1, 59.25, 9.5625),
        (96, 12288, 96, 1, 8, 3, 66.84375, 12.3515625),
        (105, 20480, 128, 1, 35, 3, 114.0234375, 23.076171875),
        (128, 25600, 160, 1, 64, 1, 131.25, 26.5625),
    ],
)
def test_activations_are_those_of_the_paper(layers, hidden, heads, micro_batch, pipeline, chunks, plain, both):
    block = gpt(layers, hidden, heads).blocks[1]
    layout = Layout(
        tensor=8,
        pipeline=pipeline,
        micro_batch=micro_batch,
        accumulation=512,
        chunks=chunks,
        keeps_gathered=False,
        schedule="interleaved" if chunks > 1 else "1f1b",
    )
    held = micro_batches_in_flight(layout) * layers / pipeline
    assert held * activation_bytes(block, layout) / GIB == pytest.approx(plain, rel=1e-12)
    saving = replace(layout, sequence_parallel=True, checkpointing="selective")
    assert held * activation_bytes(block, saving) / GIB == pytest.approx(both, rel=1e-12)


def test_adam_in_mixed_precision_takes_18_bytes_a_parameter():
    # 2 weights, 4 gradients, 12 for master copy and both moments; the paper's 22B on 8 GPUs: 45.5625 GiB without embeddings
    model = gpt(48, 6144, 64)
    needed = memory(model, Layout(tensor=8, gradient_bytes=4, accumulation=2))
    states = needed.parameters + needed.gradients + needed.optimizer
    assert states / (model.num_params / 8) == pytest.approx(18.0)


def test_zero_divides_what_it_says_it_divides():
    model = find_model("llama-7b")
    whole = memory(model, Layout(data=64, gradient_bytes=4))
    one = memory(model, Layout(data=64, gradient_bytes=4, sharding="zero1"))
    # with several micro-batches, of which shards of gradients are there when the next one's loss is taken
    three = memory(model, Layout(data=64, gradient_bytes=4, sharding="zero3", shard=64, accumulation=2))
    assert one.optimizer == pytest.approx(whole.optimizer / 64)
    assert (one.parameters, one.gradients) == (whole.parameters, whole.gradients)
    # the same 16 bytes a parameter, cut in 64, in another order: 32-bit shards have no second copy
    states = three.parameters + three.gradients + three.optimizer
    assert states == pytest.approx(16 * model.num_params / 64)
    assert 0 < three.unsharded < whole.parameters


@settings(max_examples=40)
@given(
    st.sampled_from(["gpt2-xl", "llama-7b", "resnet-50"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["none", "alternate", "full"]),
    st.sampled_from(["none", "zero1", "zero3"]),
    st.sampled_from(["1f1b", "gpipe"]),
)
def test_memory_is_the_sum_of_its_parts_and_grows_with_the_micro_batch(
    name, tensor, pipeline, checkpointing, sharding, schedule
):
    model = find_model(name)
    layout = Layout(
        data=8,
        tensor=tensor,
        pipeline=pipeline,
        accumulation=8,
        checkpointing=checkpointing,
        sharding=sharding,
        schedule=schedule,
    )
    found = memory(model, layout)
    assert sum(found.parts().values()) == pytest.approx(found.device_bytes)
    assert all(value >= 0 for value in found.parts().values())
    # where the optimizer's step needs most, a larger micro-batch costs nothing at first
    assert memory(model, replace(layout, micro_batch=2)).device_bytes >= found.device_bytes
    assert memory(model, replace(layout, micro_batch=512)).device_bytes > found.device_bytes
    assert found.allocated_bytes < found.reserved_bytes < found.device_bytes


@pytest.mark.parametrize("name", ["gpt2-xl", "llama-7b"])
def test_recomputing_more_keeps_less(name):
    model = find_model(name, sequence=2048)
    sizes = [
        memory(model, Layout(micro_batch=8, checkpointing=kind)).activations for kind in ("none", "alternate", "full")
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_gpipe_holds_all_micro_batches_and_1f1b_as_many_as_there_are_stages():
    layout = Layout(pipeline=4, accumulation=16)
    assert micro_batches_in_flight(layout) == 4
    assert micro_batches_in_flight(replace(layout, schedule="gpipe")) == 16
    assert micro_batches_in_flight(replace(layout, accumulation=2)) == 2


def test_offloading_leaves_the_optimizers_state_to_the_host():
    model = find_model("llama-7b")
    assert memory(model, Layout(offloads=True)).optimizer == 0


def test_gradients_that_wait_whole_for_the_last_micro_batch_are_on_every_gpu():
    model = find_model("llama-3-8b")
    layout = Layout(data=16, shard=16, sharding="zero3", gradient_bytes=4, accumulation=2, micro_batch=4)
    cut, whole = memory(model, layout), memory(model, replace(layout, accumulates_whole=True))
    assert cut.gradients == pytest.approx(4 * model.num_params / 16)
    assert whole.gradients == pytest.approx(4 * model.num_params)
    # of a single micro-batch there is nothing to wait for
    alone = replace(layout, accumulation=1)
    assert memory(model, replace(alone, accumulates_whole=True)) == memory(model, alone)


def test_a_step_of_one_micro_batch_has_no_gradients_while_its_loss_is_taken():
    model = find_model("llama-3-8b")
    layout = Layout(data=8, shard=8, sharding="zero3", gradient_bytes=4, micro_batch=4, checkpointing="full")
    assert memory(model, layout).gradients == 0
    assert memory(model, layout).device_bytes < memory(model, replace(layout, accumulation=2)).device_bytes


def test_logits_that_are_gathered_for_the_loss_are_not_divided():
    model = find_model("llama-3-8b")
    layout = Layout(tensor=4, micro_batch=8, accumulation=2, sequence_parallel=True, checkpointing="full")
    split, gathered = memory(model, layout), memory(model, replace(layout, splits_logits=False))
    assert gathered.logits == pytest.approx(4 * split.logits, rel=0.01)


def test_memory_that_is_planned_ahead_is_what_is_allocated():
    layout = Layout(precision="fp16", micro_batch=4)
    found = memory(find_model("gpt2"), replace(layout, engine="planned"))
    assert found.fragmentation == 0 < memory(find_model("gpt2"), layout).fragmentation


@settings(max_examples=60)
@given(st.lists(st.floats(1, 3), min_size=12, max_size=40), st.integers(1, 4))
def test_filled_stages_pass_their_share_by_less_than_a_block(costs, num_stages):
    # no block is as dear as a stage
    cuts = filled_cuts(costs, num_stages)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, len(costs), num_stages + 1)
    for stage in range(1, num_stages):
        passed = sum(costs[: cuts[stage]]) - sum(costs) * stage / num_stages
        assert 0 <= passed <= costs[cuts[stage] - 1]


LLAMA_1B = transformer(
    TransformerShape(
        layers=24,
        hidden=2048,
        heads=32,
        ffn=4096,
        vocab=50257,
        sequence=4096,
        is_gated=True,
        tied_embeddings=True,
        logit_bytes=6,
    )
)
LLAMA_8B = transformer(
    TransformerShape(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        vocab=128256,
        sequence=4096,
        is_gated=True,
        logit_bytes=8,
    )
)
NANOTRON = Layout(sharding="zero1", gradient_bytes=4, sequence_parallel=True, filled_stages=True)
KEMPNER = Layout(sharding="zero3", checkpointing="full", micro_batch=4, accumulation=2, is_mixed=False, optimizer_bytes=4, gradient_bytes=4,
                 sequence_parallel=True, accumulates_whole=True, splits_logits=False)  # fmt: skip


# allocated at the peak, in GiB. nanotron/old_bench llama-1B, log_metrics.csv; KempnerForge, benchmarks/mfu_scaling/mfu_scaling.md
@pytest.mark.parametrize(
    ("model", "layout", "measured"),
    [
        (LLAMA_1B, replace(NANOTRON, pipeline=8, micro_batch=4, accumulation=256), 43.00),
        (LLAMA_1B, replace(NANOTRON, data=2, pipeline=4, micro_batch=2, accumulation=256), 21.33),
        (LLAMA_1B, replace(NANOTRON, tensor=8, micro_batch=32, accumulation=32), 58.69),
        (LLAMA_1B, replace(NANOTRON, data=4, tensor=2, micro_batch=8, accumulation=32), 42.63),
        (LLAMA_1B, replace(NANOTRON, tensor=4, pipeline=4, micro_batch=8, accumulation=128), 23.86),
        (LLAMA_8B, replace(KEMPNER, sharding="none"), 80.7),
        (LLAMA_8B, replace(KEMPNER, data=4, shard=4), 61.1),
        (LLAMA_8B, replace(KEMPNER, data=2, shard=2, tensor=2), 45.9),
        (LLAMA_8B, replace(KEMPNER, data=4, shard=4, tensor=4), 29.4),
    ],
)
def test_peaks_are_those_that_torch_reported(model, layout, measured):
    assert memory(model, layout).allocated_bytes / GIB == pytest.approx(measured, rel=0.06)
