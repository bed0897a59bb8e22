"""Planted mistakes beside the gradients: rows, random numbers, statistics, evaluation, schedules, resumes."""

from __future__ import annotations

import contextlib
import dataclasses
from unittest import mock

import torch
import torch.distributed as dist
from planted_edits import instead, planted, spoiled
from planted_in_gradients import rows
from small_runs import Classify, WithBatchNorm, WithDropout
from small_transformer import SmallTransformer
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from scaleray.data.sample_order import Origin, StepPlan
from scaleray.strategies.apart.replicas import Replicas
from scaleray.strategies.pipeline import apply as pipeline
from scaleray.training import loop
from scaleray.training.setup import model_setup, optimizers
from scaleray.training.setup.job import TrainJob
from scaleray.training.state import training_state as state_module
from scaleray.training.state.optimizer_state import Rates
from scaleray.training.state.training_state import TrainState
from scaleray.training.step.evaluation import Evaluator, NamedSums
from scaleray.training.step.step import TrainStep

DROPOUT, NORM = rows(WithDropout), rows(WithBatchNorm, num_val=21)
EVALUATED = rows(Classify, num_val=21)
ADAM = {"optimizer.name": "adamw", "optimizer.momentum": 0.0, "optimizer.learning_rate": 0.01}


# rows


@planted(
    "data/sample_order.py, rank_slice",
    "the rows that do not divide a partial batch are left out",
    "rows",
    workload=rows(),
)
def rest_of_a_partial_batch_left_out():
    def make(original):
        def even(self, step, rank, world_size, shares=None):
            share = self.num_rows(step) // world_size
            return slice(rank * share, (rank + 1) * share)

        return even

    with instead(StepPlan, "rank_slice", make):
        yield


@planted(
    "data/sample_order.py, _order",
    "the order of later epochs depends on the number of workers",
    "rows",
    workload=rows(),
)
def later_epochs_in_another_order():
    with instead(
        StepPlan,
        "_order",
        lambda original: lambda self, epoch, positions: original(self, epoch + 7 * (epoch > 0), positions),
    ):
        yield


@planted(
    "training/loop.py, Part",
    "the last stage reads other rows than the first",
    "rows",
    strategy="pipeline",
    workload=rows(SmallTransformer),
)
def stages_read_other_rows():
    def make(original):
        def other(plan, *args):
            return original(dataclasses.replace(plan, seed=plan.seed + dist.get_rank()), *args)

        return other

    with instead(loop, "Part", make):
        yield


# random numbers


def named_by(change):
    """Seeds of dropout get other names."""

    def make(original):
        return lambda seed, *names: original(seed, *(change(*names) if names[:1] == ("dropout",) else names))

    return make


@planted("training/setup/model_setup.py, seeds", "all replicas draw the same dropout masks", "random", workload=DROPOUT)
def same_masks_on_all_replicas():
    with instead(model_setup, "stream_seed", named_by(lambda *names: names[:1])):
        yield


@planted(
    "training/setup/model_setup.py, seeds",
    "workers of one replica draw different dropout masks",
    "random",
    strategy="tensor",
    workload=DROPOUT,
)
def other_masks_within_a_replica():
    with instead(model_setup, "stream_seed", named_by(lambda *names: (*names, dist.get_rank()))):
        yield


@planted(
    "training/state/state.py, restore",
    "after a resume on other workers all replicas draw the same masks",
    "random",
    workload=DROPOUT,
)
def same_masks_after_a_resume():
    with instead(state_module, "stream_seed", named_by(lambda kind, rank, step: (kind, step))):
        yield


@planted("training/step/step.py, launch", "the generator begins anew in every step", "random", workload=DROPOUT)
def same_masks_in_every_step():
    def make(original):
        def again(self, *args, **kwargs):
            torch.manual_seed(dist.get_rank())
            return original(self, *args, **kwargs)

        return again

    with instead(TrainStep, "launch", make):
        yield


@planted(
    "strategies/pipeline/apply.py, _mixed",
    "all micro-batches of a step have the same masks",
    "random",
    strategy="pipeline",
    workload=DROPOUT,
)
def same_masks_for_micro_batches():
    with instead(pipeline, "_mixed", lambda original: lambda seed, number, stage: original(seed, 0, stage)):
        yield


# statistics


@planted(
    "strategies/ddp.py, share_buffers", "ranks keep statistics of their own, in evaluations too", "norm", workload=NORM
)
def statistics_of_each_rank():
    def own(parallel, **_):
        parallel.model.broadcast_buffers = False
        return dataclasses.replace(parallel, before_evaluation=lambda: None)

    with spoiled("ddp", own):
        yield


@planted("strategies/ddp.py, apply", "statistics move twice in a step", "norm", workload=NORM)
def statistics_move_twice():
    def make(original):
        def twice(self, run, piece):
            with torch.no_grad():
                run(lambda model: self.workload.loss(model, piece.batch))
            return original(self, run, piece)

        return twice

    with instead(TrainStep, "_objective", make):
        yield


# evaluation


