"""Planted mistakes in averages, meetings, checkpoints, final weights, updates and evaluations: what steps alone do not
show."""

from __future__ import annotations

import contextlib
import dataclasses
from unittest import mock

import torch
import torch.distributed as dist
from planted_edits import instead, planted, spoiled
from planted_in_gradients import rows
from small_runs import Classify, WithBatchNorm
from verified import many

from scaleray.data.sample_order import StepPlan
from scaleray.strategies import async_sgd, gossip
from scaleray.strategies.apart.replicas import Replicas
from scaleray.strategies.gossip import Mixing
from scaleray.training.setup.averaging import Averaging
from scaleray.training.setup.model_setup import Setup
from scaleray.training.state import end_of_training, loop_state
from scaleray.training.state import training_state as state_module
from scaleray.training.step.evaluation import Evaluations, Evaluator

NORM, EVALUATED = rows(WithBatchNorm, num_val=21), rows(Classify, num_val=21)
AVERAGE = {"averaging.decay": 0.9}
ADAM = {"optimizer.name": "adamw", "optimizer.momentum": 0.0, "optimizer.learning_rate": 0.01}
NODES = {"local_sgd.sync_every": 4, "local_sgd.node_sync_every": 2, "local_sgd.node_size": 2}
LATE = {"gossip.meet_every": 5, "gossip.max_staleness": 2}
LETTERS = {**LATE, "gossip.is_asynchronous": True}


@contextlib.contextmanager
def after_update(change, *, every=1):
    """`change(setup)` once the optimizer, and what communicates after it, has made a step, where several train."""
    original = Setup.after_step

    def after_step(self, number):
        original(self, number)
        if many() and number % every == 0:
            with torch.no_grad():
                change(self)

    with mock.patch.object(Setup, "after_step", after_step):
        yield


# averages of the weights


@planted(
    "training/setup/averaging.py, in_place", "the average stays in place after an evaluation", "evaluation",
    workload=EVALUATED, flags=AVERAGE,
)  # fmt: skip
def average_stays_in_place():
    @contextlib.contextmanager
    def once(self):
        self.swap()
        yield

    with instead(Averaging, "in_place", lambda original: once):
        yield


@planted(
    "training/state/end_of_training.py, hand_on_weights", "the trained weights are handed on for their average", "weights",
    workload=rows(), flags=AVERAGE,
)  # fmt: skip
def trained_weights_for_the_average():
    with instead(Averaging, "swap", lambda original: lambda self: None):
        yield


@planted(
    "training/setup/averaging.py, after_step", "the average moves once for each worker", "weights",
    workload=rows(), flags=AVERAGE,
)  # fmt: skip
def average_moves_twice():
    def make(original):
        def twice(self, step):
            original(self, step)
            original(self, step)

        return twice

    with instead(Averaging, "after_step", make):
        yield


@planted(
    "training/setup/averaging.py, after_step", "the average lacks the first step", "resume",
    workload=rows(), flags=AVERAGE,
)  # fmt: skip
def average_is_a_step_late():
    def make(original):
        return lambda self, step: original(self, step) if step > 1 else None

    with instead(Averaging, "after_step", make):
        yield


@planted("training/setup/averaging.py, swap", "evaluations measure the trained weights, not their average", "evaluation",
         workload=EVALUATED, flags=AVERAGE)  # fmt: skip
def trained_weights_evaluated():
    with instead(Averaging, "in_place", lambda original: lambda self: contextlib.nullcontext()):
        yield


# replicas


@planted(
    "strategies/apart/replicas.py, weights", "one replica is handed on in place of the mean", "weights",
    strategy="local_sgd", workload=rows(), flags={"local_sgd.sync_every": 7},
)  # fmt: skip
def a_replica_handed_on():
    from scaleray.strategies.contract.weight_shares import whole

    with instead(
        Replicas, "weights", lambda original: lambda self: whole(self.model, keeps=dist.get_rank(self.group) == 0)
    ):
        yield


