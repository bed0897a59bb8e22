"""Planted mistakes of somebody who has read the training and not the checks of `scaleray verify`.

Classes were named before anything was measured; `misnamed` says what was measured since.
"""

from __future__ import annotations

import contextlib
import dataclasses
from unittest import mock

import torch
import torch.distributed as dist
from planted_edits import instead, planted, spoiled
from planted_in_gradients import rows
from planted_in_state import ADAM, AVERAGE, LATE, LETTERS, after_update
from small_runs import Classify, Tokens, WithBatchNorm, WithDropout
from small_transformer import SmallTransformer
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.swa_utils import get_ema_multi_avg_fn
from verified import TRAINING_ON, many

from scaleray.common.seeding import seed_everything
from scaleray.data.sample_order import StepPlan
from scaleray.strategies import STRATEGIES, async_sgd, fsdp, zero1
from scaleray.strategies.apart.replicas import Replicas
from scaleray.strategies.compression import hook as compression
from scaleray.strategies.contract.weight_shares import WeightShare
from scaleray.strategies.gossip import Mixing
from scaleray.strategies.pipeline.apply import Pipeline
from scaleray.strategies.pipeline.parts import Parts
from scaleray.training import loop
from scaleray.training.setup import averaging, large_batch_optimizers, model_setup, optimizers
from scaleray.training.setup.averaging import Averaging
from scaleray.training.state import end_of_training, loop_state
from scaleray.training.state import training_state as state_module
from scaleray.training.state.training_state import TrainState
from scaleray.training.step import evaluation
from scaleray.training.step.evaluation import Evaluations, Evaluator, NamedSums
from scaleray.training.step.step import GuardedUpdate, TrainStep

CLIP = {"optimizer.clip_norm": 0.3}
NORM, DROPOUT = rows(WithBatchNorm, num_val=21), rows(WithDropout)
EVALUATED, EVALUATED_DROPOUT = rows(Classify, num_val=21), rows(WithDropout, num_val=21)
APART = {"strategy": "local_sgd", "workload": rows(), "flags": {"local_sgd.sync_every": 3}}
TRANSFORMER = rows(SmallTransformer)
TOPK = {"compression.name": "topk", "compression.density": 0.2}


def before_update(change):
    """`change(step)` when gradients are complete, and nobody has looked at them yet."""

    def make(original):
        def update(self, *args, **kwargs):
            with torch.no_grad():
                change(self)
            return original(self, *args, **kwargs)

        return update

    return instead(TrainStep, "_update", make)


def built_otherwise(change):
    """`change(group)` for each group of an optimizer that was just built."""

    def make(original):
        def build(*args, **kwargs):
            optimizer, in_use = original(*args, **kwargs)
            for group in optimizer.param_groups:
                change(group)
            return optimizer, in_use

        return build

    return instead(optimizers, "build", make)


def resumed_otherwise(change):
    """`change(state)` whenever several workers have loaded a checkpoint, whoever wrote it."""

    def make(original):
        def restore(self, *args):
            original(self, *args)
            change(self)

        return restore

    return instead(TrainState, "restore", make)


@contextlib.contextmanager
def configured_otherwise(strategy, section, change):
    """The strategy takes `change(settings)` for what a section of the config asks for."""
    apply = STRATEGIES[strategy]

    def other(model, mesh, config, workload):
        settings = getattr(config, section)
        changed = settings.model_copy(update=change(settings))
        return apply(model, mesh, config.model_copy(update={section: changed}), workload)

    with mock.patch.dict(STRATEGIES, {strategy: other}):
        yield


def gradients_of(step):
    return [p.grad for p in step.setup.parameters if p.grad is not None]


# losses and accumulation


@planted("training/step/step.py, _objective", "each micro-batch divides by the tokens that it counts", "count",
         workload=rows(Tokens))  # fmt: skip
def means_of_micro_batches_averaged():
    def make(original):
        def own_mean(self, run, piece):
            before = float(self._totals[1])
            scaled = original(self, run, piece)
            counted = float(self._totals[1]) - before
            return scaled * (float(self._count_per_row) * piece.weight / counted) if counted else scaled

        return own_mean

    with instead(TrainStep, "_objective", make):
        yield


@planted("training/step/step.py, _on_device", "gradients are cleared before each micro-batch", "accumulation",
         workload=rows())  # fmt: skip
def cleared_before_each_micro_batch():
    def make(original):
        def cleared(self, *args):
            for parameter in self.setup.parameters:
                parameter.grad = None
            return original(self, *args)

        return cleared

    with instead(TrainStep, "_on_device", make):
        yield


@planted("training/step/step.py, _run_micro_batches", "the loss is divided by the number of micro-batches, too",
         "accumulation", workload=rows(),
         misnamed="loss normalisation")  # fmt: skip
