"""A loss over the whole batch: one process on all rows is the oracle for any number of workers and micro-batches."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import (
    Classify,
    WithBatchNorm,
    largest_difference,
    make_job,
    relative_differences,
    same_generators,
    train,
    train_alone,
)
from torch import nn

from scaleray.common.seeding import seed_everything, stream_seed
from scaleray.errors import ConfigError, WorkloadError
from scaleray.workload import with_loss

FLAGS = {"batch.global_size": 12, "stop.after": "7 steps", "evaluation.every": "3 steps"}


class Scaled(nn.Module):
    """A network and a learned scale, in a module of its own, as tensor parallelism asks."""

    def __init__(self, net):
        super().__init__()
        self.net, self.scale = net, nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return self.net(x)


class Contrast(Classify):
    """Rows and their noisy copies: each must be nearest to its own copy among all of the batch; a scale is learned."""

    def build_model(self):
        return Scaled(super().build_model())

    def tensor_plan(self, model, *, size, sequence_parallel):
        return {
            f"net.{name}": style
            for name, style in super().tensor_plan(model, size=size, sequence_parallel=sequence_parallel).items()
        }

    loss = metrics = None  # Classify's

    def outputs(self, model, batch):
        x = batch["x"]
        return {"one": model(x), "other": model(x.flip(1)), "scale": model.scale(torch.ones_like(x[:, :1]))}

    def batch_loss(self, outputs):
        scores = outputs["scale"][0] * outputs["one"] @ outputs["other"].T
        return F.cross_entropy(scores, torch.arange(len(scores)), reduction="sum"), len(scores)


class Dice(Classify):
    """One number for a batch; the labels are among the outputs."""

    loss = metrics = None

    def outputs(self, model, batch):
        return {"found": model(batch["x"]).softmax(1)[:, 0], "true": (batch["y"] == 0).to(batch["x"].dtype)}

    def batch_loss(self, outputs):
        found, true = outputs["found"], outputs["true"]
        return 1 - (2 * (found * true).sum() + 1) / (found.sum() + true.sum() + 1), 1


class Shuffled(Contrast):
    """The loss draws random numbers, and the model has dropout and statistics of its micro-batches."""

    build_model = WithBatchNorm.build_model

    def outputs(self, model, batch):
        return {"one": F.dropout(model(batch["x"]), 0.3, model.training)}

    def batch_loss(self, outputs):
        one = outputs["one"]
        return (one * one[torch.randperm(len(one))]).sum(), len(one)


def in_plain_torch(workload, flags):
    """Losses and final weights of the same training in nothing but torch, one whole batch a step."""
    job, sources = make_job(workload, flags)
    plan, losses = job.train_plan(), []
    with same_generators():
        seed_everything(stream_seed(job.config.seed, "model"))
        model = workload.build_model().double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(job.recipe.total_steps):
            read = sources["train"].read(plan.global_indices(step))
            batch = {n: torch.from_numpy(v) for n, v in read.items()}
            total, count = workload.batch_loss(workload.outputs(model, {**batch, "x": batch["x"].double()}))
            optimizer.zero_grad()
            (total / count).backward()
            optimizer.step()
            losses.append((total / count).item())
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("micro_size", [12, 4, 1])
@pytest.mark.parametrize("workload", [Contrast, Dice])
def test_one_worker_trains_as_plain_torch_does(workload, micro_size):
    flags = {**FLAGS, "batch.micro_size": micro_size, "batch.drop_last": False, "optimizer.momentum": 0.0}
    finished = train_alone(with_loss(workload()), flags)
    losses, weights = in_plain_torch(workload(), flags)
    assert max(relative_differences(losses, finished.losses)) < 1e-12
    assert largest_difference(finished.weights, weights) < 1e-12


CASES = [("ddp", 2, 3), ("ddp", 3, 2), ("ddp", 4, 3), ("zero1", 2, 2), ("fsdp", 2, 6), ("fsdp", 4, 1), ("tensor", 2, 4)]


@pytest.mark.always("ddp-3", "fsdp-4")
@pytest.mark.parametrize("workload", [Contrast, Dice])
@pytest.mark.parametrize(("strategy", "world_size", "micro_size"), CASES)
def test_workers_train_what_one_does(gloo, workload, strategy, world_size, micro_size):
    flags = {**FLAGS, "optimizer.clip_norm": 0.05, "batch.drop_last": False}
    alone = train_alone(with_loss(workload(num_val=21)), flags)
    own = {"strategy.name": strategy, "batch.micro_size": micro_size}
    own |= {"parallel.tensor": world_size, "tensor.sequence_parallel": False} if strategy == "tensor" else {}
    many = gloo.run(world_size, train, with_loss(workload(num_val=21)), {**flags, **own})[0]
    assert max(relative_differences(alone.losses, many.losses)) < 1e-12
    assert max(relative_differences(alone.grad_norms, many.grad_norms)) < 1e-11
    assert largest_difference(alone.weights, many.weights) < 1e-11
    for one, other in zip(alone.evaluations, many.evaluations, strict=True):
        assert one.metrics.keys() == {"val/loss"} and other.metrics == pytest.approx(one.metrics, rel=1e-12)


@pytest.mark.parametrize("num_rows", [29, 25])
def test_a_placeholder_beside_other_micro_batches_has_no_part_in_the_loss(gloo, num_rows):
    """Of the last 5 rows one worker has two micro-batches and the other one; of the last row one has none."""
    flags = {**FLAGS, "batch.drop_last": False}
    alone = train_alone(with_loss(Contrast(num_rows)), flags)
    own = {"strategy.name": "fsdp", "batch.micro_size": 2}
    both = gloo.run(2, train, with_loss(Contrast(num_rows)), {**flags, **own})[0]
    assert max(relative_differences(alone.losses, both.losses)) < 1e-12
    assert largest_difference(alone.weights, both.weights) < 1e-11


def test_an_evaluation_takes_the_loss_over_as_many_rows_as_a_global_batch():
    workload = with_loss(Contrast(num_val=21))
    finished = train_alone(workload, {**FLAGS, "evaluation.every": None})
    model = workload.build_model().double()
    model.load_state_dict(finished.weights)
    x = torch.from_numpy(workload.datasets()["val"]["x"]).double()
    pairs = [workload.batch_loss(workload.outputs(model, {"x": x[start : start + 12]})) for start in (0, 12)]
    expected = sum(float(total.detach()) for total, _ in pairs) / 21
    assert finished.evaluations[-1].metrics["val/loss"] == pytest.approx(expected, rel=1e-12)


def test_a_second_forward_pass_sees_the_same_dropout_and_leaves_statistics_alone():
    """Two micro-batches, recomputed, give what their outputs kept with gradients give."""
    workload = with_loss(Shuffled())
    flags = {**FLAGS, "stop.after": "1 step", "batch.micro_size": 6, "deterministic": True}
    finished = train_alone(workload, flags)
    job, sources = make_job(workload, flags)
    with same_generators():
        seed_everything(stream_seed(job.config.seed, "model"))
        model = workload.build_model().double()
        seed_everything(stream_seed(job.config.seed, "dropout", 0))
        rows = torch.from_numpy(sources["train"].read(job.train_plan().global_indices(0))["x"]).double()
        parts = [workload.outputs(model, {"x": part}) for part in rows.split(6)]
        torch.manual_seed(stream_seed(job.config.seed, "batch_loss", 1))
        total, count = workload.batch_loss({"one": torch.cat([part["one"] for part in parts])})
    (total / count).backward()
    torch.optim.SGD(model.parameters(), 0.1, job.config.optimizer.momentum).step()
    assert largest_difference(finished.weights, model.state_dict()) < 1e-12
    assert finished.losses[0] == pytest.approx((total / count).item(), rel=1e-12)


def test_a_resumed_run_is_bit_identical(tmp_path):
    flags = {**FLAGS, "batch.micro_size": 3, "deterministic": True, "checkpoint.every": "2 steps"}
    whole = train_alone(with_loss(Shuffled()), flags)
    train_alone(with_loss(Shuffled()), flags, folder=tmp_path, kill_at=5)
    resumed = train_alone(with_loss(Shuffled()), flags, folder=tmp_path)
    assert resumed.losses == whole.losses[-len(resumed.losses) :] and len(resumed.losses) < 7
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())


@pytest.mark.parametrize("micro_size", [12, 4])
def test_halves_of_a_micro_batch_are_taken_when_memory_runs_out(micro_size):
    class Narrow(Contrast):
        most = 12

        def outputs(self, model, batch):
            if len(batch["x"]) > self.most:
                raise MemoryError("out of memory")
            return super().outputs(model, batch)

    roomy = train_alone(with_loss(Contrast()), {**FLAGS, "memory.on_out_of_memory": "halve"})
    narrow = with_loss(Narrow())
    flags = {**FLAGS, "memory.on_out_of_memory": "halve", "batch.micro_size": micro_size}
    Narrow.most = max(1, micro_size // 2)
    finished = train_alone(narrow, flags)
    assert max(relative_differences(roomy.losses, finished.losses)) < 1e-12
    assert sum("out of memory" in event for event in finished.events) == 1


def test_the_cost_is_reported(gloo):
    finished = gloo.run(2, train, with_loss(Contrast()), {**FLAGS, "batch.micro_size": 2, "strategy.name": "ddp"})[0]
    texts = " ".join(str(message) for message in finished.messages)
    assert "batch_loss() over the whole batch: " in texts and "each forward pass is computed twice" in texts


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ({"strategy.name": "local_sgd"}, "strategy.name"),
        ({"strategy.name": "pipeline", "parallel.pipeline": 2}, "strategy.name"),
        ({"noise_scale.measure": True}, "noise_scale.measure"),
    ],
)
def test_what_it_cannot_have_is_refused_by_name(gloo, flags, key):
    with pytest.raises(ConfigError, match=rf"{key}.*batch_loss\(\)"):
        gloo.run(2 if "strategy.name" in flags else 1, train, with_loss(Contrast()), {**FLAGS, **flags})


class OneNumber(Contrast):
    def outputs(self, model, batch):
        return {**super().outputs(model, batch), "scale": model.scale.weight[0, 0]}


class Detached(Contrast):
    def batch_loss(self, outputs):
        return sum(t.detach().sum() for t in outputs.values()), 1


class InPlace(Contrast):
    def outputs(self, model, batch):
        batch["x"].mul_(2)
        return super().outputs(model, batch)


class OfOtherWidths(Contrast):
    def outputs(self, model, batch):
        return {"one": model(batch["x"]), "padded": torch.zeros(len(batch["x"]), 1 + int(batch["y"].sum()))}

    def batch_loss(self, outputs):
        return outputs["one"].sum() + outputs["padded"].sum(), 1


@pytest.mark.parametrize(
    ("workload", "says"),
    [
        (OneNumber, r"scale \[\].*one row for each row of the batch.*expand\(rows\)"),
        (Detached, "a constant.*depend on the outputs"),
        (InPlace, "changes its batch in place"),
        (OfOtherWidths, r"outputs\(\)\['padded'\].*equal in everything but the number of rows"),
    ],
)
def test_a_wrong_pair_of_methods_is_named(workload, says):
    with pytest.raises(WorkloadError, match=f"(?s){says}"):
        train_alone(with_loss(workload()), {**FLAGS, "batch.micro_size": 3})


def test_workers_whose_outputs_differ_in_shape_are_named_on_all(gloo):
    with pytest.raises(WorkloadError, match=r"outputs\(\)\['padded'\].*workers must be equal in everything"):
        gloo.run(2, train, with_loss(OfOtherWidths()), {**FLAGS, "strategy.name": "ddp"})


def test_methods_that_contradict_each_other_are_refused():
    class Both(Contrast):
        loss = Classify.loss

    class Half(Classify):
        loss = None
        batch_loss = Contrast.batch_loss

    with pytest.raises(WorkloadError, match=r"loss\(\) have the same purpose"):
        with_loss(Both())
    with pytest.raises(WorkloadError, match=r"batch_loss\(\) needs outputs\(\)"):
        with_loss(Half())
    assert copy.deepcopy(with_loss(Contrast())).loss.args[0].num_rows == 26


class BetweenRows(Classify):
    """Negatives within the micro-batch."""

    def loss(self, model, batch):
        scores = model(batch["x"]) @ model(batch["x"]).T
        return F.cross_entropy(scores, torch.arange(len(scores)), reduction="sum"), len(scores)


def test_a_loss_between_rows_is_refused_unless_it_is_declared():
    with pytest.raises(
        WorkloadError,
        match=r"(?s)depends on how a batch is cut: 8 rows give .*so the training depends on.*outputs\(\) and batch_loss",
    ):
        train_alone(BetweenRows(), FLAGS)

    class Declared(BetweenRows):
        depends_on_micro_batch = True

    assert len(train_alone(Declared(), FLAGS).losses) == 7


class Cancelled(Classify):
    """The terms of each row cancel but for rounding."""

    def loss(self, model, batch):
        found = model(batch["x"]) * 1e3
        return (found - found.flip(0)).sum() + found.sum() * 1e-6, len(found)


def test_rounding_is_not_taken_for_a_loss_between_rows():
    assert np.isfinite(train_alone(Cancelled(), {**FLAGS, "precision.dtype": "fp32"}).losses).all()