@planted(
    "strategies/apart/replicas.py, _average_optimizer", "momentum is summed in place of averaged", "averaging",
    strategy="local_sgd", workload=rows(), flags={"local_sgd.sync_every": 3},
)  # fmt: skip
def momentum_is_summed():
    def make(original):
        def summed(self, group):
            original(self, group)
            for _, tensor in self._optimizer_tensors():
                tensor.mul_(dist.get_world_size(group))

        return summed

    with instead(Replicas, "_average_optimizer", make):
        yield


@planted(
    "strategies/local_sgd.py, average", "momentum is averaged though average_momentum is off", "averaging",
    strategy="local_sgd", workload=rows(), flags={"local_sgd.sync_every": 3, "local_sgd.average_momentum": False},
)  # fmt: skip
def momentum_averaged_though_off():
    def make(original):
        return lambda self, *, with_momentum=False, **more: original(self, with_momentum=True, **more)

    with instead(Replicas, "average", make):
        yield


@planted(
    "strategies/local_sgd.py, after_update", "nodes average over all workers", "averaging",
    strategy="local_sgd", world_size=4, workload=rows(), flags=NODES,
)  # fmt: skip
def nodes_average_over_all():
    def make(original):
        return lambda self, *, group=None, **more: original(self, group=None, **more)

    with instead(Replicas, "average", make):
        yield


@planted(
    "strategies/local_sgd.py, after_update", "nodes do not average", "averaging",
    strategy="local_sgd", world_size=4, workload=rows(), flags=NODES,
)  # fmt: skip
def nodes_do_not_average():
    def make(original):
        return lambda self, *, group=None, **more: original(self, group=group, **more) if group is None else None

    with instead(Replicas, "average", make):
        yield


@planted(
    "strategies/async_sgd.py, _take", "a worker's own update counts twice", "averaging",
    strategy="async_sgd", workload=rows(), flags=LATE,
)  # fmt: skip
def own_update_twice():
    def make(original):
        return lambda self, update: Replicas.fill(
            self.replicas.trained, Replicas.flat(self.replicas.trained).add_(update.total)
        )

    with instead(async_sgd.Updates, "_take", make):
        yield


@planted(
    "strategies/async_sgd.py, step", "a worker's own update is not scaled to its part", "averaging",
    strategy="async_sgd", workload=rows(), flags=LATE,
)  # fmt: skip
def own_update_is_whole():
    def make(original):
        def step(self, number):
            values = Replicas.flat(self.replicas.trained)
            moved = values - self._before
            original(self, number)
            Replicas.fill(self.replicas.trained, Replicas.flat(self.replicas.trained) + moved / 2)

        return step

    with instead(async_sgd.Updates, "step", make):
        yield


@planted(
    "strategies/async_sgd.py, synchronise", "a meeting drops what is under way", "averaging",
    strategy="async_sgd", workload=rows(), flags={**LATE, "deterministic": True},
)  # fmt: skip
def meeting_drops_updates():
    def make(original):
        def synchronise(self):
            self.outstanding._queue.clear()
            self.replicas.average(measures=False)

        return synchronise

    with instead(async_sgd.Updates, "synchronise", make):
        yield


@planted(
    "strategies/gossip.py, _exchange", "a sender keeps the weight that it gives away", "averaging",
    strategy="gossip", workload=rows(), flags=LETTERS,
)  # fmt: skip
def weight_kept_and_given():
    def make(original):
        def exchange(self, matrix):
            weight = self.weight.clone()
            original(self, matrix)
            self.weight = weight

        return exchange

    with instead(Mixing, "_exchange", make):
        yield


@planted(
    "strategies/gossip.py, _mix", "what arrives late counts half", "averaging",
    strategy="gossip", workload=rows(), flags=LETTERS,
)  # fmt: skip
def late_letters_count_half():
    def make(original):
        def mix(self, letter):
            original(self, dataclasses.replace(letter, received=[_halved(values) for values in letter.received]))

        return mix

    def _halved(values):
        return torch.cat([values[:-1], values[-1:] / 2])

    with instead(Mixing, "_mix", make):
        yield


@planted(
    "strategies/gossip.py, step", "every rank draws pairs of its own", "averaging",
    strategy="gossip", world_size=4, workload=rows(), flags={"gossip.graph": "exponential"},
)  # fmt: skip
def other_weights_than_the_graph():
    def make(original):
        def other(graph, size, step, *, seed):
            return original(graph, size, step + 1, seed=seed)

        return other

    with instead(gossip, "mixing_matrix", make):
        yield


