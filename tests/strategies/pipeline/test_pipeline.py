"""Pipelines: every schedule is the training of one process, wherever the cuts lie and whatever the model shares across them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small_runs import (
    Classify,
    Stepper,
    WithBatchNorm,
    largest_difference,
    make_job,
    relative_differences,
    train,
    train_in_plain_torch,
)
from small_transformer import SmallTransformer
from torch import nn

from scaleray.config.strategy import PipelineSettings
from scaleray.errors import ConfigError, WorkloadError
from scaleray.training.setup.model_setup import prepare

SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
ADAMW = {"optimizer.name": "adamw", "optimizer.learning_rate": 0.01, "optimizer.clip_norm": 0.5}
RECIPES = {"one pass": {}, "micro-batches": {"batch.micro_size": 1, "optimizer.clip_norm": 0.3}, "adamw": ADAMW}


class Deep(Classify):
    """Five children, so that four stages have something to do."""

    def build_model(self):
        return nn.Sequential(
            nn.Linear(6, 8),
            nn.Sequential(nn.Tanh(), nn.Linear(8, 8)),
            nn.Sequential(nn.GELU(), nn.Linear(8, 8)),
            nn.Sequential(nn.Tanh(), nn.Linear(8, 8)),
            nn.Linear(8, 3),
        )


def assert_same_training(finished, plain, *, within=1e-9):
    assert len(finished.losses) == len(plain.losses)
    assert max(relative_differences(plain.losses, finished.losses)) <= within
    assert max(relative_differences(plain.grad_norms, finished.grad_norms)) <= within
    assert list(finished.weights) == list(plain.weights)  # the whole model's names in its order
    assert largest_difference(plain.weights, finished.weights) <= within


@pytest.mark.each_value
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_schedule_equals_one_process(gloo, recipe, schedule, world_size):
    flags = {**recipe, "strategy.name": "pipeline", "pipeline.schedule": schedule}
    finished = gloo.run(world_size, train, Deep(), flags)[0]
    assert_same_training(finished, train_in_plain_torch(Deep(), recipe))


@pytest.mark.each_value
@pytest.mark.parametrize("tie_head", [True, False])
@pytest.mark.parametrize(
    "schedule",
    ["1f1b", "interleaved_1f1b", *(pytest.param(s, marks=pytest.mark.combination) for s in ("gpipe", "zero_bubble"))],
)
def test_a_transformer_equals_one_process(gloo, schedule, tie_head):
    recipe, workload = {**ADAMW, "batch.micro_size": 2}, SmallTransformer(num_val=6, tie_head=tie_head)
    flags = {**recipe, "strategy.name": "pipeline", "pipeline.schedule": schedule}
    finished = gloo.run(4, train, workload, flags)[0]
    assert_same_training(finished, train_in_plain_torch(workload, recipe))
    alone = gloo.run(1, train, workload, recipe)[0]
    assert finished.evaluations[-1].metrics == pytest.approx(alone.evaluations[-1].metrics, rel=1e-12)
    assert all(0 <= step.more["perf/bubble_share"] < 1 and step.sent_bytes > 0 for step in finished.steps)


@pytest.mark.combination
def test_four_stages_on_four_workers_and_a_rest_of_odd_size(gloo):
    # 27 rows in batches of 12: the last has 3, so with micro-batches of 2 there are a whole one and a half
    recipe, workload = {**ADAMW, "batch.global_size": 12, "batch.micro_size": 2}, SmallTransformer(num_rows=27)
    flags = {**recipe, "strategy.name": "pipeline", "parallel.pipeline": 4}
    assert_same_training(gloo.run(4, train, workload, flags)[0], train_in_plain_torch(workload, recipe))


@pytest.mark.combination
def test_a_number_of_micro_batches_that_a_schedule_cannot_order_goes_through_in_parts(gloo):
    # a last batch of 5 single rows, which would be two rounds of 2.5
    recipe, workload = {"batch.micro_size": 1}, Deep(num_rows=21)
    flags = {**recipe, "strategy.name": "pipeline", "pipeline.schedule": "interleaved_1f1b"}
    assert_same_training(gloo.run(2, train, workload, flags)[0], train_in_plain_torch(workload, recipe))


class Everywhere(nn.Module):
    """Code before, between and after the blocks: masks from the inputs, positions of the model's own, pooling, a scale."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(4, 6))
        self.read = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.shrink = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, keep=None):
        mask = (x > 0).to(x.dtype)[:, None]
        x = self.read(x)[:, None] + self.position
        for layer in self.layers:
            x = layer(x).tanh() * mask if keep is None else layer(x) * keep
        return self.shrink(x.mean(dim=1)) * self.scale + self.position[0, :3]


class EverywhereTask(Classify):
    def build_model(self):
        return Everywhere()

    def blocks(self, model):
        return model.layers


def test_code_between_the_blocks_that_changes_the_activation_is_refused(gloo):
    with pytest.raises(WorkloadError, match="not a chain of its blocks"):
        gloo.run(2, train, EverywhereTask(), {"strategy.name": "pipeline"})


