"""Rows, random numbers, statistics, schedules and initial values that differ are found: each bug is planted."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from small_runs import NUM_CLASSES, NUM_FEATURES, Classify, WithDropout
from torch import nn
from verified import (
    TRAINING_ON,
    broken_strategy,
    every_rank_reads_the_same,
    found,
    judge,
    judge_with,
    knows_who_trains,
    many,
)

from scaleray.data import Input
from scaleray.strategies import Parallel, ddp, local_sgd
from scaleray.strategies.apart.replicas import Replicas
from scaleray.training.setup import model_setup, optimizers
from scaleray.verification.runs import trace_probe

# replicas


@contextlib.contextmanager
def machines_do_not_average():
    def average(self, *, group=None, original=Replicas.average, **more):
        return original(self, group=group, **more) if group is None else None

    with mock.patch.object(Replicas, "average", average):
        yield


MACHINES = {"strategy.name": "local_sgd", "local_sgd.sync_every": 4, "local_sgd.node_sync_every": 2}


@contextlib.contextmanager
def machines_of_two_ranks():
    def of_rank():
        return "host", str(dist.get_rank() // 2)

    with mock.patch.object(local_sgd, "machine", of_rank), mock.patch.object(trace_probe, "machine", of_rank):
        yield


def test_machines_that_do_not_average_are_found(gloo):
    outcome = gloo.run(2, judge_with, machines_do_not_average, Classify(), MACHINES)[0]
    assert found(outcome)[:2] == ("averaging of replicas", 2)
    assert gloo.run(4, judge_with, machines_of_two_ranks, Classify(), MACHINES)[0].verdict == "as promised"


# data order


def test_ranks_that_read_the_same_rows_are_found_as_data_order(gloo):
    outcome = gloo.run(2, judge_with, every_rank_reads_the_same, Classify())[0]
    assert found(outcome) == ("data order", 1, None)
    assert "4 of 8 rows are missing, 4 appear twice" in outcome.mismatch.why


@contextlib.contextmanager
def another_order_in_the_second_epoch():
    opened = Input.open

    def reseeded(self, split, part, *more):
        from scaleray.data.sample_order import StepPlan

        class Later(StepPlan):
            def _order(self, epoch, positions):
                return super()._order(epoch + 7 * (epoch > 0), positions)

        plan = Later(**dataclasses.asdict(part.plan)) if part.world_size > 1 else part.plan
        return opened(self, split, dataclasses.replace(part, plan=plan), *more)

    with mock.patch.object(Input, "open", reseeded):
        yield


def test_another_order_of_the_second_epoch_is_found_at_its_first_step(gloo):
    outcome = gloo.run(2, judge_with, another_order_in_the_second_epoch, Classify())[0]
    assert found(outcome) == ("data order", 5, None)
    assert "belong to other steps" in outcome.mismatch.why


# dropout and other random numbers


class AlwaysNoisy(Classify):
    """Draws random numbers in evaluation mode as well."""

    def loss(self, model, batch):
        x = batch["x"]
        return super().loss(model, {**batch, "x": x + 0.1 * torch.randn_like(x)})


def test_random_numbers_that_cannot_be_switched_off_are_found(gloo):
    outcome = gloo.run(2, judge, AlwaysNoisy(), {})[0]
    assert found(outcome)[:2] == ("dropout or random numbers", 1)
    assert "use nn.Dropout" in outcome.mismatch.why


@contextlib.contextmanager
def one_seed_for_all():
    with mock.patch.object(model_setup, "stream_seed", return_value=7):
        yield


def test_the_same_masks_on_all_ranks_are_found(gloo):
    outcome = gloo.run(2, judge_with, one_seed_for_all, WithDropout())[0]
    assert found(outcome)[:2] == ("dropout or random numbers", 1)
    assert "the same units on each" in outcome.mismatch.why


def test_equal_generators_are_no_mismatch_without_dropout(gloo):
    assert gloo.run(2, judge_with, one_seed_for_all, Classify())[0].verdict == "equal"


@contextlib.contextmanager
def dropout_comes_back():
    """A strategy that turns dropout on again, as one that builds the model anew would."""

    def apply(model, mesh, config, workload):
        for name, module in model.named_children():
            if isinstance(module, nn.Dropout):
                setattr(model, name, nn.Dropout(0.5))
        return ddp.apply(model, mesh, config, workload)

    with broken_strategy(apply):
        yield


def test_dropout_on_one_side_only_is_found(gloo):
    outcome = gloo.run(2, judge_with, dropout_comes_back, WithDropout())[0]
    assert found(outcome)[:2] == ("dropout or random numbers", 1)
    assert "in evaluation mode, both runs agree" in outcome.mismatch.why


# BatchNorm


class HandwrittenNorm(nn.Module):
    """Batch statistics that torch's own class does not announce."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        if not self.training:
            return x - self.mean
        mean = x.mean(dim=0)
        self.mean.lerp_(mean.detach(), 0.1)
        return x - mean