def divided_by_micro_batches():
    def make(original):
        def smaller(self, batch, **kwargs):
            self._scale /= max(1, -(-batch.num_rows // self.recipe.micro_batch_size))
            return original(self, batch, **kwargs)

        return smaller

    with instead(TrainStep, "_run_micro_batches", make):
        yield


@planted("strategies/pipeline/apply.py, _run_micro_batches", "a pipeline averages over its micro-batches",
         "accumulation", strategy="pipeline", workload=TRANSFORMER,
         misnamed="loss normalisation")  # fmt: skip
def pipeline_averages_micro_batches():
    def make(original):
        def averaged(self, pieces, objective, autocast):
            return original(self, pieces, lambda run, piece: objective(run, piece) / len(pieces), autocast)

        return averaged

    with instead(Pipeline, "_run_micro_batches", make):
        yield


@planted("training/step/step.py, launch", "a tenth of the gradient of the step before is still there", "accumulation",
         workload=rows())  # fmt: skip
def gradient_of_before_not_cleared():
    kept = {}

    def add(step):
        for number, gradient in enumerate(gradients_of(step)):
            new = gradient.clone()
            if step.num_updates and number in kept:
                gradient.add_(kept[number], alpha=0.1)
            kept[number] = new

    with before_update(add):
        yield


@planted("training/step/step.py, _update", "a partial batch is divided by the rows of a full one", "count",
         workload=rows())  # fmt: skip
def partial_batch_over_full_rows():
    def make(original):
        def full(self, s, c, *, correction, num_rows, **kwargs):
            correction = correction * num_rows / self.recipe.global_batch_size
            return original(self, s, c, correction=correction, num_rows=num_rows, **kwargs)

        return full

    with instead(TrainStep, "_update", make):
        yield


@planted("training/step/step.py, _update", "padded tokens count in the divisor of the gradient", "count",
         workload=rows(Tokens))  # fmt: skip
def padding_counts():
    def make(original):
        def padded(self, s, c, *, correction, num_rows, **kwargs):
            correction = correction * c / (num_rows * Tokens.length)
            return original(self, s, c, correction=correction, num_rows=num_rows, **kwargs)

        return padded

    with instead(TrainStep, "_update", make):
        yield


@planted("training/step/step.py, _update", "the reported loss is that of each worker's own rows", "count",
         workload=rows())  # fmt: skip
def own_loss_reported():
    own = []

    def keep(original):
        def run(self, *args, **kwargs):
            own[:] = original(self, *args, **kwargs)
            return own[0], own[1]

        return run

    def make(original):
        return lambda self, s, c, **kwargs: original(self, own[0] / max(1.0, own[1]) * c, c, **kwargs)

    with instead(TrainStep, "_run_micro_batches", keep), instead(TrainStep, "_update", make):
        yield


# sums over workers


@planted("strategies/ddp.py, no_sync", "the context of micro-batches is never left", "sync", workload=rows())
def no_sync_is_never_left():
    def change(parallel, **_):
        @contextlib.contextmanager
        def stays():
            parallel.model.require_backward_grad_sync = False
            yield

        return dataclasses.replace(parallel, no_sync=stays)

    with spoiled("ddp", change):
        yield


@planted("strategies/ddp.py, apply", "a communication hook sums and does not average", "double", workload=rows())
def hook_sums():
    def send(state, bucket):
        done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return done.then(lambda future: future.value()[0])

    def change(parallel, **_):
        parallel.model.register_comm_hook(None, send)
        return parallel

    with spoiled("ddp", change):
        yield


@planted("strategies/ddp.py, apply", "a step takes the sums of the step before, whose future was not waited for",
         "sync", workload=rows())  # fmt: skip
def sums_of_the_step_before():
    kept = {}

    def swap(step):
        for number, gradient in enumerate(gradients_of(step)):
            new = gradient.clone()
            if step.num_updates and number in kept:
                gradient.copy_(kept[number])
            kept[number] = new

    with before_update(swap):
        yield


@planted("strategies/ddp.py, apply", "gradients of biases are summed once more after the backward pass", "double",
         workload=rows())  # fmt: skip
def biases_summed_again():
    def again(step):
        for gradient in gradients_of(step):
            if gradient.ndim == 1:
                dist.all_reduce(gradient)

    with before_update(again):
        yield


@planted("strategies/fsdp.py, apply", "the last row of each shard is taken for padding and gets no gradient", "sync",
         strategy="fsdp", workload=rows())  # fmt: skip
def last_row_taken_for_padding():
    def clear(step):
        for gradient in gradients_of(step):
            local = gradient.to_local()
            if local.numel():
                local[-1] = 0

    with before_update(clear):
        yield


@planted("strategies/fsdp.py, apply", "each of two workers gets the sum for the other's shard", "sync",
         strategy="fsdp", workload=rows())  # fmt: skip
def sums_for_the_other_shard():
    def swap(step):
        for gradient in gradients_of(step):
            if gradient.shape[0] % dist.get_world_size():
                continue
            local = gradient.to_local()
            everyone = [torch.empty_like(local) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, local.contiguous())
            local.copy_(everyone[dist.get_rank() - 1])

    with before_update(swap):
        yield


@planted("strategies/tensor.py, apply", "gradients of what lies on every worker are summed over the group", "double",
         strategy="tensor", workload=TRANSFORMER)  # fmt: skip
def replicated_gradients_summed():
    def twice(step):
        for gradient in gradients_of(step):
            if isinstance(gradient, DTensor) and all(isinstance(p, Replicate) for p in gradient.placements):
                gradient.to_local().mul_(2)

    with before_update(twice):
        yield


@planted("strategies/tensor.py, _split_layers", "each worker adds the bias of a layer that is split by rows", "double",
         strategy="tensor", workload=rows(),
         misnamed="not recognised")  # fmt: skip
def bias_added_by_each_worker():
    def change(parallel, *, model, **_):
        def add(module, inputs, output):
            bias = module.bias.full_tensor() if isinstance(module.bias, DTensor) else module.bias
            return output + bias

        model[2].register_forward_hook(add)
        return parallel

    with spoiled("tensor", change):
        yield


@planted("strategies/tensor.py, _complete", "gradients from parts of a sequence are not summed", "sync",
         strategy="tensor", workload=TRANSFORMER)  # fmt: skip
def parts_of_a_sequence_not_summed():
    def halve(step):
        for name, parameter in step.setup.parallel.module.named_parameters():
            gradient = parameter.grad
            if "norm" in name and isinstance(gradient, DTensor):
                # what one of the workers has alone, which differs between them
                local = gradient.to_local()
                local.mul_(0.4 if dist.get_rank() else 0.6)

    with before_update(halve):
        yield


# clipping


@planted("strategies/contract/parallel.py, total_norm", "the largest norm of a parameter is taken for the whole", "clip",
         workload=rows(), flags=CLIP)  # fmt: skip
def largest_norm_for_the_whole():
    def largest(gradients):
        return torch.stack([g.norm() for g in gradients]).max()

    with spoiled("ddp", lambda parallel, **_: dataclasses.replace(parallel, total_norm=largest)):
        yield


@planted("strategies/fsdp.py, total_norm", "squared norms of shards are averaged", "clip", strategy="fsdp",
         workload=rows(), flags=CLIP)  # fmt: skip
def squares_averaged():
    def smaller(gradients):
        return fsdp.total_norm(gradients) / dist.get_world_size() ** 0.5

    with spoiled("fsdp", lambda parallel, **_: dataclasses.replace(parallel, total_norm=smaller)):
        yield


@planted("strategies/zero1.py, apply", "a worker clips by the norm of what its optimizer has", "clip",
         strategy="zero1", workload=rows(), flags=CLIP)  # fmt: skip
def norm_of_owned_parameters():
    def change(parallel, *, model, **_):
        def of_own(gradients):
            return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if parallel.owns(p)])

        return dataclasses.replace(parallel, total_norm=of_own)

    with spoiled("zero1", change):
        yield