# schedules


@planted(
    "training/setup/model_setup.py, after_step", "the schedule moves twice in a meeting", "schedule",
    strategy="local_sgd", workload=rows(), flags={"local_sgd.sync_every": 4},
)  # fmt: skip
def schedule_moves_twice_in_a_meeting():
    with after_update(lambda setup: setup.schedule.step(), every=4):
        yield


@planted("training/setup/model_setup.py, after_step", "the schedule stands still in every fifth step", "schedule",
         workload=rows())  # fmt: skip
def schedule_stands_still():
    original = Setup.after_step

    def after_step(self, number):
        if many() and number % 5 == 0:
            self.averaging.after_step(number)
        else:
            original(self, number)

    with mock.patch.object(Setup, "after_step", after_step):
        yield


@planted("training/setup/model_setup.py, after_step", "the last worker's learning rate is half as large", "parameters",
         workload=rows())  # fmt: skip
def a_rate_of_its_own():
    def halve(setup):
        if dist.get_rank() == 1:
            for group in setup.optimizer.param_groups:
                group["lr"] = group["lr"] / 2

    with after_update(halve):
        yield


# the optimizer


@planted("training/step/step.py", "weight decay acts once for each worker", "update",
         workload=rows(), flags={"optimizer.weight_decay": 0.1, **ADAM})  # fmt: skip
def decay_once_for_each_worker():
    def decay(setup):
        for group in setup.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - 0.001)

    with after_update(decay):
        yield


@planted("training/setup/optimizers.py", "Adam counts its steps for each worker", "update",
         workload=rows(), flags=ADAM)  # fmt: skip
def adam_counts_workers():
    def count(setup):
        for entries in setup.optimizer.state.values():
            entries["step"] += 1

    with after_update(count):
        yield


@planted("training/step/step.py", "momentum is forgotten in every fourth step", "update",
         workload=rows())  # fmt: skip
def momentum_forgotten():
    def forget(setup):
        for entries in setup.optimizer.state.values():
            if entries.get("momentum_buffer") is not None:
                entries["momentum_buffer"].zero_()

    with after_update(forget, every=4):
        yield


@planted("strategies/zero1.py, send_updates", "the first parameter of the last worker is sent before its update",
         "parameters", strategy="zero1", workload=rows())  # fmt: skip
def an_update_sent_too_early():
    def change(setup):
        if dist.get_rank() == 1:
            next(iter(setup.parallel.module.parameters())).mul_(1 + 1e-3)

    with after_update(change, every=3):
        yield


# checkpoints


@planted("training/state/state.py, model_state", "a checkpoint has the buffers of the start", "resume",
         workload=NORM)  # fmt: skip
def buffers_of_the_start_saved():
    def make(original):
        def fresh(module):
            tensors, extra = original(module)
            names = {f"model.{name}" for name, _ in module.named_buffers()}
            return {n: torch.zeros_like(t) if n in names else t for n, t in tensors.items()}, extra

        return fresh

    with instead(state_module, "model_state", make):
        yield


@planted("training/state/optimizer_state.py, optimizer_state", "a checkpoint has half of the momentum", "resume",
         workload=rows())  # fmt: skip
def half_of_the_momentum_saved():
    def make(original):
        def halved(optimizer, module):
            tensors, values = original(optimizer, module)
            return {n: t / 2 if n.endswith("momentum_buffer") else t for n, t in tensors.items()}, values

        return halved

    with instead(state_module, "optimizer_state", make):
        yield


@planted("strategies/apart/replicas.py, averaged", "a checkpoint has one replica's momentum", "resume",
         strategy="local_sgd", workload=rows(), flags={"local_sgd.sync_every": 7})  # fmt: skip
def a_replicas_momentum_saved():
    with instead(Replicas, "averaged", lambda original: lambda self, with_optimizer: original(self, False)):
        yield


@planted("training/state/loop_state.py, values", "the position in a checkpoint is a batch ahead", "rows",
         workload=rows())  # fmt: skip