class WithHandwrittenNorm(Classify):
    def build_model(self):
        return nn.Sequential(nn.Linear(NUM_FEATURES, 8), HandwrittenNorm(), nn.Tanh(), nn.Linear(8, NUM_CLASSES))


@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 1), (1, 2)])
def test_batch_statistics_are_found(gloo, world_size, accumulation):
    outcome = gloo.run(world_size, judge, WithHandwrittenNorm(num_rows=32), {}, accumulation)[0]
    assert found(outcome)[:2] == ("BatchNorm statistics", 1)


# schedule


@contextlib.contextmanager
def schedule_steps_once_per_worker():
    build = optimizers.configured_schedule

    def faster(optimizer, config, recipe):
        schedule = build(optimizer, config, recipe)
        step = schedule.step
        schedule.step = lambda: [step() for _ in range(TRAINING_ON[0])]
        return schedule

    with knows_who_trains(), mock.patch.object(optimizers, "configured_schedule", faster):
        yield


def test_a_schedule_that_steps_once_per_worker_is_found(gloo):
    outcome = gloo.run(2, judge_with, schedule_steps_once_per_worker, Classify(), {"schedule.name": "cosine"})[0]
    assert found(outcome)[:2] == ("schedule or learning-rate step count", 2)
    assert "learning rate is" in outcome.mismatch.why


@contextlib.contextmanager
def optimizer_steps_twice():
    build = optimizers.configured_schedule

    def eager(optimizer, config, recipe):
        schedule = build(optimizer, config, recipe)
        step = optimizer.step
        optimizer.step = lambda: [step() for _ in range(TRAINING_ON[0])][-1]
        return schedule

    with knows_who_trains(), mock.patch.object(optimizers, "configured_schedule", eager):
        yield


def test_an_optimizer_that_steps_once_per_worker_is_found(gloo):
    outcome = gloo.run(2, judge_with, optimizer_steps_twice, Classify())[0]
    assert found(outcome)[:2] == ("schedule or learning-rate step count", 1)
    assert "2 updates instead of 1" in outcome.mismatch.why


# initial parameters


class DrawnByWorldSize(Classify):
    """All ranks agree, but not with one process."""

    def build_model(self):
        torch.manual_seed(TRAINING_ON[0])
        return super().build_model()


def test_initial_parameters_that_depend_on_the_world_size_are_found(gloo):
    outcome = gloo.run(2, judge_with, knows_who_trains, DrawnByWorldSize())[0]
    assert found(outcome) == ("initial parameters", 0, "0.weight")


class DrawnByRank(Classify):
    def build_model(self):
        torch.manual_seed(dist.get_rank() if many() else 0)
        return super().build_model()


@contextlib.contextmanager
def keeps_own_parameters():
    def apply(model, mesh, config, workload):
        return Parallel(model=model, module=model)

    with broken_strategy(apply):
        yield


def test_initial_parameters_that_differ_from_rank_to_rank_are_found(gloo):
    outcome = gloo.run(2, judge_with, keeps_own_parameters, DrawnByRank())[0]
    assert found(outcome)[:2] == ("initial parameters", 0)
    assert "0.weight differs between rank 0 and rank 1" in outcome.mismatch.why


# what happens between steps


class Changes(Classify):
    """A callback scales a weight after the second step: on every rank, or on the last alone."""

    def __init__(self, *, everywhere):
        super().__init__()
        self.everywhere = everywhere

    def callbacks(self):
        def on_step(callback, run):
            if run.step == 2 and (self.everywhere or run.rank == run.world_size - 1):
                with torch.no_grad():
                    next(iter(run.model.parameters())).mul_(1.5)

        return [type("Scales", (), {"on_step": on_step})()]


@pytest.mark.parametrize("resumes", [False, True])
def test_what_a_callback_changes_on_every_rank_is_part_of_the_training(gloo, resumes):
    outcome = gloo.run(2, functools.partial(judge, resumes=resumes), Changes(everywhere=True), {}, 1, 4)[0]
    assert outcome.verdict == "equal", outcome


class ChangesOneOfSeveral(Changes):
    def __init__(self):
        super().__init__(everywhere=False)

    def callbacks(self):
        return super().callbacks() if many() else []


def judged_where_one_rank_changes(place):
    with knows_who_trains():
        return judge(place, ChangesOneOfSeveral(), {})


def test_what_a_callback_changes_on_one_rank_is_found_when_the_next_step_begins(gloo):
    outcome = gloo.run(2, judged_where_one_rank_changes)[0]
    assert found(outcome) == ("missing parameter synchronisation", 3, "0.weight")
    assert "between step 2 and the next, as by a callback" in outcome.mismatch.why