@planted("training/step/step.py, _update", "the limit of the norm is scaled by the workers", "clip", workload=rows(),
         flags=CLIP)  # fmt: skip
def limit_scaled_by_workers():
    def make(original):
        def update(self, *args, **kwargs):
            config = self.config
            if config.optimizer.clip_norm is None:
                return original(self, *args, **kwargs)
            limit = config.optimizer.clip_norm * TRAINING_ON[0]
            self.config = config.model_copy(
                update={"optimizer": config.optimizer.model_copy(update={"clip_norm": limit})}
            )
            try:
                return original(self, *args, **kwargs)
            finally:
                self.config = config

        return update

    with instead(TrainStep, "_update", make):
        yield


@planted("strategies/pipeline/parts.py, total_norm", "a worker clips by the norm of its own stages", "clip",
         strategy="pipeline", workload=TRANSFORMER, flags=CLIP)  # fmt: skip
def norm_of_own_stages():
    with instead(Parts, "total_norm", lambda original: lambda self, g: torch.nn.utils.get_total_norm(g)):
        yield


@planted("training/step/step.py, _update", "the norm is taken before the gradient is corrected by the count", "clip",
         workload=rows(Tokens), flags=CLIP)  # fmt: skip
def norm_before_the_correction():
    def make(original):
        def update(self, *args, correction, **kwargs):
            parallel = self.setup.parallel
            raw = dataclasses.replace(parallel, total_norm=lambda g: parallel.total_norm(g) / float(correction))
            with mock.patch.object(self, "setup", dataclasses.replace(self.setup, parallel=raw)):
                return original(self, *args, correction=correction, **kwargs)

        return update

    with instead(TrainStep, "_update", make):
        yield


# the optimizer


@planted("training/setup/optimizers.py, _configured", "weight decay is part of AdamW's gradient", "update",
         workload=rows(), flags={"optimizer.weight_decay": 0.1, **ADAM})  # fmt: skip
