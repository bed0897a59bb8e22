"""What is ZeRO-1's own: who owns what, what each rank keeps and sends, and optimizers of the user's."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import small_runs
import torch
from small_runs import (
    Classify,
    Tokens,
    largest_difference,
    make_job,
    relative_differences,
    same_generators,
    train,
    train_in_plain_torch,
)
from torch import nn
from verified import judge

from scaleray.data import RankBatch
from scaleray.errors import WorkloadError
from scaleray.strategies.zero1 import share_out
from scaleray.training.setup.model_setup import prepare
from scaleray.training.step.step import TrainStep

ZERO1 = {"strategy.name": "zero1"}
ADAMW = {
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 0.01,
    "optimizer.clip_norm": 0.3,
    "optimizer.weight_decay": 0.1,
}


class Embedded(Tokens):
    """Tied, with one frozen layer: seven parameters to own, the largest more than half of all."""

    def build_model(self):
        model = nn.Sequential(
            nn.Embedding(self.vocabulary, 8),
            nn.Linear(8, 4),
            nn.Tanh(),
            nn.Linear(4, 4),
            nn.Linear(4, 8),
            nn.LayerNorm(8),
            nn.Linear(8, self.vocabulary, bias=False),
        )
        model[6].weight = model[0].weight
        model[3].requires_grad_(False)
        return model


@pytest.mark.always("one bucket-2")
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("options", [{}, {"strategy.bucket_size_mib": 1e-4}], ids=["one bucket", "many buckets"])
def test_it_is_verified_with_accumulation_and_clipping(gloo, world_size, options):
    outcome = gloo.run(world_size, judge, Embedded(), {**ZERO1, **ADAMW, **options}, 2, 4)[0]
    assert outcome.verdict == "equal" and outcome.comparison.largest < 1e-12, outcome


@pytest.mark.parametrize("sizes", [[], [5], [1] * 7, [100, 1, 1, 1], [7, 7, 6, 5, 4, 4, 3, 1]])
@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_the_largest_part_is_within_grahams_bound_of_the_best_possible(sizes, num_parts):
    def weights(parts):
        return [sum(size for size, part in zip(sizes, parts, strict=True) if part == p) for p in range(num_parts)]

    found = weights(share_out(sizes, num_parts))
    best = min(max(weights(parts)) for parts in itertools.product(range(num_parts), repeat=len(sizes)))
    assert max(found) <= (4 / 3 - 1 / (3 * num_parts)) * best
    assert sum(found) == sum(sizes) and max(found) - min(found) <= max(sizes, default=0)


def after_a_step(place, flags):
    """(names whose state this rank has, bytes sent in the step, parameters afterwards, gradients left)."""
    job, sources = make_job(Embedded(num_rows=8), {**ZERO1, **ADAMW, **flags}, world_size=place.world_size)
    with same_generators():
        setup = prepare(job.workload, job.config, job.recipe, place)
    step = TrainStep(job.workload, setup, job.config, job.recipe, place, gives_tuples=False)
    rows = sources["train"].read(job.train_plan().rank_indices(0, place.rank, place.world_size))
    step(RankBatch(0, rows, len(rows["tokens"])), num_rows=8, want_norm=False)
    names = {id(p): n for n, p in setup.parallel.module.named_parameters()}
    owned = sorted(names[id(p)] for p in setup.optimizer.state)
    sent = setup.parallel.bytes_sent()
    left = [n for n, p in setup.parallel.module.named_parameters() if p.grad is not None]
    setup.parallel.close()
    return owned, sent, {n: p.detach().clone() for n, p in setup.parallel.module.named_parameters()}, left


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_parameters_state_is_on_one_rank_and_its_value_on_all(gloo, world_size):
    results = gloo.run(world_size, after_a_step, {})
    trained = ["0.weight", "1.bias", "1.weight", "4.bias", "4.weight", "5.bias", "5.weight"]
    assert sorted(name for owned, *_ in results for name in owned) == trained
    assert all(owned for owned, *_ in results)
    for _, _, parameters, left in results:
        assert left == []  # the optimizer's zero_grad would only reach this rank's own
        assert all(torch.equal(parameters[n], results[0][2][n]) for n in parameters)


def test_bytes_sent_are_the_gradients_and_the_parameters_that_a_rank_owns(gloo):
    results = gloo.run(2, after_a_step, {})
    sizes = {"0.weight": 88, "1.weight": 32, "1.bias": 4, "4.weight": 32, "4.bias": 8, "5.weight": 8, "5.bias": 8}
    for owned, sent, *_ in results:
        assert sent == 8 * (sum(sizes.values()) + sum(sizes[name] for name in owned))


class OwnOptimizer(Classify):
    """Two groups of a kind that the config does not know."""

    def optimizer(self, model, settings):
        weights, biases = ([p for n, p in model.named_parameters() if n.endswith(end)] for end in ("weight", "bias"))
        return torch.optim.RMSprop([{"params": weights}, {"params": biases, "lr": 0.002}], lr=0.005, momentum=0.5)


def plain_rmsprop(flags):
    def build(config, parameters):
        groups = [{"params": parameters[0::2]}, {"params": parameters[1::2], "lr": 0.002}]
        return torch.optim.RMSprop(groups, lr=0.005, momentum=0.5)

    with mock.patch.object(small_runs, "plain_optimizer", build):
        return train_in_plain_torch(OwnOptimizer(), flags)


def run_in(place, workload, flags, folder, kill_at):
    return train(place, workload, flags, folder=folder, kill_at=kill_at)


def test_the_workloads_own_optimizer_is_shared_out_too(gloo):
    finished = gloo.run(2, train, OwnOptimizer(), ZERO1)[0]
    plain = plain_rmsprop({})
    assert max(relative_differences(plain.losses, finished.losses)) < 1e-12
    assert largest_difference(plain.weights, finished.weights) < 1e-12


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 1), (1, 4)])
def test_a_run_goes_on_with_other_workers_and_another_owner_of_each_parameter(gloo, tmp_path, before, after):
    flags = {**ZERO1, "checkpoint.every": "3 steps"}
    gloo.run(before, run_in, OwnOptimizer(), flags, str(tmp_path), 4)
    resumed = gloo.run(after, run_in, OwnOptimizer(), flags, str(tmp_path), None)[0]
    plain = plain_rmsprop({})
    assert resumed.steps[0].step == 4
    assert max(relative_differences(plain.losses[3:], resumed.losses)) < 1e-12
    assert largest_difference(plain.weights, resumed.weights) < 1e-12


class MoreInTheOptimizer(Classify):
    def optimizer(self, model, settings):
        self.temperature = nn.Parameter(torch.ones(3))
        return torch.optim.SGD([*model.parameters(), self.temperature], lr=0.1)


def test_a_parameter_that_the_model_does_not_register_is_refused(gloo):
    with pytest.raises(WorkloadError, match=r"shape \[3\] that the model does not register"):
        gloo.run(2, train, MoreInTheOptimizer(), ZERO1)


@pytest.mark.combination
def test_fewer_parameters_than_ranks_leave_a_rank_without_work(gloo):
    class_flags = {**ZERO1, **ADAMW}
    for flags in (class_flags, {**class_flags, "precision.dtype": "fp16"}):
        finished = gloo.run(4, train, OneLayer(), flags)[0]
        assert len(finished.losses) == 8
    plain = train_in_plain_torch(OneLayer(), ADAMW)
    assert largest_difference(plain.weights, gloo.run(4, train, OneLayer(), class_flags)[0].weights) < 1e-12


class OneLayer(Classify):
    def build_model(self):
        return nn.Linear(6, 3)
