"""Pipelines whose replicas share out each stage: the training of one process, and a part of the memory between steps."""

from dataclasses import replace

import pytest
import torch
from small_runs import largest_difference, make_job, relative_differences, train, train_in_plain_torch
from small_transformer import SmallTransformer
from test_pipeline import ADAMW, RESUME, SCHEDULES, ChainTask, Deep, assert_same_training
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from scaleray.strategies.pipeline.pipeline_shards import Shards
from scaleray.strategies.traffic.ledger import Ledger
from scaleray.training.setup.model_setup import prepare

pytestmark = pytest.mark.combination  # a feature that few commits touch: its tests take turns

SHARDED = {"strategy.name": "pipeline", "parallel.shard": "auto"}


@pytest.mark.parametrize(
    "schedule",  # without shards each is always tested
    [s if s == "1f1b" else pytest.param(s, marks=pytest.mark.combination) for s in SCHEDULES],
)
def test_every_schedule_equals_one_process(gloo, schedule):
    recipe, workload = {**ADAMW, "batch.micro_size": 2, "optimizer.weight_decay": 0.1}, SmallTransformer(tie_head=False)
    finished = gloo.run(4, train, workload, {**recipe, **SHARDED, "pipeline.schedule": schedule})[0]
    assert_same_training(finished, train_in_plain_torch(workload, recipe))
    assert "divided among replicas" in finished.events[0]


@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(SmallTransformer(num_val=6, num_blocks=2), id="tied head"),
        pytest.param(ChainTask(), id="parameters beside the blocks", marks=pytest.mark.combination),
    ],
)
def test_parameters_of_several_stages_stay_whole_and_train_alike(gloo, workload):
    recipe = {**ADAMW, "batch.micro_size": 1, "optimizer.clip_norm": 0.3}
    finished = gloo.run(4, train, workload, {**recipe, **SHARDED})[0]
    assert_same_training(finished, train_in_plain_torch(workload, recipe))
    replicated = gloo.run(4, train, workload, {**recipe, "strategy.name": "pipeline"})[0]
    for ours, theirs in zip(finished.evaluations, replicated.evaluations, strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-9)


@pytest.mark.parametrize(
    ("num_rows", "recipe"), [(17, {"optimizer.momentum": 0.9}), (22, {"batch.micro_size": 2})], ids=["sgd", "rests"]
)
def test_sizes_that_do_not_divide_are_cut_all_the_same(gloo, num_rows, recipe):
    # three classes over two replicas; a last batch of 1 row, so that one has none, or of 6, in micro-batches of 2 and 1
    finished = gloo.run(4, train, Deep(num_rows=num_rows), {**recipe, **SHARDED})[0]
    assert_same_training(finished, train_in_plain_torch(Deep(num_rows=num_rows), recipe))


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.combination)])
def test_lower_precisions_stay_near_one_worker(gloo, dtype):
    flags, workload = {"precision.dtype": dtype, "batch.micro_size": 2}, SmallTransformer(tie_head=False)
    alone = gloo.run(1, train, workload, flags)[0]
    finished = gloo.run(4, train, workload, {**flags, **SHARDED})[0]
    assert max(relative_differences(alone.losses, finished.losses)) < (1e-2 if dtype == "bf16" else 1e-5)


def many_small_gradients(place, num):
    """The gradient of a sum over `num` micro-batches, each of which adds 1."""
    torch.manual_seed(0)
    module = nn.Linear(3, 4, bias=False)
    job, _ = make_job(Deep(), {**SHARDED, "precision.dtype": "bf16"}, world_size=4)
    mesh = init_device_mesh("cpu", (place.world_size,), mesh_dim_names=("dp",))
    shards = Shards([module], mesh["dp"], mesh.get_group(), job.config, kept_whole=set(), sent=Ledger())
    with shards.gathered():
        for _ in range(num):
            module(torch.ones(1, 3)).sum().backward()
            shards.put_by()
        shards.reduce()
    gradient = module.weight.grad.full_tensor()
    shards.close(module, keeps_shards=False)
    return gradient.dtype, gradient.unique().tolist()


def test_gradients_of_many_micro_batches_are_summed_in_the_type_that_they_are_reduced_in(gloo):
    # 256 + 1 is 256 in bf16
    assert gloo.run(2, many_small_gradients, 300) == [(torch.float32, [600.0])] * 2


def test_frozen_checkpointed_and_compiled_blocks_are_cut_too(gloo):
    flags = {
        **ADAMW,
        "batch.micro_size": 2,
        "fine_tuning.freeze": ["blocks.0"],
        "activations.checkpointing": "full",
        "compilation.what": "blocks",
        "compilation.backend": "eager",
        "stop.after": "3 steps",
    }
    workload = SmallTransformer(num_blocks=2)
    alone = gloo.run(1, train, workload, flags)[0]
    finished = gloo.run(4, train, workload, {**flags, **SHARDED})[0]
    assert max(relative_differences(alone.losses, finished.losses)) < 1e-9
    assert largest_difference(alone.weights, finished.weights) < 1e-9


