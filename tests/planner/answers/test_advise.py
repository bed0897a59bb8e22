"""Advice: layouts whose degrees multiply to the GPUs, dropped with a reason, ranked, and answered quickly enough to ask often."""

import itertools
import math
from dataclasses import replace

import pytest

from scaleray.config import load_config
from scaleray.config.hardware.cluster_text import parse_cluster
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.pipeline_bubble import suits
from scaleray.config.recipe.values import DataSize
from scaleray.errors import ConfigError, UsageError
from scaleray.planner.answers import advise as advising
from scaleray.planner.answers.advise import advise, best_of, predict
from scaleray.planner.answers.layouts import layouts
from scaleray.planner.answers.outlook import CurvePoint, outlook, remarks_on
from scaleray.planner.answers.plan_question import Question
from scaleray.planner.answers.written_config import config_keys, refusal
from scaleray.planner.cost.layout import Layout
from scaleray.planner.cost.memory import memory
from scaleray.planner.cost.step_time import least_step_s, step_time
from scaleray.planner.cost.uncertainty import WIDER
from scaleray.planner.models.block_counts import of_size
from scaleray.planner.models.names import find_model
from scaleray.records.study_record import Estimate

LLAMA = Question(model=find_model("llama-3-8b", sequence=4096), cluster=parse_cluster("h100:8x4"), global_batch=256)


@pytest.fixture(scope="module")
def advice():
    return advise(LLAMA)


def test_every_layout_uses_all_gpus_and_the_whole_batch():
    found = list(layouts(LLAMA))
    assert len(found) > 200 and len(set(found)) == len(found)
    assert {one.num_gpus for one in found} == {32} and {one.global_batch for one in found} == {256}


def test_what_is_dropped_does_not_fit_and_what_is_ranked_does(advice):
    gpu = LLAMA.cluster.gpu
    assert advice.num_layouts == len(advice.choices) + len(advice.rejected)
    assert all(one.memory.spare_bytes(gpu) >= 0 for one in advice.choices)
    assert all(one.missing_gib > 0 and "GiB of 79.1" in one.reason for one in advice.rejected)
    assert any(one.layout.strategy == "ddp" for one in advice.rejected), (
        "16 bytes of 8 billion parameters exceed the card"
    )


def test_the_first_choice_surely_fits_and_is_within_two_percent_of_the_fastest_that_does(advice):
    times = [one.step_time_s.value for one in advice.choices]
    assert times[0] <= 1.02 * min(one.step_time_s.value for one in advice.choices if one.fits == "fits")
    assert advice.best.fits == "fits" and times[1:] == sorted(times[1:])
    assert all(
        0 < one.mfu < 1 and one.step_time_s.low < one.step_time_s.value < one.step_time_s.high for one in advice.choices
    )


def test_llama_8b_goes_to_fsdp_and_the_curve_falls_with_the_gpus(advice):
    assert advice.best.layout.strategy == "fsdp"
    seen = outlook(advice)
    sizes = [point.num_gpus for point in seen.points]
    assert sizes == sorted(sizes) and {32, 64} <= set(sizes)
    assert 1 < seen.doubling_gain < 2.05 and "64 GPUs" in seen.doubling
    assert "useful arithmetic" in seen.limit