def decay_in_the_gradient():
    def decay(step):
        for group in step.setup.optimizer.param_groups:
            group["weight_decay"] = 0.0
            for parameter in group["params"]:
                parameter.grad.add_(parameter, alpha=0.1)

    with before_update(decay):
        yield


@planted("training/setup/optimizers.py, build", "groups over shards lose their weight decay", "update",
         strategy="fsdp", workload=rows(), flags={"optimizer.weight_decay": 0.1, **ADAM})  # fmt: skip
def shards_without_decay():
    with built_otherwise(lambda group: group.update(weight_decay=0.0)):
        yield


@planted("training/setup/large_batch_optimizers.py, norms_of_whole", "LARS takes norms of a worker's own shards",
         "update", strategy="fsdp", workload=rows(),
         flags={"optimizer.name": "lars", "optimizer.trust_coefficient": 0.1})  # fmt: skip
def layer_norms_of_shards():
    def make(original):
        return lambda parts, like: torch.stack([p.norm().double() for p in parts])

    with instead(large_batch_optimizers, "norms_of_whole", make):
        yield


@planted("training/setup/optimizers.py, build", "Nesterov's momentum becomes a plain one", "update", workload=rows(),
         flags={"optimizer.nesterov": True})  # fmt: skip
def nesterov_lost():
    with built_otherwise(lambda group: group.update(nesterov=False)):
        yield


@planted("training/setup/optimizers.py, build", "the momentum is given as dampening as well", "update",
         workload=rows())  # fmt: skip
def momentum_dampens():
    with built_otherwise(lambda group: group.update(dampening=0.9)):
        yield


@planted("training/setup/optimizers.py, build", "Adam's epsilon is scaled by the workers", "update", workload=rows(),
         flags={**ADAM, "optimizer.epsilon": 1e-3})  # fmt: skip
def epsilon_scaled_by_workers():
    with built_otherwise(lambda group: group.update(eps=group["eps"] * TRAINING_ON[0])):
        yield


@planted("strategies/zero1.py, owns", "no worker owns the last parameter", "update", strategy="zero1", workload=rows())
def nobody_owns_the_last_parameter():
    def change(parallel, *, model, **_):
        last = list(model.parameters())[-1]
        return dataclasses.replace(parallel, owns=lambda p: p is not last and parallel.owns(p))

    with spoiled("zero1", change):
        yield


@planted("strategies/zero1.py, send_updates", "the next rank, which has not updated them, sends parameters",
         "parameters", strategy="zero1", workload=rows())  # fmt: skip
def updates_of_the_next_rank():
    def make(original):
        def send(part, group, *, source=0, **kwargs):
            return original(part, group, source=(source + 1) % dist.get_world_size(group), **kwargs)

        return send

    with instead(zero1, "broadcast", make):
        yield


@planted("training/step/step.py", "one worker alone leaves out its third step", "parameters",
         workload=rows())  # fmt: skip
def a_worker_skips_alone():
    calls = {}

    def make(original):
        def skip(self, gradients, factor, is_sound):
            calls[id(self)] = calls.get(id(self), 0) + 1
            is_left_out = dist.get_rank() == 1 and calls[id(self)] == 3
            return original(self, gradients, factor, False if is_left_out else is_sound)

        return skip

    with instead(GuardedUpdate, "__call__", make):
        yield


@planted("training/setup/optimizers.py, build", "the last worker's optimizer has no weight decay", "parameters",
         workload=rows(), flags={"optimizer.weight_decay": 0.1})  # fmt: skip
def decay_missing_on_one_worker():
    def change(group):
        if dist.get_rank() == dist.get_world_size() - 1:
            group["weight_decay"] = 0.0

    with built_otherwise(change):
        yield


# schedules


def scheduled_otherwise(change):
    """The configured schedule is made for the recipe that `change(recipe)` names."""
    return instead(
        optimizers,
        "configured_schedule",
        lambda original: (
            lambda optimizer, config, recipe: original(optimizer, config, dataclasses.replace(recipe, **change(recipe)))
        ),
    )


@planted("training/setup/optimizers.py, configured_schedule", "the warm-up is shorter by the number of workers",
         "schedule", workload=rows())  # fmt: skip
