"""Local SGD and DiLoCo whose replicas are spread over several workers each, against replicas one after the other."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plain_replicas import simulated
from planted_edits import Planted, spoiled
from planted_in_gradients import rows as samples
from planted_mistakes import judge
from small_runs import (
    Classify,
    Stepper,
    Tokens,
    WithBatchNorm,
    largest_difference,
    make_job,
    relative_differences,
    rows,
    train,
)
from small_transformer import SmallTransformer
from torch import nn

from scaleray.common.metric_names import CONSENSUS_DISTANCE
from scaleray.errors import ConfigError
from scaleray.strategies.contract.parallel import full, known

pytestmark = pytest.mark.combination  # a feature that few commits touch: its tests take turns

LOCAL = {
    "strategy.name": "local_sgd",
    "local_sgd.sync_every": 3,
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 0.01,
    "optimizer.weight_decay": 0.1,
    "optimizer.clip_norm": 0.3,
    "batch.micro_size": 1,
    "stop.after": "11 steps",
}
DILOCO = {**LOCAL, "strategy.name": "diloco", "local_sgd.outer_momentum": 0.8}
SHARDS = {"parallel.replicate": 2, "parallel.shard": 2}
LAYERS = {"parallel.replicate": 2, "parallel.tensor": 2}
STAGES = {"parallel.replicate": 2, "parallel.pipeline": 2}


def assert_same(finished: Any, expected: dict[str, Any]) -> None:
    assert max(relative_differences(expected["losses"], finished.losses)) <= 1e-9
    assert max(relative_differences(expected["norms"], finished.grad_norms)) <= 1e-9
    assert largest_difference(expected["weights"], finished.weights) <= 1e-9


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("workload", [Classify(num_rows=29), Tokens()], ids=["samples", "tokens"])
@pytest.mark.parametrize("flags", [LOCAL, DILOCO], ids=["local_sgd", "diloco"])
def test_sharded_replicas_train_as_whole_ones_would(gloo, flags, workload, warmup):
    flags = {**flags, **SHARDS, "local_sgd.warmup_steps": warmup}
    assert_same(gloo.run(4, train, workload, flags)[0], simulated(workload, flags))


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize(
    "workload", [Classify(num_rows=29), Tokens(), SmallTransformer()], ids=["", "tokens", "blocks"]
)
@pytest.mark.parametrize("flags", [LOCAL, DILOCO], ids=["local_sgd", "diloco"])
def test_replicas_in_split_layers_train_as_whole_ones_would(gloo, flags, workload, warmup):
    flags = {**flags, **LAYERS, "local_sgd.warmup_steps": warmup, "batch.micro_size": 2}
    assert_same(gloo.run(4, train, workload, flags)[0], simulated(workload, flags, workers=2))


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize(
    "workload",
    [SmallTransformer(), SmallTransformer(tie_head=False), SmallTransformer(num_rows=29)],
    ids=["tied", "untied", "more rows"],
)
@pytest.mark.parametrize("flags", [LOCAL, DILOCO], ids=["local_sgd", "diloco"])
def test_replicas_in_stages_train_as_whole_ones_would(gloo, flags, workload, warmup):
    flags = {**flags, **STAGES, "local_sgd.warmup_steps": warmup}
    assert_same(gloo.run(4, train, workload, flags)[0], simulated(workload, flags, workers=2))


@pytest.mark.parametrize(
    "fsdp",
    [
        {"fsdp.wrap": "size", "fsdp.wrap_min_parameters": 20},
        {"fsdp.accumulate": "whole"},
        {"fsdp.build_gib": 1e-9, "fsdp.prefetch": 2},
    ],
    ids=["units", "accumulation", "build"],
)
def test_replicas_are_sharded_as_the_settings_of_fsdp_say(gloo, fsdp):
    flags = {**DILOCO, **SHARDS, **fsdp}
    finished = gloo.run(4, train, Classify(), flags)[0]
    assert_same(finished, simulated(Classify(), flags))
    assert not any("no effect" in event for event in finished.events)


@pytest.mark.parametrize("degrees", [SHARDS, LAYERS, STAGES], ids=["shards", "layers", "stages"])
@pytest.mark.parametrize("flags", [LOCAL, DILOCO], ids=["local_sgd", "diloco"])
def test_an_evaluation_is_of_the_mean_and_changes_nothing(gloo, flags, degrees):
    flags = {**flags, **degrees, "optimizer.clip_norm": None, "batch.micro_size": 2}
    workload = WithBatchNorm(num_rows=32, num_val=13)
    plain = gloo.run(4, train, workload, {**flags, "evaluation.every": "100 steps"})[0]
    finished = gloo.run(4, train, workload, {**flags, "evaluation.every": "2 steps"})[0]
    assert finished.losses[2::3] == plain.losses[2::3]  # where all workers meet
    assert all(torch.equal(finished.weights[name], plain.weights[name]) for name in plain.weights)
    model = workload.build_model().double()
    model.load_state_dict(finished.weights)
    model.eval()
    batch = {name: torch.from_numpy(values) for name, values in rows(13, seed=1).items()}
    with torch.no_grad():
        loss, count = workload.loss(model, {**batch, "x": batch["x"].double()})
    assert finished.evaluations[-1].metrics["val/loss"] == pytest.approx(float(loss) / count, rel=1e-12)


def replicas_before_they_meet(place, flags):
    """(this rank's replica, the reported distance, the user's model after the end) around the third step."""
    built = []

    class Watched(Classify):
        def build_model(self):
            built.append(super().build_model())
            return built[0]

    stepper = Stepper(place, Watched(), flags)
    before = []
    stepper.setup.optimizer.register_step_post_hook(
        lambda *_: before.append({n: full(p.detach()).clone() for n, p in stepper.parallel.module.named_parameters()})
    )
    for number in (1, 2, 3, 4):
        stepper(number)
    distance = known(stepper.parallel.metrics())[CONSENSUS_DISTANCE.name]
    stepper.setup.close()
    return before[2], distance, before[3], {n: p.detach().clone() for n, p in built[0].named_parameters()}


@pytest.mark.parametrize(
    ("degrees", "members"), [(SHARDS, ([0, 1], [2, 3])), (LAYERS, ([0, 1], [2, 3])), (STAGES, ([0, 2], [1, 3]))]
)
def test_the_distance_is_that_of_whole_replicas_and_each_worker_gets_its_own_back(gloo, degrees, members):
    everyone = gloo.run(4, replicas_before_they_meet, {**LOCAL, **degrees, "optimizer.clip_norm": None})
    before, last = ([{**everyone[a][part], **everyone[b][part]} for a, b in members] for part in (0, 2))
    flat = torch.stack([torch.cat([replica[name].flatten() for name in sorted(replica)]) for replica in before])
    mean = flat.mean(dim=0)
    expected = ((flat - mean).square().sum(dim=1).mean().sqrt() / mean.norm()).item()
    assert [distance for _, distance, _, _ in everyone] == pytest.approx([expected] * 4, rel=1e-9)
    for ranks, replica in zip(members, last, strict=True):
        for rank in ranks:
            left = everyone[rank][3]
            assert left.keys() == replica.keys() and all(torch.equal(replica[name], left[name]) for name in left)
    assert not torch.equal(last[0]["0.weight"], last[1]["0.weight"])


class UsesOneOfTwo(Classify):
    """Each replica uses one of two layers. replica: number of the one that runs, in one process."""

    replica = 0

    def build_model(self):
        return nn.Sequential(nn.Linear(6, 3), nn.Linear(6, 3))

    def loss(self, model, batch):
        number = dist.get_rank() // 2 if dist.is_initialized() else self.replica
        return nn.functional.cross_entropy(model[number](batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


def test_in_the_warm_up_a_replica_may_lack_the_gradient_that_another_has(gloo):
    flags = {**LOCAL, **SHARDS, "local_sgd.warmup_steps": 100}
    assert_same(gloo.run(4, train, UsesOneOfTwo(), flags)[0], simulated(UsesOneOfTwo(), flags))


@pytest.mark.parametrize(
    ("before", "after", "workers"),
    [
        (SHARDS, {}, 2),
        (SHARDS, {"parallel.replicate": 4}, 4),
        ({"parallel.replicate": 4}, SHARDS, 4),
        (SHARDS, LAYERS, 4),
        (LAYERS, STAGES, 4),
        (STAGES, SHARDS, 4),
    ],
    ids=["fewer workers", "whole replicas", "shards", "shards to layers", "layers to stages", "stages to shards"],
)
@pytest.mark.parametrize("flags", [LOCAL, DILOCO], ids=["local_sgd", "diloco"])
def test_other_replicas_start_from_the_mean_of_those_before(gloo, tmp_path, flags, before, after, workers):
    flags = {**flags, "checkpoint.every": "4 steps", "batch.global_size": 12, "batch.drop_last": True}
    workload = Classify(num_rows=48)
    gloo.run(4, train_in, workload, {**flags, **before}, str(tmp_path), 5)
    mean = gloo.run(4, weights_at, workload, {**flags, **before}, 4)[0]
    short = {**flags, "stop.after": "4 steps", "optimizer.learning_rate": 0.01}
    kept = gloo.run(workers, train_in, workload, {**short, **after}, str(tmp_path), None)[0]
    assert largest_difference(mean, kept.weights) <= 1e-12
    resumed = gloo.run(workers, train_in, workload, {**flags, **after}, str(tmp_path), None)[0]
    assert len(resumed.steps) == 7 and all(value.isfinite().all() for value in resumed.weights.values())


def train_in(place, workload, flags, folder, kill_at):
    return train(place, workload, flags, folder=folder, kill_at=kill_at)


def weights_at(place, workload, flags, step):
    return train(place, workload, {**flags, "stop.after": f"{step} steps"}).weights


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"parallel.replicate": 1, "parallel.shard": 4}, "all workers together have a single replica"),
        ({**SHARDS, "local_sgd.node_sync_every": 1}, "within a node"),
        ({**SHARDS, "fsdp.cpu_offload": True}, "where they are computed"),
        ({**SHARDS, "noise_scale.measure": True}, "cannot be measured alone"),
        ({**STAGES, "memory.find_micro_size": True, "memory.limit_gib": 4}, "cannot be repeated"),
        ({**STAGES, "pipeline.schedule": "interleaved_1f1b", "batch.global_size": 10}, "micro-batches"),
        ({**LAYERS, "noise_scale.measure": True}, "cannot be measured alone"),
        ({**SHARDS, "strategy.name": "gossip"}, "no such axis"),
        ({**SHARDS, "strategy.name": "ddp", "compression.name": "bf16"}, "no such axis"),
    ],
)
def test_what_replicas_of_workers_cannot_do_is_refused_with_the_reason(more, says):
    with pytest.raises(ConfigError, match=says):
        make_job(Classify(), {**LOCAL, **more}, world_size=4)


def judged_with(place, field, change, flags):
    with spoiled("diloco", lambda parallel, **_: dataclasses.replace(parallel, **{field: change})):
        training = Planted("", "", "", "", lambda: None, "diloco", 4, samples(Classify), flags)
        return judge(place, training, steps=8, accumulation=[1])


@pytest.mark.parametrize("field", ["local_divisor", "local_group"])
def test_verify_finds_local_steps_that_are_not_those_of_the_whole_replica(gloo, field):
    change = {"local_divisor": 1, "local_group": None}[field]
    flags = {**SHARDS, "strategy.name": "diloco", "local_sgd.sync_every": 3}
    (outcome,) = gloo.run(4, judged_with, field, change, flags)[0]
    assert outcome.verdict == "differs"