@planted(
    "training/step/evaluation.py, run",
    "the placeholder of a rank without rows is measured",
    "evaluation",
    workload=rows(Classify, num_val=17),
    world_size=4,
)
def placeholder_is_measured():
    def make(original):
        return lambda self: [dataclasses.replace(batch, num_rows=max(1, batch.num_rows)) for batch in original(self)]

    with instead(Evaluator, "_batches", make):
        yield


def evaluating(change):
    """Workers bring `change(sums)` where the sums and counts of an evaluation are added up."""
    return instead(NamedSums, "__call__", lambda original: lambda self, own: original(self, change(own)))


@planted("training/step/evaluation.py, run", "the ranks' means are averaged", "evaluation", workload=EVALUATED)
def evaluation_averages_means():
    with evaluating(lambda own: {name: (total / max(count, 1.0), 1.0) for name, (total, count) in own.items()}):
        yield


@planted(
    "training/step/evaluation.py, run", "only rank 0's part of the split is measured", "evaluation", workload=EVALUATED
)
def evaluation_of_one_part():
    with evaluating(lambda own: {name: pair if dist.get_rank() == 0 else (0.0, 0.0) for name, pair in own.items()}):
        yield


@planted(
    "strategies/apart/replicas.py, averaged",
    "a replica is evaluated in place of their mean",
    "evaluation",
    strategy="local_sgd",
    workload=EVALUATED,
    flags={"local_sgd.sync_every": 7},
)
def evaluation_of_a_replica():
    def make(original):
        return lambda self, with_optimizer: original(self, True) if with_optimizer else contextlib.nullcontext()

    with instead(Replicas, "averaged", make):
        yield


# schedules


@planted(
    "training/setup/optimizers.py, configured_schedule",
    "the schedule moves once for each worker",
    "schedule",
    workload=rows(),
)
def schedule_once_per_worker():
    class Faster(LambdaLR):
        def step(self, epoch=None):
            for _ in range(dist.get_world_size()):
                super().step()

    def make(original):
        def faster(*args):
            schedule = original(*args)
            schedule.__class__ = Faster
            return schedule

        return faster

    with instead(optimizers, "configured_schedule", make):
        yield


@planted(
    "training/state/optimizer_state.py, put_back",
    "the schedule is one step ahead after a change of the batch size",
    "schedule",
    workload=rows(),
    strikes_alone=True,
)
def schedule_one_step_ahead():
    put_back = Rates.put_back
    with mock.patch.object(
        Rates, "put_back", lambda self, setup, *, position: put_back(self, setup, position=position + 1)
    ):
        yield


@planted(
    "training/state/optimizer_state.py, put_back",
    "the schedule begins anew on other workers",
    "schedule",
    workload=rows(),
)
def schedule_begins_anew():
    with instead(
        Rates, "put_back", lambda original: lambda self, setup, *, position: original(self, setup, position=0)
    ):
        yield


# resumes on other numbers of workers


def after_restore(change):
    """`change(state)` is called when a checkpoint of another number of workers has been loaded."""

    def make(original):
        def restore(self, manifest, load):
            original(self, manifest, load)
            if manifest.world_size != self.place.world_size:
                change(self)

        return restore

    return instead(TrainState, "restore", make)


@planted(
    "training/state/state.py, restore",
    "the optimizer's state is not restored on other workers",
    "resume",
    workload=rows(),
    flags=ADAM,
)
def optimizer_not_restored():
    with after_restore(lambda state: state.setup.optimizer.state.clear()):
        yield


@planted(
    "checkpoints/sharded.py, load",
    "shards of another number of workers are loaded upside down",
    "resume",
    strategy="fsdp",
    workload=rows(),
)
def shards_in_the_wrong_place():
    def turn(state):
        with torch.no_grad():
            parameter = next(p for p in state.setup.parallel.module.parameters() if isinstance(p, DTensor))
            local = parameter.to_local()
            local.copy_(local.flip(0).clone())

    with after_restore(turn):
        yield


@planted(
    "training/state/optimizer_state.py, optimizer_state",
    "a checkpoint has rank 0's part of the optimizer's state only",
    "resume",
    strategy="zero1",
    workload=rows(),
    flags=ADAM,
)
def state_of_one_rank_saved():
    def make(original):
        def first_only(optimizer, module):
            tensors, values = original(optimizer, module)
            return ({} if dist.get_rank() else tensors), values

        return first_only

    with instead(state_module, "optimizer_state", make):
        yield


@planted("training/setup/job.py, continued", "a resume on other workers leaves out a batch", "rows", workload=rows())
def resume_leaves_out_a_batch():
    def make(original):
        def later(self, progress):
            job = original(self, progress)
            if job.origin is None:
                return job
            origin = Origin(job.origin.step, job.origin.epoch, job.origin.sample + self.recipe.global_batch_size)
            return dataclasses.replace(job, origin=origin)

        return later

    with instead(TrainJob, "continued", make):
        yield


@planted(
    "training/state/state.py, restore",
    "the mean of replicas is not what other workers start from",
    "resume",
    strategy="local_sgd",
    workload=rows(),
    flags={"local_sgd.sync_every": 7},
)
def replica_saved_for_the_mean():
    def make(original):
        return lambda self, with_optimizer: contextlib.nullcontext() if with_optimizer else original(self, False)

    with instead(Replicas, "averaged", make):
        yield