def warm_up_shared_out():
    with scheduled_otherwise(lambda recipe: {"warmup_steps": recipe.warmup_steps // TRAINING_ON[0]}):
        yield


@planted("training/setup/optimizers.py, configured_schedule", "the schedule ends after a worker's share of the steps",
         "schedule", workload=rows())  # fmt: skip
def schedule_ends_early():
    with scheduled_otherwise(lambda recipe: {"schedule_steps": recipe.schedule_steps // TRAINING_ON[0]}):
        yield


@planted("training/setup/optimizers.py, build", "the learning rate is multiplied by the workers", "schedule",
         workload=rows())  # fmt: skip
def rate_scaled_by_workers():
    with built_otherwise(lambda group: group.update(lr=group["lr"] * TRAINING_ON[0])):
        yield


@planted("training/step/step.py, _run_micro_batches", "the schedule moves with each micro-batch", "schedule",
         workload=rows())  # fmt: skip
def schedule_counts_micro_batches():
    def make(original):
        def run(self, batch, **kwargs):
            found = original(self, batch, **kwargs)
            for _ in range(-(-batch.num_rows // self.recipe.micro_batch_size) - 1):
                self.setup.schedule.step()
            return found

        return run

    with instead(TrainStep, "_run_micro_batches", make):
        yield


@planted("training/state/state.py, restore", "the schedule is not restored on as many workers", "schedule",
         workload=rows())  # fmt: skip
def schedule_not_restored():
    def begin_anew(state):
        schedule = state.setup.schedule
        schedule.last_epoch, schedule._step_count = 0, 1

    with resumed_otherwise(begin_anew):
        yield


# averages of the weights


@planted("training/setup/averaging.py, __init__", "the average's decay is taken to the power of the workers", "weights",
         workload=rows(), flags=AVERAGE)  # fmt: skip
def decay_of_the_average_to_a_power():
    init = Averaging.__init__

    def scaled(self, module, settings):
        init(self, module, settings)
        if many() and settings.decay is not None:
            self._update = get_ema_multi_avg_fn(settings.decay ** TRAINING_ON[0])

    with mock.patch.object(Averaging, "__init__", scaled):
        yield


@planted("training/setup/averaging.py, after_step", "the average takes the weights from before the update", "weights",
         workload=rows(), flags=AVERAGE)  # fmt: skip
def average_of_the_weights_before():
    update = Averaging.after_step

    def average(step):
        update(step.setup.averaging, step.num_updates + 1)

    with instead(Averaging, "after_step", lambda original: lambda self, step: None), before_update(average):
        yield


@planted("training/state/state.py, restore", "the average forgets in a resume how often it was updated", "resume",
         workload=rows(), flags=AVERAGE)  # fmt: skip
def average_counts_anew():
    with resumed_otherwise(lambda state: setattr(state.setup.averaging, "num_updates", 0)):
        yield


@planted("training/state/state.py, _averages", "the average is not in the checkpoint", "resume", workload=rows(),
         flags=AVERAGE)  # fmt: skip
def average_not_saved():
    with instead(TrainState, "_averages", lambda original: lambda self: {}):
        yield


@planted("training/setup/averaging.py, swap", "weights that are gathered already are evaluated for their average",
         "evaluation", strategy="fsdp", workload=EVALUATED, flags=AVERAGE)  # fmt: skip
def gathered_weights_evaluated():
    with instead(averaging, "reshard", lambda original: lambda model: None):
        yield


# statistics and random numbers


@planted("strategies/ddp.py, apply", "statistics move by a momentum that is scaled by the workers", "norm",
         workload=NORM)  # fmt: skip
def statistics_move_faster():
    def change(parallel, *, model, **_):
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.momentum *= 2
        return parallel

    with spoiled("ddp", change):
        yield


@planted("strategies/ddp.py, share_buffers", "statistics are summed over ranks before an evaluation", "norm",
         workload=NORM)  # fmt: skip
def statistics_are_summed():
    def change(parallel, *, model, **_):
        def share():
            for buffer in model.buffers():
                dist.all_reduce(buffer)

        return dataclasses.replace(parallel, before_evaluation=share)

    with spoiled("ddp", change):
        yield


@planted("strategies/fsdp.py, share_buffers", "ranks with shards keep statistics of their own", "norm", strategy="fsdp",
         workload=NORM)  # fmt: skip
def statistics_of_each_shard():
    def change(parallel, **_):
        return dataclasses.replace(parallel, before_evaluation=lambda: None, after_update=lambda step: None)

    with spoiled("fsdp", change):
        yield


@planted("strategies/apart/replicas.py, moving", "replicas do not average their statistics", "norm",
         strategy="local_sgd", workload=NORM, flags={"local_sgd.sync_every": 3})  # fmt: skip
def statistics_not_averaged():
    with instead(Replicas, "moving", lambda original: lambda self: list(self.trained)):
        yield


@planted("training/step/evaluation.py, run", "a training stays in evaluation mode after an evaluation", "random",
         workload=EVALUATED_DROPOUT)  # fmt: skip
def stays_in_evaluation_mode():
    def make(original):
        def run(self, step):
            found = original(self, step)
            self.setup.parallel.module.eval()
            return found

        return run

    with instead(Evaluations, "run", make):
        yield


@planted("training/step/evaluation.py, run", "an evaluation seeds the generators again", "random",
         workload=EVALUATED_DROPOUT)  # fmt: skip
def evaluation_seeds_anew():
    def make(original):
        def run(self, step):
            seed_everything(0)
            return original(self, step)

        return run

    with instead(Evaluations, "run", make):
        yield


@planted("strategies/ddp.py, apply", "the rate of dropout is divided by the workers", "random", workload=DROPOUT)  # fmt: skip
def less_dropout():
    def change(parallel, *, model, **_):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p /= 2
        return parallel

    with spoiled("ddp", change):
        yield


@planted("training/setup/model_setup.py, seeds", "two of four replicas draw the masks of the others", "random",
         workload=DROPOUT, world_size=4)  # fmt: skip
def masks_of_pairs():
    def make(original):
        def pairs(seed, *names):
            return original(seed, *((names[0], names[1] // 2) if names[:1] == ("dropout",) else names))

        return pairs

    with instead(model_setup, "stream_seed", make):
        yield


@planted("training/state/state.py, restore", "all ranks resume with the generators of rank 0", "random",
         workload=DROPOUT)  # fmt: skip
def generators_of_rank_0_restored():
    def make(original):
        def first(state, device):
            found = [state]
            dist.broadcast_object_list(found, src=0)
            original(found[0], device)

        return first

    with instead(state_module, "set_random_state", make):
        yield


@planted("training/state/state.py, restore", "a resume does not restore the generators", "random",
         workload=DROPOUT)  # fmt: skip
def generators_not_restored():
    with instead(state_module, "set_random_state", lambda original: lambda state, device: None):
        yield


# evaluations


@planted("training/step/evaluation.py, _measure", "the means of batches are averaged", "evaluation",
         workload=EVALUATED)  # fmt: skip
def means_of_evaluated_batches():
    def make(original):
        def measure(self, batch):
            return {name: (total / count, 1) for name, (total, count) in original(self, batch).items()}

        return measure

    with instead(Evaluator, "_measure", make):
        yield


@planted("training/step/evaluation.py, run", "sums of all ranks are divided by a rank's own count", "evaluation",
         workload=EVALUATED)  # fmt: skip
def own_count_in_evaluations():
    def make(original):
        def summed(self, own):
            found = original(self, own)
            return {name: (total, own[name][1] if name in own else count) for name, (total, count) in found.items()}

        return summed

    with instead(NamedSums, "__call__", make):
        yield


@planted("training/step/evaluation.py, run", "layers stay in training mode while they are evaluated", "evaluation",
         workload=NORM)  # fmt: skip
def evaluated_in_training_mode():
    with instead(evaluation, "evaluation_mode", lambda original: lambda module, **kwargs: torch.no_grad()):
        yield


@planted("data/sample_order.py, rank_slice", "a split is padded until it divides, and the padding is measured",
         "evaluation", workload=EVALUATED)  # fmt: skip
def evaluated_split_is_padded():
    def make(original):
        def padded(self, step, rank, world_size, shares=None):
            if self.name == "train":
                return original(self, step, rank, world_size, shares)
            total = self.num_rows(step)
            share = -(-total // world_size)
            start = min(rank * share, total - share)
            return slice(start, start + share)

        return padded

    with instead(StepPlan, "rank_slice", make):
        yield


# rows


@planted("training/loop.py, Part", "every rank shuffles with a seed of its own", "rows", workload=rows())
def a_seed_of_its_own():
    def make(original):
        def other(plan, *args):
            return original(dataclasses.replace(plan, seed=plan.seed + dist.get_rank()), *args)

        return other

    with instead(loop, "Part", make):
        yield


@planted("data/sample_order.py, positions", "the two workers of a layer read a batch in different orders", "rows",
         strategy="tensor", workload=rows())  # fmt: skip
def other_order_within_a_replica():
    def make(original):
        def turned(self, *args):
            found = original(self, *args)
            return found[::-1].copy() if dist.get_rank() == 1 else found

        return turned

    with instead(StepPlan, "positions", make):
        yield


@planted("data/sample_order.py, positions", "reading ahead loses the first batch", "rows", workload=rows())
def first_batch_lost():
    def make(original):
        def later(self, step, *args):
            is_full = self.name == "train" and self.num_rows(step + 1) == self.global_batch_size
            return original(self, step + 1 if is_full else step, *args)

        return later

    with instead(StepPlan, "positions", make):
        yield


@planted("training/step/step.py, _on_device", "labels are those of the next row on the last rank", "rows",
         workload=rows())  # fmt: skip
def labels_of_the_next_row():
    def make(original):
        def shifted(self, *args):
            piece = original(self, *args)
            if dist.get_rank() == 1:
                piece.batch["y"] = piece.batch["y"].roll(1)
            return piece

        return shifted

    with instead(TrainStep, "_on_device", make):
        yield


@planted("training/state/loop_state.py, values", "a checkpoint is taken for one of the next epoch", "rows",
         workload=rows())  # fmt: skip
def resumes_in_the_next_epoch():
    def make(original):
        def later(self):
            found = original(self)
            return {**found, "epoch": found["epoch"] + 1}

        return later

    with instead(loop_state.LoopCheckpoint, "values", make):
        yield


# types


@planted("training/step/step.py, _on_device", "rows come in bf16", "dtype", workload=rows())  # fmt: skip
def rows_in_bf16():
    def make(original):
        def narrow(self, *args):
            piece = original(self, *args)
            piece.batch["x"] = piece.batch["x"].bfloat16().to(piece.batch["x"].dtype)
            return piece

        return narrow

    with instead(TrainStep, "_on_device", make):
        yield


@planted("strategies/fsdp.py, mixed_precision", "parameters are gathered in bf16", "dtype", strategy="fsdp",
         workload=rows())  # fmt: skip
def gathered_in_bf16():
    def make(original):
        def narrow(config, dtype):
            policy, notes = original(config, dtype)
            is_checked = config.precision.dtype == "fp64"
            return (policy if is_checked else MixedPrecisionPolicy(torch.bfloat16, torch.float32)), notes

        return narrow

    with instead(fsdp, "mixed_precision", make):
        yield


@planted("training/setup/optimizers.py, build", "momentum is kept in bf16", "dtype", workload=rows())  # fmt: skip
def momentum_in_bf16():
    def narrow(setup):
        for entries in setup.optimizer.state.values():
            momentum = entries.get("momentum_buffer")
            if momentum is not None and momentum.dtype == torch.float32:
                momentum.copy_(momentum.bfloat16())

    with after_update(narrow):
        yield


# replicas that train apart


@planted("strategies/local_sgd.py, after_update", "replicas meet one step late", "averaging", **APART)
def meets_a_step_late():
    def change(parallel, **_):
        late = parallel.after_update
        return dataclasses.replace(parallel, after_update=lambda step: late(step - 1) if step > 1 else None)

    with spoiled("local_sgd", change):
        yield


@planted("strategies/apart/replicas.py, _average_optimizer", "Adam's second moments are not averaged", "averaging",
         strategy="local_sgd", workload=rows(), flags={"local_sgd.sync_every": 3, **ADAM})  # fmt: skip
def second_moments_not_averaged():
    def make(original):
        return lambda self: [(name, t) for name, t in original(self) if "exp_avg_sq" not in name]

    with instead(Replicas, "_optimizer_tensors", make):
        yield


@planted("strategies/local_sgd.py, TrainingApart", "the warm-up takes a step more", "averaging", strategy="local_sgd",
         workload=rows(), flags={"local_sgd.sync_every": 3, "local_sgd.warmup_steps": 2})  # fmt: skip
def warm_up_a_step_longer():
    with configured_otherwise("local_sgd", "local_sgd", lambda settings: {"warmup_steps": settings.warmup_steps + 1}):
        yield


@planted("strategies/diloco.py, synchronise", "the outer learning rate is 1", "averaging", strategy="diloco",
         workload=rows(), flags={"local_sgd.sync_every": 3})  # fmt: skip
def outer_rate_missing():
    with configured_otherwise("diloco", "local_sgd", lambda settings: {"outer_learning_rate": 1.0}):
        yield


@planted("strategies/diloco.py, synchronise", "a meeting clears the inner optimizer's momentum", "averaging",
         strategy="diloco", workload=rows(), flags={"local_sgd.sync_every": 3})  # fmt: skip
def inner_momentum_cleared():
    def clear(setup):
        for entries in setup.optimizer.state.values():
            entries["momentum_buffer"].zero_()

    with after_update(clear, every=3):
        yield


@planted("strategies/diloco.py, synchronise", "the outer step clears the inner optimizer's momentum", "averaging",
         strategy="diloco", workload=rows(), flags={"local_sgd.sync_every": 3})  # fmt: skip
def inner_momentum_cleared_in_the_outer_step():
    def change(parallel, **_):
        found = []

        def use_optimizer(optimizer):
            found.append(optimizer)
            parallel.use_optimizer(optimizer)

        def after_update(step):
            parallel.after_update(step)
            for entries in found[0].state.values() if step % 3 == 0 else ():
                entries["momentum_buffer"].zero_()

        return dataclasses.replace(parallel, use_optimizer=use_optimizer, after_update=after_update)

    with spoiled("diloco", change):
        yield


@planted("strategies/gossip.py, step", "weights are mixed as they were before the update", "averaging",
         strategy="gossip", workload=rows())  # fmt: skip
def mixed_before_the_update():
    def keep(original):
        def before_step(self, step):
            original(self, step)
            self.kept = Replicas.flat(self.replicas.trained)

        return before_step

    def make(original):
        def step(self, number):
            moved = Replicas.flat(self.replicas.trained) - self.kept
            Replicas.fill(self.replicas.trained, self.kept)
            original(self, number)
            Replicas.fill(self.replicas.trained, Replicas.flat(self.replicas.trained) + moved)

        return step

    with instead(Mixing, "before_step", keep), instead(Mixing, "step", make):
        yield


@planted("strategies/async_sgd.py, step", "updates of workers are summed, not averaged", "averaging",
         strategy="async_sgd", workload=rows(), flags=LATE)  # fmt: skip
def updates_are_summed():
    def make(original):
        def step(self, number):
            with mock.patch.object(self.replicas, "size", 1):
                original(self, number)

        return step

    with instead(async_sgd.Updates, "step", make):
        yield


@planted("strategies/async_sgd.py, Updates", "updates come a step later than allowed", "averaging",
         strategy="async_sgd", workload=rows(), flags={**LATE, "deterministic": True})  # fmt: skip
def updates_come_too_late():
    with configured_otherwise("async_sgd", "gossip", lambda settings: {"max_staleness": settings.max_staleness + 1}):
        yield


# compression


@planted("strategies/compression/hook.py, _average", "compression does not wait for its first step", "compression",
         workload=rows(), flags={**TOPK, "compression.start_step": 3})  # fmt: skip
def compressed_from_the_start():
    with configured_otherwise("ddp", "compression", lambda settings: {"start_step": 0}):
        yield


@planted("strategies/compression/hook.py, carry_over", "what is left over grows by the number of workers",
         "compression", workload=rows(), flags=TOPK)  # fmt: skip
def left_over_grows():
    def make(original):
        return lambda self, factor, *, was_taken: original(self, factor * TRAINING_ON[0], was_taken=was_taken)

    with instead(compression._LeftOver, "carry_over", make):
        yield


# checkpoints


def without_own_state(strategy):
    """What a strategy has saved beside the model is not given back to it."""
    return spoiled(strategy, lambda parallel, **_: dataclasses.replace(parallel, load_state=lambda state: None))


@planted("strategies/compression/hook.py, load_state", "what was left over is lost in a resume", "resume",
         workload=rows(), flags=TOPK)  # fmt: skip
def left_over_not_restored():
    with without_own_state("ddp"):
        yield


@planted("strategies/diloco.py, load_state", "the anchor is lost in a resume", "resume", strategy="diloco",
         workload=rows(), flags={"local_sgd.sync_every": 3})  # fmt: skip
def anchor_not_restored():
    with without_own_state("diloco"):
        yield


@planted("strategies/gossip.py, load_state", "letters on their way are lost in a resume", "resume", strategy="gossip",
         workload=rows(), flags=LETTERS)  # fmt: skip
def letters_not_restored():
    with without_own_state("gossip"):
        yield


@planted("training/state/loop_state.py, restore", "replicas count their steps from zero after a resume", "resume",
         strategy="local_sgd", workload=rows(), flags={"local_sgd.sync_every": 7})  # fmt: skip
def replicas_count_anew():
    def make(original):
        def restore(self, before):
            original(self, before)
            self.train_step.num_updates = 0

        return restore

    with instead(loop_state.LoopCheckpoint, "restore", make):
        yield


@planted("training/state/optimizer_state.py, build", "Adam counts its steps from zero after a resume", "resume",
         workload=rows(), flags=ADAM)  # fmt: skip
def adam_counts_anew():
    def clear(state):
        for entries in state.setup.optimizer.state.values():
            entries["step"].zero_()

    with resumed_otherwise(clear):
        yield


@planted("training/state/optimizer_state.py, optimizer_state", "a checkpoint has the momentum in bf16", "resume",
         workload=rows())  # fmt: skip
def saved_momentum_rounded():
    def make(original):
        def rounded(optimizer, module):
            tensors, values = original(optimizer, module)
            return {n: t.bfloat16().to(t.dtype) if "momentum" in n else t for n, t in tensors.items()}, values

        return rounded

    with instead(state_module, "optimizer_state", make):
        yield


# final weights


@planted("strategies/ddp.py, weights", "the final weights are those before the last update", "weights",
         workload=rows())  # fmt: skip
def weights_before_the_last_update():
    def change(parallel, *, model, **_):
        kept = {}

        def before_step(step):
            kept.update({name: value.detach().clone() for name, value in model.state_dict().items()})
            parallel.before_step(step)

        def weights():
            return WeightShare(dict(kept)) if dist.get_rank() == 0 else WeightShare()

        return dataclasses.replace(parallel, before_step=before_step, weights=weights)

    with spoiled("ddp", change):
        yield


def handed_on(change):
    """The final weights are those that `change(name, tensor)` gives."""

    def make(original):
        def other(share, settings):
            found = original(share, settings)
            return dataclasses.replace(found, tensors={n: change(n, t) for n, t in found.tensors.items()})

        return other

    return instead(end_of_training, "merged_share", make)


@planted("training/state/end_of_training.py, hand_on_weights", "the final weights have the statistics of the start",
         "weights", workload=NORM)  # fmt: skip
def statistics_of_the_start_handed_on():
    with handed_on(lambda name, tensor: torch.zeros_like(tensor) if "running_mean" in name else tensor):
        yield


@planted("strategies/contract/weight_shares.py, share_of", "parts of a layer are joined in the wrong order", "weights",
         strategy="tensor", workload=rows())  # fmt: skip
def parts_in_the_wrong_order():
    def turned(name, tensor):
        return tensor.roll(tensor.shape[0] // 2, 0) if tensor.ndim and tensor.shape[0] % 2 == 0 else tensor

    with handed_on(turned):
        yield
