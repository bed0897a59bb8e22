"""Models of transformers from a config in layouts of several workers, without code: as on one worker."""

from __future__ import annotations

import pytest
from small_models import BERT, GPT2, LLAMA, Causal, causal, masked
from small_runs import largest_difference, make_job, relative_differences, train, train_in_plain_torch

from scaleray.data import TRAIN
from scaleray.errors import ConfigError, WorkloadError
from scaleray.launch.run.train import check_layout

QWEN = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}
QWEN_MIXTURE = {
    **QWEN,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
FLAGS = {"optimizer.learning_rate": 0.01, "optimizer.clip_norm": 0.5, "stop.after": "4 steps"}
CONTEXT, TENSOR = {"parallel.context": 2}, {"parallel.tensor": 2}
LAYOUTS = {
    "context": (2, CONTEXT),
    "context in a ring": (2, {**CONTEXT, "context.exchange": "ring"}),
    "tensor": (2, TENSOR),
    "tensor, whole sequences": (2, {**TENSOR, "tensor.sequence_parallel": False}),
    "pipeline": (2, {"parallel.pipeline": 2}),
    "shard x tensor": (4, {**TENSOR, "parallel.shard": 2}),
    "pipeline x tensor": (4, {**TENSOR, "parallel.pipeline": 2, "tensor.sequence_parallel": False}),
    "expert": (2, {"parallel.shard": 2, "parallel.expert": 2}),
    "expert within shard": (4, {"parallel.shard": 4, "parallel.expert": 2}),
    "expert over context": (2, {**CONTEXT, "parallel.expert": 2}),
    "context x tensor": (4, {**TENSOR, **CONTEXT, "context.exchange": "ring"}),
}
CASES = [(model, layout) for model in (LLAMA, QWEN) for layout in LAYOUTS if "expert" not in layout]
CASES += [(MIXTRAL, layout) for layout in ("expert", "expert over context", "pipeline", "context in a ring")]
CASES += [(QWEN_MIXTURE, "expert"), (QWEN_MIXTURE, "expert within shard")]
CASES += [
    ({**LLAMA, "tie_word_embeddings": True}, "tensor"),
    ({**LLAMA, "tie_word_embeddings": True}, "pipeline x tensor"),
    (GPT2, "context"),
    (GPT2, "context in a ring"),
]
IN_TURN = [pytest.param(*case, marks=pytest.mark.combination) for case in CASES[1:]]


@pytest.mark.parametrize(
    ("model", "layout"), [CASES[0], *IN_TURN], ids=lambda x: x if isinstance(x, str) else x["model_type"]
)
def test_a_model_in_a_layout_trains_as_in_plain_torch(gloo, model, layout):
    world_size, degrees = LAYOUTS[layout]
    workload = Causal({**model, "vocab_size": 50})
    finished = gloo.run(world_size, train, workload, {**FLAGS, **degrees})[0]
    plain = train_in_plain_torch(workload, FLAGS)
    bound = 1e-9 if model is GPT2 else 1e-6  # the norms of the others compute in float32 in any model
    assert max(relative_differences(plain.losses, finished.losses)) <= bound
    assert largest_difference(plain.weights, finished.weights) <= 100 * bound


def test_no_layout_in_which_a_model_trains_is_refused_before_workers_start():
    for model, layout in CASES:
        world_size, degrees = LAYOUTS[layout]
        job, sources = make_job(Causal({**model, "vocab_size": 50}), {**FLAGS, **degrees}, world_size=world_size)
        check_layout(job, sources[TRAIN])


def test_a_masked_model_shares_sequences(gloo, texts):
    finished = gloo.run(2, train, masked(texts), {**FLAGS, **CONTEXT})[0]
    alone = gloo.run(1, train, masked(texts), FLAGS)[0]
    assert max(relative_differences(alone.losses, finished.losses)) <= 1e-9


def test_rows_of_several_documents_do_not_share_sequences(gloo, texts):
    for packing, says in (("separate", "position_ids"), ("pad", "attention_mask")):
        with pytest.raises(WorkloadError, match=rf"has rows with {says}.*(?s:.)*packing concatenate"):
            gloo.run(2, train, causal(texts, packing=packing), {**FLAGS, **CONTEXT})


@pytest.mark.parametrize(
    ("model", "flags", "error", "says"),
    [
        ({**LLAMA, "num_hidden_layers": 1}, TENSOR, ConfigError, "has no two layers of self_attn and mlp"),
        ({**LLAMA, "num_key_value_heads": 1}, TENSOR, ConfigError, "it must divide num_key_value_heads, which is 1"),
        (LLAMA, {**TENSOR, "parallel.pipeline": 2}, WorkloadError, "or use --tensor.sequence-parallel false"),
        (GPT2, TENSOR, WorkloadError, r"lacks tensor_plan\(\)"),
        (MIXTRAL, TENSOR, WorkloadError, "use parallel.shard"),
        ({**MIXTRAL, "output_router_logits": True}, {}, WorkloadError, "computes the balance loss on a worker's batch"),
    ],
)
def test_what_has_no_plan_is_refused(gloo, model, flags, error, says):
    world_size = flags.get("parallel.tensor", 2) * flags.get("parallel.pipeline", 1)
    with pytest.raises(error, match=f"(?s){says}"):
        gloo.run(world_size, train, Causal({**model, "vocab_size": 50}), {**FLAGS, **flags})


def test_a_class_of_whole_rows_does_not_share_sequences(gloo, texts):
    from scaleray.hugging_face import SequenceClassification

    workload = SequenceClassification(BERT, tokenizer="bytes", data={"train": texts}, sequence_length=24)
    with pytest.raises(WorkloadError, match=r"parallel\.context"):
        gloo.run(2, train, workload, {**FLAGS, **CONTEXT})