def test_a_model_that_fits_nowhere_says_what_would_help():
    with pytest.raises(ConfigError, match=r"nodes of 8") as caught:
        advise(replace(LLAMA, model=find_model("llama-3-405b"), cluster=parse_cluster("h100:8")))
    assert "GiB more per GPU" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"global_batch": 7}, "32 divide evenly"),
        ({"global_batch": 0}, "at least 1"),
        ({"strategies": ("magic",)}, "ddp, zero1"),
        ({"model": of_size("speech", 1e7)}, "--step-time"),
        ({"rank_by": "luck"}, "throughput"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        advise(replace(replace(LLAMA, strategies=("fsdp",)), **change))


@pytest.mark.parametrize(
    ("text", "says"),
    [("h100", None), ("h100:8x2", None), ("h100:64", None), ("h100:axb", "h100:8x16"), ("h1000:8", "nearest"), ("t4:4x2,net=fast", "network"),
     ("a10:8x2", "net=100G"), ("h100:0x2", "at least one"), ("h100:8x2,fuel=3", "net="), ("h100:8,price=cheap", "a price per GPU")],
)  # fmt: skip
def test_a_cluster_is_read_or_refused_in_one_message(text, says):
    if says is None:
        assert parse_cluster(text).num_gpus in (8, 16, 64)
        return
    with pytest.raises(UsageError, match=says):
        parse_cluster(text)


def test_assumptions_are_noted():
    assert any("network" in note for note in parse_cluster("h100:8x2").notes)
    assert parse_cluster("h100:64").num_nodes == 8


def test_what_no_published_row_is_like_has_a_wider_interval_and_says_so():
    known = predict(LLAMA, Layout(data=32, sharding="zero3", micro_batch=2, accumulation=4))
    strange = predict(replace(LLAMA, cluster=parse_cluster("b200:8x4")), known.layout)
    assert not known.doubts and any("b200" in words for words in strange.doubts)
    widths = [math.log(one.step_time_s.high / one.step_time_s.low) for one in (known, strange)]
    assert widths[1] == pytest.approx(WIDER * widths[0]) and not strange.is_trusted


def test_input_that_is_too_slow_is_the_limit(advice):
    slow = advise(replace(LLAMA, strategies=("fsdp",), input_samples_per_s=1.0))
    assert slow.best.samples_per_s == pytest.approx(4.0), "one sample a second on each of four nodes"


@pytest.mark.parametrize("strategies", [("ddp",), ("zero1",), ("fsdp",), ("hsdp",), ("tp",), ("pp",)])
def test_the_chosen_layout_is_a_config_that_train_takes(strategies):
    question = replace(
        LLAMA,
        model=find_model("gpt2"),
        strategies=strategies,
        cluster=parse_cluster("h100:4x2"),
        precision="bf16",
        global_batch=64,
    )
    layout = advise(question).best.layout
    flags = {
        f"{section}.{key}": value
        for section, values in config_keys(layout, question).items()
        for key, value in values.items()
    }
    config = load_config("jobs/digits.yaml", flags=flags, environ={})
    assert config.scale.workers == 8 and config.batch.global_size == 64
    assert config.strategy.name in ("ddp", "zero1", "fsdp", "tensor", "pipeline")


WRITABLE = {
    "interleaved pipeline of sharded replicas": (Layout(data=2, pipeline=2, accumulation=4, sharding="zero1", schedule="interleaved", chunks=2), "pipeline"),
    "plain pipeline": (Layout(data=2, pipeline=2, accumulation=4), "pipeline"),
    "zero bubble": (Layout(pipeline=4, accumulation=8, schedule="zero_bubble"), "pipeline"),
    "tensor": (Layout(data=2, tensor=4, sequence_parallel=True, checkpointing="full"), "tensor"),
    "pipeline of split layers, hybrid shards": (Layout(data=4, shard=2, tensor=2, pipeline=2, accumulation=4, sharding="zero1"), "pipeline"),
    "whole replicas of split layers": (Layout(data=2, tensor=4), "tensor"),
    "hsdp": (Layout(data=8, shard=4, sharding="zero3", checkpointing="alternate"), "fsdp"),
    "zero2": (Layout(data=8, sharding="zero2", compiled=True), "fsdp"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITABLE)
def test_what_is_written_of_a_layout_is_what_train_reads(name):
    layout, strategy = WRITABLE[name]
    keys = config_keys(layout, LLAMA)
    config = load_config(
        "jobs/digits.yaml",
        flags={f"{section}.{key}": value for section, values in keys.items() for key, value in values.items()},
        environ={},
    )
    assert (config.strategy.name, config.scale.workers, config.batch.global_size) == (
        strategy,
        layout.num_gpus,
        layout.global_batch,
    )
    assert config.degrees().model == layout.tensor * layout.pipeline
    recipe = derive(config, DataSize(num_samples=1000))
    assert (recipe.micro_batch_size, recipe.accumulation_steps) == (layout.micro_batch, layout.accumulation)
    if config.degrees().shard > 1:  # 16 bits are gathered and used, as time and memory are counted
        assert (recipe.parameter_dtype, layout.gather_bits, layout.is_mixed) == (layout.precision, 16, True)
    if layout.pipeline > 1:
        assert (config.degrees().shard > 1) == (layout.sharding != "none" and layout.data > 1)
        assert config.pipeline.stages_of_each_worker == layout.chunks
        schedule = config.pipeline.schedule
        assert suits(schedule, num_workers=layout.pipeline, num_micro_batches=layout.accumulation)
    if strategy == "fsdp":
        assert config.degrees().replicate == (layout.data // layout.shard if layout.sharding == "zero3" else 1)
        assert config.fsdp.reshard_after_forward == (layout.sharding == "zero3")


def test_tensor_pipeline_context_and_experts_are_written_where_train_has_them():
    layout = next(
        one for one in layouts(replace(LLAMA, strategies=("tp", "pp"))) if one.tensor > 1 and one.pipeline > 1
    )
    degrees = config_keys(layout, LLAMA)["parallel"]
    assert (degrees["tensor"], degrees["pipeline"]) == (layout.tensor, layout.pipeline)
    assert config_keys(replace(layout, context=2), LLAMA)["parallel"]["context"] == 2
    assert config_keys(Layout(context=4, data=2), LLAMA)["parallel"] == {"replicate": 2, "context": 4}
    of_experts = Layout(data=8, shard=4, expert=4, sharding="zero3")
    assert config_keys(of_experts, LLAMA)["parallel"] == {"replicate": 2, "shard": 4, "expert": 4}
    for refused in (replace(layout, expert=2), Layout(data=8, expert=2), replace(of_experts, expert=8)):
        assert "divides experts only over the workers of fsdp" in refusal(refused, LLAMA)
        with pytest.raises(ConfigError, match="divides experts only over the workers of fsdp"):
            config_keys(refused, LLAMA)


def test_sixteen_thousand_gpus_are_as_easy_as_sixteen():
    cluster = parse_cluster("h100:8x2048")
    question = Question(
        model=find_model("llama-3-405b"), cluster=cluster, global_batch=16384, strategies=("zero1", "tp", "pp")
    )
    best = advise(question).best
    assert best.layout.num_gpus == 16384 and memory(question.model, best.layout).spare_bytes(cluster.gpu) >= 0
    # Meta reports 38 to 43 % (The Llama 3 Herd of Models, 2024, table 4); the planner's interval holds that
    low, high = (best.mfu * best.step_time_s.value / bound for bound in (best.step_time_s.high, best.step_time_s.low))
    assert low < 0.41 < high


ALIKE = [
    LLAMA,
    replace(LLAMA, rank_by="memory"),
    replace(LLAMA, input_samples_per_s=10.0),
    replace(LLAMA, cluster=parse_cluster("h100:8x6"), global_batch=480, strategies=("ddp", "pp"), compiled=True),
    replace(LLAMA, model=find_model("mixtral-8x7b"), cluster=parse_cluster("h100:8x4"), global_batch=128),
    replace(LLAMA, model=find_model("resnet-50"), cluster=parse_cluster("v100:4x4,net=100G"), precision="fp16"),
    replace(LLAMA, model=find_model("llama-2-70b"), cluster=parse_cluster("a100-40:8x16,net=8x200G")),
]


@pytest.mark.parametrize("question", ALIKE, ids=lambda question: question.model.name)
def test_the_best_choice_alone_is_the_one_recommended_among_all_and_takes_fewer_predictions(question, monkeypatch):
    among_all = advise(question)
    asked = []
    monkeypatch.setattr(advising, "predict", lambda *given, **more: asked.append(1) or predict(*given, **more))
    assert best_of(question) == among_all.best
    if question.input_samples_per_s is None:  # else all layouts wait, and so are equally fast
        assert len(asked) < 0.75 * len(among_all.choices)


def test_nothing_is_best_where_nothing_fits():
    assert best_of(replace(LLAMA, model=find_model("llama-3-405b"), strategies=("ddp",))) is None


@pytest.mark.parametrize("question", ALIKE, ids=lambda question: question.model.name)
def test_no_step_takes_less_than_the_least_that_is_said_of_it(question):
    model, cluster = question.model, question.cluster
    shares = [least_step_s(model, one, cluster) / step_time(model, one, cluster).total_s for one in layouts(question)]
    assert 0.5 < max(shares) <= 1


def test_a_faster_layout_that_may_not_fit_is_not_recommended():
    advice = advise(
        replace(
            LLAMA,
            cluster=parse_cluster("h100:8x16"),
            model=find_model("llama-3-8b"),
            global_batch=1024,
            strategies=("fsdp", "zero1", "tp"),
        )
    )
    assert advice.best.fits == "fits" and advice.faster.fits == "may not fit"
    assert advice.faster.step_time_s.value * 1.02 < advice.best.step_time_s.value


def test_where_no_layout_surely_fits_the_fastest_is_recommended():
    advice = advise(
        replace(
            LLAMA, cluster=parse_cluster("v100:8x2"), model=find_model("llama-3-8b"), global_batch=64, precision="fp16"
        )
    )
    assert {one.fits for one in advice.choices} == {"may not fit"} and advice.faster is None


@pytest.mark.parametrize(
    ("name", "cluster", "batch"),
    [("llama-3-8b", "h100:8x16", 1024), ("gpt2-xl", "v100:8", 64), ("resnet-50", "v100:8x2", 512), ("gpt2", "a100-80:4x2", 96)],
)  # fmt: skip
def test_efficiency_is_a_share_and_what_grows_faster_than_the_gpus_has_its_reason(name, cluster, batch):
    found = parse_cluster(cluster)
    precision = "bf16" if "bf16" in found.gpu.peak_tflops else "fp16"
    seen = outlook(
        advise(
            Question(
                model=find_model(name),
                cluster=found,
                global_batch=batch,
                precision=precision,
                strategies=("ddp", "fsdp"),
            )
        )
    )
    assert seen.points and all(0 < point.efficiency <= 1 + 1e-9 for point in seen.points)
    for before, after in itertools.pairwise(seen.points):
        words = f"from {before.num_gpus} to {after.num_gpus} GPUs"
        assert any(words in remark for remark in seen.remarks) == (after.efficiency > 1.02 * before.efficiency)
    rate = seen.points[-1].choice.samples_per_s
    assert seen.points[-1].efficiency == pytest.approx(rate / seen.points[-1].num_gpus / seen.alone.samples_per_s)


def test_an_efficiency_over_one_would_be_named_with_its_cause_and_not_be_cut():
    lone, better = (
        predict(LLAMA, Layout(data=32, sharding="zero3", micro_batch=2, accumulation=4, checkpointing=kind))
        for kind in ("full", "none")
    )
    point = CurvePoint(32, better, Estimate(1.0, 1.0, 1.0), 1.25)
    (remark,) = remarks_on([point], lone)
    assert "over 100 % on 32 GPUs" in remark and "recompute fewer activations" in remark