class Sometimes(nn.Module):
    """A part of it is used only for rows that need it, another one never."""

    def __init__(self):
        super().__init__()
        self.linear, self.extra = nn.Linear(8, 8), nn.Linear(8, 8)
        self.idle = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = self.linear(x)
        needed = (x[:, :1] > 0.4).to(x.dtype)
        return x + needed * self.extra(x) if needed.any() else x


class SometimesTask(Deep):
    def build_model(self):
        return nn.Sequential(nn.Linear(6, 8), Sometimes(), Sometimes(), nn.Linear(8, 3))


def test_a_parameter_that_one_replica_used_has_its_gradient_and_one_that_nobody_used_has_none(gloo):
    # weight decay would change a parameter whose gradient is zero, and leaves one without any alone
    recipe = {**ADAMW, "optimizer.weight_decay": 0.5, "batch.micro_size": 1}
    finished = gloo.run(4, train, SometimesTask(), {**recipe, **SHARDED})[0]
    assert_same_training(finished, train_in_plain_torch(SometimesTask(), recipe))
    assert torch.equal(finished.weights["1.idle"], torch.ones(8, dtype=torch.float64))


def held(place, workload, flags):
    """Values of parameters that lie here between steps, and of those that are shards; then the model as it is given back."""
    job, _ = make_job(workload, {"strategy.name": "pipeline", **flags}, world_size=place.world_size)
    built, build = [], job.workload.build_model
    job.workload.build_model = lambda: built.append(build()) or built[0]
    place = replace(place, degrees=job.degrees)
    setup = prepare(job.workload, job.config, job.recipe, place)
    parameters = dict(setup.parallel.module.named_parameters())
    local = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters.values())
    shards = {name for name, p in parameters.items() if isinstance(p, DTensor)}
    setup.close()
    is_plain = all(type(p) is nn.Parameter for p in built[0].parameters())
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in built[0].modules())
    return local, shards, is_plain, hooks, {type(m).__name__ for m in built[0].modules()}


def test_a_worker_holds_its_share_of_its_stage_and_gives_a_plain_model_back(gloo):
    workload = SmallTransformer(tie_head=False)
    whole = gloo.run(4, held, workload, {})
    sharded = gloo.run(4, held, workload, {"parallel.shard": "auto"})
    for before, after in zip(whole, sharded, strict=True):
        assert after[0] == before[0] / 2 and not before[1]
        assert after[2] and after[3] == 0 and after[4] == before[4]
    tied = gloo.run(4, held, SmallTransformer(), {"parallel.shard": "auto"})
    assert all(shards and "embedding.weight" not in shards for _, shards, *_ in tied)


# interruptions


def run_part(place, workload, flags, folder, kill_at):
    return train(place, workload, flags, folder=folder, kill_at=kill_at)


def test_a_resumed_run_is_bit_identical(gloo, tmp_path):
    flags, workload = {**RESUME, **SHARDED}, SmallTransformer(num_blocks=2)
    whole = gloo.run(4, run_part, workload, flags, None, None)[0]
    gloo.run(4, run_part, workload, flags, str(tmp_path), 5)
    resumed = gloo.run(4, run_part, workload, flags, str(tmp_path), None)[0]
    assert resumed.losses == whole.losses[3:]
    assert all(torch.equal(resumed.weights[name], whole.weights[name]) for name in whole.weights)


@pytest.mark.parametrize(
    ("before", "after"),
    [("sharded x 4", "ddp x 2"), pytest.param("fsdp x 2", "sharded x 4", marks=pytest.mark.combination)],
)
def test_a_run_goes_on_under_another_strategy_and_number_of_workers(gloo, tmp_path, before, after):
    workload = SmallTransformer(tie_head=False)
    whole = gloo.run(1, run_part, workload, RESUME, None, None)[0]
    for which, kill_at in ((before, 5), (after, None)):
        strategy, _, workers = which.split()
        flags = {**RESUME, **(SHARDED if strategy == "sharded" else {"strategy.name": strategy})}
        resumed = gloo.run(int(workers), run_part, workload, flags, str(tmp_path), kill_at)[0]
    assert [s.step for s in resumed.steps] == [4, 5, 6, 7, 8]
    assert max(relative_differences(whole.losses[3:], resumed.losses)) < 1e-11
    assert largest_difference(whole.weights, resumed.weights) < 1e-9


# what is said


def test_one_replica_has_nobody_to_share_with(gloo):
    finished = gloo.run(2, train, SmallTransformer(), {**ADAMW, **SHARDED})[0]
    assert_same_training(finished, train_in_plain_torch(SmallTransformer(), ADAMW))
    assert not any("divided among replicas" in event for event in finished.events)
