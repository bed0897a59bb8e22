"""Several optimizers, each with a loss of its own: a small GAN, against plain torch and over workers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import (
    NUM_FEATURES,
    Classify,
    largest_difference,
    make_job,
    relative_differences,
    rows,
    same_generators,
    train,
    train_alone,
)
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.optim import lr_scheduler

from scaleray.common.seeding import seed_everything, stream_seed
from scaleray.errors import ConfigError, WorkloadError

pytestmark = pytest.mark.combination

FLAGS = {"stop.after": "9 steps", "optimizer.name": "adamw", "optimizer.learning_rate": 0.01}
STRATEGIES = ["ddp", "zero1", "fsdp", "tensor"]


class Adversaries(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, NUM_FEATURES))
        self.discriminator = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))


class Gan:
    """Noise is a column, so that it is the same on any number of workers. Real rows of class 0 count twice."""

    def __init__(self, num_rows=26, num_val=0, scheduled=False):
        self.num_rows, self.num_val, self.scheduled = num_rows, num_val, scheduled

    def build_model(self):
        return Adversaries()

    def datasets(self):
        draw = np.random.default_rng(3)
        found = {"train": {**rows(self.num_rows), "z": draw.normal(size=(self.num_rows, 3)).astype(np.float32)}}
        if self.num_val:
            found["val"] = {**rows(self.num_val), "z": draw.normal(size=(self.num_val, 3)).astype(np.float32)}
        return found

    def optimizer(self, model, settings):
        return {
            "discriminator": torch.optim.AdamW(model.discriminator.parameters(), settings.learning_rate, fused=True),
            "generator": torch.optim.SGD(
                model.generator.parameters(), 2 * settings.learning_rate, momentum=0.9, foreach=True
            ),
        }

    def losses(self):
        return {"discriminator": self.discriminate, "generator": self.generate}

    def discriminate(self, model, batch):
        weight = 1 + (batch["y"] == 0).to(batch["x"].dtype)
        real = F.softplus(-model.discriminator(batch["x"]))[:, 0] * weight
        fake = F.softplus(model.discriminator(model.generator(batch["z"]).detach()))[:, 0]
        return (real + fake).sum(), weight.sum()

    def generate(self, model, batch):
        return F.softplus(-model.discriminator(model.generator(batch["z"]))).sum(), len(batch["z"])

    def metrics(self, model, batch):
        return {"fooled": ((model.discriminator(model.generator(batch["z"])) > 0).sum(), len(batch["z"]))}

    def schedule(self, optimizers, recipe):
        return {"generator": lr_scheduler.ExponentialLR(optimizers["generator"], 0.9)} if self.scheduled else None

    def tensor_plan(self, model, *, size, sequence_parallel):
        parts = {f"{part}.0": ColwiseParallel() for part in ("generator", "discriminator")}
        return {**parts, **{f"{part}.2": RowwiseParallel() for part in ("generator", "discriminator")}}


def in_plain_torch(workload, flags, clip_norm=None):
    """Losses and final weights of the same training in nothing but torch."""
    job, sources = make_job(workload, flags)
    plan, losses = job.train_plan(), []
    with same_generators():
        seed_everything(stream_seed(job.config.seed, "model"))
        model = workload.build_model().double()
        optimizers = workload.optimizer(model, job.config.optimizer)
        for step in range(job.recipe.total_steps):
            read = sources["train"].read(plan.global_indices(step))
            batch = {n: torch.from_numpy(v) for n, v in read.items()}
            batch = {n: v.double() if v.is_floating_point() else v for n, v in batch.items()}
            losses.append({})
            for name, loss in workload.losses().items():
                model.zero_grad()
                total, count = loss(model, batch)
                (total / count).backward()
                own = [p for group in optimizers[name].param_groups for p in group["params"]]
                nn.utils.clip_grad_norm_(own, clip_norm or float("inf"))
                optimizers[name].step()
                losses[-1][name] = (total / count).item()
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("flags", [{}, {"optimizer.clip_norm": 0.05}, {"batch.micro_size": 2}])
def test_one_worker_trains_as_plain_torch_does(flags):
    finished = train_alone(Gan(), {**FLAGS, **flags})
    losses, weights = in_plain_torch(Gan(), {**FLAGS, **flags}, flags.get("optimizer.clip_norm"))
    for step, expected in zip(finished.steps, losses, strict=True):
        assert step.losses == pytest.approx(expected, rel=1e-12) and list(step.losses) == list(expected)
        assert step.loss == pytest.approx(sum(expected.values()), rel=1e-12)
        assert {f"train/loss_{name}" for name in expected} <= step.more.keys()
        assert step.grad_norm == pytest.approx(
            np.hypot(step.more["train/grad_norm_discriminator"], step.more["train/grad_norm_generator"])
        )
    assert largest_difference(finished.weights, weights) < 1e-12


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_workers_train_what_one_does(gloo, strategy, world_size):
    flags = {**FLAGS, "optimizer.clip_norm": 0.3, "batch.micro_size": 1 if strategy != "tensor" else 2}
    sized = {"parallel.tensor": world_size} if strategy == "tensor" else {}
    alone = train_alone(Gan(num_val=10, scheduled=True), flags)
    many = gloo.run(world_size, train, Gan(num_val=10, scheduled=True), {**flags, "strategy.name": strategy, **sized})[
        0
    ]
    for name in ("discriminator", "generator"):
        assert max(relative_differences(*([s.losses[name] for s in r.steps] for r in (alone, many)))) < 1e-11
    assert max(relative_differences(alone.grad_norms, many.grad_norms)) < 1e-11
    assert largest_difference(alone.weights, many.weights) < 1e-10
    assert (
        many.evaluations[-1].metrics == alone.evaluations[-1].metrics and "val/fooled" in alone.evaluations[-1].metrics
    )


class Overlapping(Gan):
    """Both optimizers move the generator, one with momentum."""

    def optimizer(self, model, settings):
        return {
            "discriminator": torch.optim.AdamW(model.parameters(), settings.learning_rate),
            "generator": torch.optim.SGD(model.generator.parameters(), settings.learning_rate, momentum=0.9),
        }


def resumed_in_pool(place, workload, flags, folder):
    whole = train(place, workload, flags)
    train(place, workload, flags, folder=folder, kill_at=5)
    return whole, train(place, workload, flags, folder=folder)


@pytest.mark.parametrize("workload", [Gan(scheduled=True), Overlapping()], ids=["schedules", "overlapping"])
@pytest.mark.parametrize(
    ("strategy", "world_size", "dtype"),
    [("single", 1, "fp32"), ("single", 1, "fp16"), ("ddp", 2, "fp32"), ("zero1", 2, "fp32"), ("fsdp", 2, "fp32")],
)
def test_a_resumed_run_is_bit_identical(gloo, tmp_path, workload, strategy, world_size, dtype):
    flags = {**FLAGS, "checkpoint.every": "2 steps", "deterministic": True, "precision.dtype": dtype}
    flags["strategy.name"] = strategy if world_size > 1 else "auto"
    whole, resumed = gloo.run(world_size, resumed_in_pool, workload, flags, str(tmp_path))[0]
    assert [s.step for s in resumed.steps] == [5, 6, 7, 8, 9]
    assert [s.losses for s in resumed.steps] == [s.losses for s in whole.steps[4:]]
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())


def test_a_run_resumes_on_another_number_of_workers_and_strategy(gloo, tmp_path):
    flags = {**FLAGS, "checkpoint.every": "2 steps"}
    whole = train_alone(Gan(), flags)
    gloo.run(2, train_until, Gan(), {**flags, "strategy.name": "zero1"}, str(tmp_path))
    resumed = train_alone(Gan(), flags, folder=tmp_path)
    assert largest_difference(whole.weights, resumed.weights) < 1e-11


def train_until(place, workload, flags, folder):
    train(place, workload, flags, folder=folder, kill_at=5)


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ({"strategy.name": "local_sgd"}, "strategy.name"),
        ({"strategy.name": "pipeline", "parallel.pipeline": 2}, "strategy.name"),
        ({"strategy.name": "ddp", "compression.name": "bf16"}, "compression.name"),
        ({"noise_scale.measure": True}, "noise_scale.measure"),
        ({"memory.find_micro_size": True, "memory.limit_gib": 4}, "memory.find_micro_size"),
        ({"memory.on_out_of_memory": "halve"}, "memory.on_out_of_memory"),
        ({"pruning.method": "magnitude", "pruning.sparsity": 0.5, "pruning.start_step": 1}, "pruning.method"),
    ],
)
def test_what_several_losses_cannot_have_is_refused_by_name(gloo, flags, key):
    world_size = 2 if "strategy.name" in flags else 1
    with pytest.raises(ConfigError, match=rf"{key}.*2 losses \(discriminator, generator\)"):
        gloo.run(world_size, train, Gan(), {**FLAGS, **flags})


class Mean(Gan):
    def generate(self, model, batch):
        return F.softplus(-model.discriminator(model.generator(batch["z"]))).mean(), len(batch["z"])


class OneOptimizer(Gan):
    def optimizer(self, model, settings):
        return torch.optim.SGD(model.parameters(), settings.learning_rate)


class WithoutLosses(Classify):
    def optimizer(self, model, settings):
        return {"a": torch.optim.SGD(model.parameters(), 0.1), "b": torch.optim.SGD(model.parameters(), 0.1)}


class OtherNames(Gan):
    def losses(self):
        return {"critic": self.discriminate, "generator": self.generate}


class NotOptimizers(Gan):
    def optimizer(self, model, settings):
        return {"discriminator": 1, "generator": 2}


@pytest.mark.parametrize(
    ("workload", "text"),
    [
        (Mean(), r"losses\(\)\['generator'\] is a mean"),
        (OneOptimizer(), r"losses\(\).*optimizer\(\) returns a single one"),
        (WithoutLosses(), r"optimizer\(\).*some of them share a parameter"),
        (OtherNames(), r"critic, generator.*discriminator, generator"),
        (NotOptimizers(), r"optimizer\(\) returned int"),
    ],
)
def test_what_does_not_fit_together_is_one_clear_error(workload, text):
    with pytest.raises(WorkloadError, match=text):
        train_alone(workload, FLAGS)


def test_a_setting_that_both_optimizers_ignore_is_said():
    finished = train_alone(Gan(), {**FLAGS, "optimizer.weight_decay": 0.3})
    assert any("optimizer.weight_decay" in event and "ignores" in event for event in finished.events)