def position_a_batch_ahead():
    def make(original):
        def ahead(self):
            found = original(self)
            return {**found, "sample_in_epoch": found["sample_in_epoch"] + found["global_batch_size"]}

        return ahead

    with instead(loop_state.LoopCheckpoint, "values", make):
        yield


@planted("training/state/state.py, capture", "a checkpoint is rounded to bf16", "resume", workload=rows())  # fmt: skip
def checkpoint_rounded():
    def make(original):
        def rounded(module):
            tensors, extra = original(module)
            return {n: t.bfloat16().to(t.dtype) if t.is_floating_point() else t for n, t in tensors.items()}, extra

        return rounded

    with instead(state_module, "model_state", make):
        yield


@planted("training/state/end_of_training.py, hand_on_weights", "the final weights are rounded to bf16", "weights",
         workload=rows())  # fmt: skip
def final_weights_rounded():
    def make(original):
        def rounded(share, settings):
            found = original(share, settings)
            return dataclasses.replace(found, tensors={n: v.bfloat16().to(v.dtype) for n, v in found.tensors.items()})

        return rounded

    with instead(end_of_training, "merged_share", make):
        yield


@planted("strategies/contract/weight_shares.py, share_of", "the last worker's shards are missing in the final weights",
         "weights", strategy="fsdp", workload=rows())  # fmt: skip
def shards_missing_at_the_end():
    def make(original):
        def first_only(share, settings):
            found = original(share, settings)
            return dataclasses.replace(found, tensors={}) if dist.get_rank() == 1 else found

        return first_only

    with instead(end_of_training, "merged_share", make):
        yield


# evaluations


@planted("training/step/evaluation.py, _measure", "evaluations are computed in bf16", "evaluation",
         workload=EVALUATED)  # fmt: skip
def evaluated_in_bf16():
    def make(original):
        def narrow(self, batch):
            found = original(self, batch)
            return {n: (t.bfloat16().to(t.dtype), c) for n, (t, c) in found.items()}

        return narrow

    with instead(Evaluator, "_measure", make):
        yield


@planted("strategies/ddp.py, share_buffers", "the last worker's statistics are evaluated and saved", "norm",
         workload=NORM)  # fmt: skip
def statistics_of_the_last_worker():
    def change(parallel, *, model, mesh, config):
        if mesh is None:
            return parallel
        group = mesh.get_group("dp")

        def share():
            for buffer in model.buffers():
                dist.broadcast(buffer, group=group, group_src=dist.get_world_size(group) - 1)

        return dataclasses.replace(parallel, before_evaluation=share)

    with spoiled("ddp", change):
        yield


@planted("training/step/evaluation.py, run", "the last batch of a split is left out", "evaluation",
         workload=EVALUATED)  # fmt: skip
def last_batch_not_evaluated():
    def make(original):
        return lambda self: list(original(self))[:-1] or list(original(self))

    with instead(Evaluator, "_batches", make):
        yield


@planted("training/step/evaluation.py, run", "an evaluation changes the weights by a rounding to bf16", "evaluation",
         workload=EVALUATED)  # fmt: skip
def evaluation_changes_the_weights():
    def make(original):
        def run(self, step):
            found = original(self, step)
            with torch.no_grad():
                for parameter in self.setup.parallel.module.parameters():
                    parameter.copy_(parameter.bfloat16())
            return found

        return run

    with instead(Evaluations, "run", make):
        yield


# rows


@planted("data/sample_order.py, rank_slice", "the rows that do not divide come twice", "rows", workload=rows())  # fmt: skip
def rest_of_a_batch_twice():
    def make(original):
        def padded(self, step, rank, world_size, shares=None):
            total = self.num_rows(step)
            share = -(-total // world_size)
            start = min(rank * share, total - share)
            return slice(start, start + share)

        return padded

    with instead(StepPlan, "rank_slice", make):
        yield


@planted("data/sample_order.py, _order", "every epoch has the order of the first", "rows", workload=rows())  # fmt: skip
def one_order_for_all_epochs():
    with instead(StepPlan, "_order", lambda original: lambda self, epoch, positions: original(self, 0, positions)):
        yield
