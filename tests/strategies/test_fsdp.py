"""What is FSDP's own: every option trains as one process does, and the model before and after."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from deep_net import Deep, Net
from small_runs import (
    Classify,
    WithBatchNorm,
    largest_difference,
    make_job,
    relative_differences,
    same_generators,
    train,
    train_alone,
    train_in_plain_torch,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from verified import judge

from scaleray.data import RankBatch
from scaleray.errors import ConfigError, InitialisationError, WorkloadError
from scaleray.records.text.units import GIB
from scaleray.strategies import fsdp
from scaleray.training.setup.model_setup import prepare
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.step.step import TrainStep

FSDP = {"strategy.name": "fsdp"}
STEPS = 4  # of 8 rows; the last has the 2 that are left of 26


OPTIONS = {
    "as it is": {},
    "ZeRO-2": {"fsdp.reshard_after_forward": False},
    "no prefetch": {"fsdp.prefetch": 0},
    "far prefetch": {"fsdp.prefetch": 3},
    "by size": {"fsdp.wrap": "size", "fsdp.wrap_min_parameters": 50},
    "by class": {"fsdp.wrap": "class", "fsdp.wrap_classes": ["Linear", "Block"]},
    "bounded": {"fsdp.prefetch": 3, "fsdp.max_unsharded_gib": 400 * 8 / GIB},
    "sharded accumulation": {"fsdp.accumulate": "sharded"},
    "unused as zero": {"fsdp.reduce_unused": True},
    "built in pages": {"fsdp.build_gib": 1e-9},
    "HSDP": {"parallel.replicate": 2},
    "HSDP, sharded accumulation": {"parallel.replicate": 2, "fsdp.accumulate": "sharded"},
}
CLIPPED = {"optimizer.name": "adamw", "optimizer.learning_rate": 0.01, "optimizer.clip_norm": 0.3}


OFTEN = {"by class", "bounded"}  # the others in turn: each has a test of its own
ON_FOUR = {"as it is", "ZeRO-2", "by size", "built in pages", "HSDP", "HSDP, sharded accumulation"}


@pytest.mark.always("bounded")
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        pytest.param(*case, id=name, marks=[] if name in OFTEN else pytest.mark.combination)
        for name, case in {**{n: (4 if n in ON_FOUR else 2, o) for n, o in OPTIONS.items()}, "on two": (2, {})}.items()
    ],
)
def test_every_option_is_verified_with_accumulation_and_clipping(gloo, world_size, options):
    outcome = gloo.run(world_size, judge, Deep(), {**FSDP, **CLIPPED, **options}, 2, STEPS)[0]
    assert outcome.verdict == "equal" and outcome.words == "", outcome
    assert outcome.comparison.largest < 1e-12
    assert outcome.own.largest < 1e-3


def test_ranks_with_unequal_numbers_of_rows_run_equally_many_passes(gloo):
    """The last step has 5 rows: 3 and 2, in micro-batches of one."""
    flags = {"batch.micro_size": 1}
    finished = gloo.run(2, train, Deep(num_rows=29), {**FSDP, **flags})[0]
    plain = train_in_plain_torch(Deep(num_rows=29), flags)
    assert max(relative_differences(plain.losses, finished.losses)) < 1e-12
    assert largest_difference(plain.weights, finished.weights) < 1e-12


# precision


class SeesTypes(Deep):
    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        self.seen = (model(batch["tokens"][:, :-1]).dtype, total.dtype)
        return total, count


def types_and_losses(place, flags):
    workload = SeesTypes(num_rows=40)
    finished = train(place, workload, {**FSDP, **flags})
    return workload.seen, finished.losses, {value.dtype for value in finished.weights.values()}


@pytest.mark.combination
@pytest.mark.parametrize(("dtype", "used"), [("fp32", "bf16"), ("bf16", None), ("bf16", "fp32"), ("fp16", None)])
@pytest.mark.parametrize("reduce", [None, "bf16"])
def test_parameters_used_in_16_bits_train_near_fp32_and_the_loss_sees_fp32(gloo, dtype, used, reduce):
    flags = {"precision.dtype": dtype, "fsdp.parameter_dtype": used, "fsdp.reduce_dtype": reduce}
    flags["precision.initial_loss_scale"] = 256
    seen, losses, dtypes = gloo.run(2, types_and_losses, flags)[0]
    exact = train_alone(Deep(num_rows=40), {"precision.dtype": "fp32"}).losses
    assert seen == (torch.float32, torch.float32) and dtypes == {torch.float32}
    assert losses != exact and losses == pytest.approx(exact, rel=0.03)  # bf16 keeps 8 bits of a number


TENSOR, PIPELINE = {"strategy.name": "tensor"}, {"strategy.name": "pipeline"}


@pytest.mark.parametrize(("flags", "expected"), [
    ({"precision.dtype": "bf16", **FSDP}, "bf16"), ({"precision.dtype": "fp16", **FSDP}, "fp16"), ({"precision.dtype": "fp32", **FSDP}, None),
    ({"precision.dtype": "fp64", **FSDP}, None), ({"precision.dtype": "bf16", "fsdp.parameter_dtype": "fp32", **FSDP}, "fp32"),
    ({"precision.dtype": "bf16", **TENSOR}, "bf16"), ({"precision.dtype": "bf16", **TENSOR, "parallel.tensor": 4}, None),
    ({"precision.dtype": "bf16", **PIPELINE, "parallel.shard": "auto"}, "bf16"), ({"precision.dtype": "bf16", **PIPELINE}, None),
    ({"precision.dtype": "bf16", "strategy.name": "zero1"}, None),
])  # fmt: skip
def test_the_record_says_in_which_type_parameters_are_gathered(flags, expected):
    job, _ = make_job(Deep(), flags, world_size=4)
    assert job.recipe.values()["parameter_dtype"] == expected


def statistics(place, flags):
    finished = train(place, WithBatchNorm(num_rows=48, num_val=8), {**flags, "batch.drop_last": True})
    return finished.losses, finished.weights


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [(2, FSDP), (2, {**FSDP, "fsdp.wrap": "class", "fsdp.wrap_classes": ["BatchNorm1d", "Linear"]}), (4, TENSOR),
     (4, {**PIPELINE, "parallel.shard": "auto"})],
)  # fmt: skip
def test_running_statistics_and_their_layers_keep_their_type_when_others_are_gathered_in_16_bits(
    gloo, world_size, strategy, dtype
):
    flags = {"precision.dtype": dtype, "precision.initial_loss_scale": 256, "tensor.sequence_parallel": False}
    losses, weights = gloo.run(world_size, statistics, {**flags, **strategy})[0]
    plain, theirs = gloo.run(2, statistics, {**flags, "strategy.name": "ddp"})[0]  # two replicas in all of them
    assert losses == pytest.approx(plain, rel=0.02)  # bf16 keeps 8 bits of a number
    assert {n: v.dtype for n, v in weights.items()} == {n: v.dtype for n, v in theirs.items()}
    torch.testing.assert_close(weights["1.running_mean"], theirs["1.running_mean"], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("key", ["fsdp.parameter_dtype", "fsdp.reduce_dtype"])
def test_types_that_do_not_go_with_the_precision_are_refused(key):
    with pytest.raises(ConfigError, match="loss scaling"):
        make_job(Deep(), {**FSDP, "precision.dtype": "bf16", key: "fp16"}, world_size=2)
    with pytest.raises(ConfigError, match="float64"):
        make_job(Deep(), {**FSDP, key: "bf16"}, world_size=2)
    make_job(Deep(), {**FSDP, "precision.dtype": "fp16", key: "fp16"}, world_size=2)


@pytest.mark.parametrize(("flags", "workers", "says"), [
    ({"parallel.replicate": 3}, 4, "scale.workers is 4, and must be a multiple of their product, 3"), ({"parallel.replicate": 4}, 4, "would each hold the whole state"),
    ({"fsdp.cpu_offload": True}, 2, "no GPU"), ({"parallel.replicate": 2, "scale.workers": {"min": 2, "max": 4}}, None, "replicate 2 x shard 2 the number is fixed"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_before_anything_starts(flags, workers, says):
    with pytest.raises(ConfigError, match=says):
        make_job(Deep(), {**FSDP, "scale.workers": workers, **flags}, world_size=workers or 4)


def test_classes_without_wrap_class_are_refused():
    with pytest.raises(ConfigError, match="belong together"):
        make_job(Deep(), {**FSDP, "fsdp.wrap_classes": ["Block"]}, world_size=2)


# norms


def norms(place):
    torch.manual_seed(0)
    whole = [torch.randn(n, 3, dtype=torch.float64) for n in (1, 5, 8)]
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    spread = [
        distribute_tensor(whole[0], line, [Shard(0)]),
        distribute_tensor(whole[1], square, [Replicate(), Shard(0)]),
        distribute_tensor(whole[2], square, [Shard(0), Shard(1)]),
    ]
    plain = torch.randn(4, dtype=torch.float64)
    huge = distribute_tensor(torch.full((4, 2), 1e30), line, [Shard(0)])
    return (
        fsdp.total_norm([*spread, plain]).item(),
        torch.nn.utils.get_total_norm([*whole, plain]).item(),
        fsdp.total_norm([huge]).item(),
        fsdp.total_norm([]).item(),
    )


def test_the_norm_of_whole_and_sharded_gradients_on_several_meshes_is_that_of_the_whole(gloo):
    results = gloo.run(4, norms)
    assert len(set(results)) == 1  # to the bit, or ranks would clip by different factors
    ours, plain, huge, none = results[0]
    assert ours == pytest.approx(plain, rel=1e-14) and huge == pytest.approx(1e30 * math.sqrt(8)) and none == 0


# the model before


class EachItsOwn(Deep):
    def build_model(self):
        model = super().build_model()
        with torch.no_grad():
            model.blocks[2].up.weight[3, 1] += dist.get_rank() == 1
        return model


@pytest.mark.parametrize("flags", [{}, {"fsdp.build_gib": 1e-9}])
def test_ranks_that_built_different_parameters_are_found_before_they_are_sharded(gloo, flags):
    with pytest.raises(InitialisationError, match=r"blocks\.2\.up\.weight differs between rank 0 and rank 1"):
        gloo.run(2, train, EachItsOwn(), {**FSDP, **flags})


class Scalar(Classify):
    def build_model(self):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.factor = nn.Linear(6, 3), nn.Parameter(torch.tensor(1.0))

            def forward(self, x):
                return self.layer(x) * self.factor

        return Scaled()


class Mixed(Classify):
    def build_model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3).bfloat16())


@pytest.mark.parametrize(("workload", "says"), [(Scalar, "factor"), (Mixed, "several types")])
def test_a_model_that_cannot_be_sharded_is_refused_with_the_reason(gloo, workload, says):
    with pytest.raises(WorkloadError, match=says):
        gloo.run(2, train, workload(), {**FSDP, "precision.dtype": "fp32"})


class DataDecides(Deep):
    """A rank uses the feed-forward layer of the first block only if its rows say so."""

    def build_model(self):
        model = super().build_model()
        block = model.blocks[0]
        original = block.forward
        block.forward = lambda x, scale: original(x, scale) if self.uses else block.norm(x)
        return model

    def loss(self, model, batch):
        self.uses = bool((batch["tokens"][:, 0] % 2 == 0).any())
        return super().loss(model, batch)


class InPlain(DataDecides):
    """One row after another, as each of two ranks has one."""

    def loss(self, model, batch):
        parts = [super(InPlain, self).loss(model, {n: v[i : i + 1] for n, v in batch.items()}) for i in range(2)]
        return sum(total for total, _ in parts), sum(count for _, count in parts)


@pytest.mark.combination
def test_a_path_that_only_some_ranks_take_is_trained_with_reduce_unused(gloo):
    # without momentum, which a gradient of zero keeps going and none does not: some steps take the path on no rank
    flags = {"batch.global_size": 2, "batch.micro_size": 1, "optimizer.momentum": 0.0}
    plain = train_in_plain_torch(InPlain(num_rows=12), flags)
    finished = gloo.run(2, train, DataDecides(num_rows=12), {**FSDP, **flags, "fsdp.reduce_unused": True})[0]
    assert max(relative_differences(plain.losses, finished.losses)) < 1e-12


# buffers, and the model after


def buffers_after_steps(place):
    job, sources = make_job(WithBatchNorm(num_rows=24), FSDP, world_size=place.world_size)
    with same_generators():
        setup = prepare(job.workload, job.config, job.recipe, place)
    step = TrainStep(job.workload, setup, job.config, job.recipe, place, gives_tuples=False)
    rows = sources["train"].read(job.train_plan().rank_indices(0, place.rank, place.world_size))
    step(RankBatch(0, rows, len(rows["y"])), num_rows=8, want_norm=False)
    found = {name: value.clone() for name, value in setup.parallel.module.named_buffers()}
    setup.parallel.close()
    return found, rows["x"]


def test_buffers_follow_rank_0_after_every_step(gloo):
    (first, x), (second, _) = gloo.run(2, buffers_after_steps)
    assert all(torch.equal(first[name], second[name]) for name in first)
    with same_generators():
        job, _ = make_job(WithBatchNorm(), {})
        model = prepare(job.workload, job.config, job.recipe, RankContext()).parallel.module
    model(torch.from_numpy(x).double())
    assert torch.allclose(first["1.running_mean"], dict(model.named_buffers())["1.running_mean"], rtol=1e-12)


def trained_then_closed(place, flags):
    job, sources = make_job(Deep(num_rows=8), {**FSDP, **flags}, world_size=place.world_size)
    with same_generators():
        setup = prepare(job.workload, job.config, job.recipe, place)
    step = TrainStep(job.workload, setup, job.config, job.recipe, place, gives_tuples=False)
    rows = sources["train"].read(job.train_plan().rank_indices(0, place.rank, place.world_size))
    step(RankBatch(0, rows, len(rows["tokens"])), num_rows=8, want_norm=False)
    weights = setup.parallel.weights().tensors
    model = setup.parallel.module
    setup.parallel.close()
    hooks = [
        h
        for m in model.modules()
        for h in (m._forward_hooks, m._forward_pre_hooks, m._state_dict_pre_hooks, m._load_state_dict_pre_hooks)
    ]
    has_hooks, names = any(hooks), {type(m).__name__ for m in model.modules()}
    marks = [key for m in model.modules() for key in vars(m) if "fsdp" in key or "compos" in key]
    sharded = {isinstance(p, DTensor) for p in model.parameters()}
    is_tied = model.head.weight is model.embedding.weight
    same = sharded == {True} or all(torch.equal(model.state_dict()[n], v) for n, v in weights.items())
    again = sharded == {True} or isinstance(fully_shard(model), FSDPModule)
    return has_hooks, names, marks, sharded, is_tied, same, again


@pytest.mark.parametrize(("flags", "is_sharded"), [({}, False), ({"fsdp.build_gib": 1.0}, True)])
def test_after_close_the_model_is_the_users_again(gloo, flags, is_sharded):
    """Whole as it came, tied and ready to be sharded again; or still in shards, where it may be too large to be whole."""
    for hooks, names, marks, sharded, is_tied, same, again in gloo.run(2, trained_then_closed, flags):
        assert not hooks and marks == [] and is_tied and same and again
        assert names == {"Net", "Embedding", "ModuleList", "Block", "LayerNorm", "Linear"}
        assert sharded == {is_sharded}


def test_closing_twice_and_closing_a_plain_model_do_nothing():
    model = Net(11)
    before = dict(model.named_parameters())
    fsdp.unshard_for_good(model, keeps_shards=False)
    assert all(p is before[n] for n, p in model.named_parameters())


# weights of another run

RUN = {"checkpoint.every": "3 steps", **CLIPPED, "stop.after": "10 steps"}


def run_in(place, flags, folder, kill_at):
    return train(place, Deep(), flags, folder=folder, kill_at=kill_at)


@pytest.mark.combination
def test_training_starts_from_the_weights_of_another_run(gloo, tmp_path):
    first = gloo.run(2, run_in, {**RUN, **FSDP, "stop.after": "3 steps"}, str(tmp_path), None)[0]
    flags = {"workload.weights": str(tmp_path), "optimizer.learning_rate": 1e-300, "stop.after": "1 steps", "seed": 5}
    for options in ({}, {"fsdp.build_gib": 1e-9}):
        started = gloo.run(4, run_in, {**flags, **FSDP, **options}, None, None)[0]
        assert largest_difference(first.weights, started.weights) < 1e-12
        assert {n: v.dtype for n, v in started.weights.items()} == {n: v.dtype for n, v in first.weights.items()}