class Masked(nn.Module):
    """One block of `Everywhere`, as it must be written."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, mask):
        return self.linear(x).tanh() * mask


class Chain(Everywhere):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Masked() for _ in range(4))

    def forward(self, x, *, scale=2.0):
        mask = (x > 0).to(x.dtype)[:, None]
        x = scale * self.read(x)[:, None] + self.position
        for layer in self.layers:
            x = layer(x, mask)
        return self.shrink(x.mean(dim=1)) * self.scale + self.position[0, :3]


class ChainTask(EverywhereTask):
    def build_model(self):
        return Chain()

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"], scale=3.0), batch["y"], reduction="sum"), len(batch["y"])


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_code_around_the_blocks_and_parameters_beside_them_are_those_of_one_process(gloo, schedule):
    recipe = {**ADAMW, "batch.micro_size": 2, "optimizer.weight_decay": 0.1}
    flags = {**recipe, "strategy.name": "pipeline", "pipeline.schedule": schedule}
    assert_same_training(gloo.run(4, train, ChainTask(), flags)[0], train_in_plain_torch(ChainTask(), recipe))


@pytest.mark.combination
def test_stages_split_by_measured_time_train_the_same(gloo):
    flags = {**ADAMW, "strategy.name": "pipeline", "pipeline.split": "measured"}
    finished = gloo.run(2, train, SmallTransformer(), flags)[0]
    assert_same_training(finished, train_in_plain_torch(SmallTransformer(), ADAMW))
    assert "(measured)" in finished.events[0]


# what lies where


def held(place, workload):
    job, _ = make_job(workload, {"strategy.name": "pipeline"}, world_size=place.world_size)
    setup = prepare(job.workload, job.config, job.recipe, replace(place, degrees=job.degrees))
    names = [name for name, _ in setup.parallel.module.named_parameters()]
    setup.parallel.close()
    return names


def test_a_worker_trains_its_own_blocks_and_a_tied_head_has_one_name(gloo):
    first, second = gloo.run(2, held, SmallTransformer())
    assert first[0] == second[0] == "embedding.weight"
    assert [n for n in first if n.startswith("blocks")] == first[1:]
    assert second[-1] == "norm.weight" and "head.weight" not in second
    assert not {n for n in first if n.startswith("blocks")} & set(second)


def dropped(place):
    """Masks of the first dropout of two steps: of each worker, which has its own layer."""
    seen = []

    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            mask = F.dropout(torch.ones(64), 0.5, self.training)
            if self.training and torch.is_grad_enabled():
                seen.append(mask)
            return self.linear(x)

    class Drops(Classify):
        def build_model(self):
            return nn.Sequential(Seen(), Seen(), nn.Linear(6, 3))

        def loss(self, model, batch):
            seen.append(F.dropout(torch.ones(64), 0.5))  # as a loss may, to mask its inputs
            return super().loss(model, batch)

    train(place, Drops(num_rows=16), {"strategy.name": "pipeline", "stop.after": "2 steps"})
    return seen


def test_random_numbers_are_alike_around_the_blocks_and_differ_between_blocks_steps_and_replicas(gloo):
    seen = gloo.run(4, dropped)
    # the checks of the first batch come first; of a step: the loss's own mask, then that of the worker's layer
    first, other_replica, second = seen[0][-4:], seen[1][-4:], seen[2][-4:]
    masks = [first[0], first[2], second[0], second[2]]
    assert torch.equal(masks[0], masks[2]) and torch.equal(masks[1], masks[3])
    assert not torch.equal(masks[0], masks[1]), "another step"
    assert not torch.equal(first[0], other_replica[0])
    distinct = [first[0], first[1], second[1], first[3], second[3], other_replica[1]]
    assert all(not torch.equal(a, b) for n, a in enumerate(distinct) for b in distinct[:n])


def test_statistics_of_replicas_are_those_of_the_first(gloo):
    outcomes = gloo.run(4, batch_norm_buffers)
    buffers = [b for b in outcomes if b]
    assert len(buffers) == 2 and buffers[0].keys() == buffers[1].keys()
    assert all(torch.equal(buffers[0][n], buffers[1][n]) for n in buffers[0])
    assert buffers[0]["1.num_batches_tracked"] == 3


def batch_norm_buffers(place):
    workload = WithBatchNorm(num_rows=24)
    job, sources = make_job(workload, {"strategy.name": "pipeline"}, world_size=place.world_size)
    place = replace(place, degrees=job.degrees)
    setup = prepare(job.workload, job.config, job.recipe, place)
    from scaleray.data import RankBatch
    from scaleray.training.step.step import TrainStep

    step = TrainStep(job.workload, setup, job.config, job.recipe, place, gives_tuples=False)
    plan = job.train_plan()
    for number in range(3):
        given = sources["train"].read(plan.rank_indices(number, place.data_rank, place.data_parallel_size))
        step(RankBatch(number, given, len(given["y"])), num_rows=plan.num_rows(number), want_norm=True)
    found = {name: b.clone() for name, b in setup.parallel.module.named_buffers()}
    setup.parallel.close()
    return found


def test_the_users_model_has_the_values_of_all_stages_after_close(gloo):
    for ours, weights in gloo.run(2, keep_model):
        assert weights and all(torch.equal(ours[name], weights[name]) for name in weights)


def keep_model(place):
    workload, seen = Deep(), {}
    build = workload.build_model

    def build_model():
        seen["model"] = build()
        return seen["model"]

    workload.build_model = build_model
    stepper = Stepper(place, workload, {"strategy.name": "pipeline", "scale.workers": 2})
    stepper(1)
    weights = stepper.parallel.weights().tensors
    stepper.setup.close()
    return seen["model"].state_dict(), weights


# weights of another run

RESUME = {
    **ADAMW, "deterministic": True, "checkpoint.every": "3 steps", "stop.after": "8 steps", "batch.micro_size": 2,
    "precision.dtype": "fp64",
}  # fmt: skip


def run_part(place, workload, flags, folder, kill_at):
    return train(place, workload, flags, folder=folder, kill_at=kill_at)


@pytest.mark.combination
@pytest.mark.parametrize("strategy", ["pipeline", "tensor"])
def test_a_run_starts_from_the_weights_of_another(gloo, tmp_path, strategy):
    gloo.run(1, run_part, SmallTransformer(), RESUME, str(tmp_path), None)
    flags = {**ADAMW, "workload.weights": str(tmp_path), "stop.after": "3 steps"}
    expected = gloo.run(1, train, SmallTransformer(), flags)[0]
    finished = gloo.run(2, train, SmallTransformer(), {**flags, "strategy.name": strategy})[0]
    assert max(relative_differences(expected.losses, finished.losses)) < 1e-11
    assert largest_difference(expected.weights, finished.weights) < 1e-9
    assert expected.losses[0] != train_in_plain_torch(SmallTransformer(), ADAMW).losses[0]


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.combination)])
def test_lower_precisions_stay_near_one_process(gloo, dtype):
    flags = {"precision.dtype": dtype, "batch.micro_size": 2}
    alone = gloo.run(1, train, SmallTransformer(), flags)[0]
    finished = gloo.run(2, train, SmallTransformer(), {**flags, "strategy.name": "pipeline"})[0]
    # of bf16 each block's matrix products are rounded alike; sums of micro-batches are not
    assert max(relative_differences(alone.losses, finished.losses)) < (1e-2 if dtype == "bf16" else 1e-5)


# what is refused


class NoBlocks(Classify):
    def build_model(self):
        return nn.ModuleDict({"only": nn.Linear(6, 3)})


class TwoPasses(Deep):
    def loss(self, model, batch):
        first, second = model(batch["x"]), model(batch["x"])
        return F.cross_entropy(first + second, batch["y"], reduction="sum"), len(batch["y"])


class FrozenStart(Deep):
    def build_model(self):
        model = super().build_model()
        for child in list(model)[:4]:
            child.requires_grad_(False)
        return model


@pytest.mark.parametrize(
    ("workload", "flags", "says"),
    [
        (NoBlocks(), {}, "lacks blocks"),
        (Classify(), {"pipeline.schedule": "interleaved_1f1b"}, "made of 3 blocks"),
        (FrozenStart(), {}, "has no trained parameter on worker 0"),
        (TwoPasses(), {}, "called 2 times"),
    ],
)
def test_a_model_that_makes_no_pipeline_is_refused_with_the_reason(gloo, workload, flags, says):
    with pytest.raises(WorkloadError, match=says):
        gloo.run(2, train, workload, {"strategy.name": "pipeline", **flags})


def test_micro_batches_that_make_no_equal_rounds_are_refused_before_anything_runs():
    flags = {
        "strategy.name": "pipeline",
        "pipeline.schedule": "interleaved_1f1b",
        "batch.global_size": 5,
        "batch.micro_size": 1,
    }
    with pytest.raises(ConfigError, match=r"5 micro-batches.*2 equal rounds"):
        make_job(Deep(), flags, world_size=2)
    make_job(Deep(), {**flags, "pipeline.schedule": "1f1b"}, world_size=2)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"schedule": "gpipe", "stages_per_worker": 2}, "one stage per worker"),
        ({"schedule": "interleaved_1f1b", "stages_per_worker": 1}, "is 1f1b"),
    ],
)
def test_settings_that_fit_no_schedule_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        PipelineSettings(**settings)


def test_a_pipeline_of_one_worker_is_refused():
    flags = {"strategy.name": "pipeline", "parallel.pipeline": 1}
    with pytest.raises(ConfigError, match=r"parallel\.pipeline is 1: a pipeline needs at least two workers"):
        make_job(Deep(), flags, world_size=2)


class ThreeEqual(Classify):
    def build_model(self):
        return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))


def test_how_even_the_stages_are_is_said_in_numbers(gloo):
    flags = {"strategy.name": "pipeline", "stop.after": "1 steps"}
    events = gloo.run(2, train, ThreeEqual(), flags)[0].events
    # two of three equal blocks on one worker, where one and a half were even
    assert any(
        "pipeline of 2 stages" in event and "the largest stage is 1.33 times the mean" in event for event in events
    )
