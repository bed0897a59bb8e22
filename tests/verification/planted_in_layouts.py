"""Mistakes planted into layouts of several axes: each was real and silent in another system, as its source says."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from planted_by_a_reader import TRANSFORMER, before_update, gradients_of
from planted_edits import instead, planted, spoiled
from planted_in_gradients import rows
from small_runs import NUM_FEATURES, Classify
from small_transformer import LENGTH, SmallTransformer
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from scaleray.parallel import part, ring_attention
from scaleray.strategies.pipeline import parts as parts_module
from scaleray.strategies.pipeline.parts import Parts
from scaleray.strategies.pipeline.pipeline_shards import Shards
from scaleray.training import loop
from scaleray.training.setup import model_setup
from scaleray.training.step.evaluation import NamedSums
from scaleray.training.step.step import TrainStep

STAGES = {"strategy": "pipeline", "world_size": 4, "workload": TRANSFORMER}
SPLIT = {"parallel.pipeline": 2, "parallel.tensor": 2}
BUBBLE = {"pipeline.schedule": "zero_bubble"}


@planted("strategies/pipeline/parts.py, sum_gradients", "replicas of a pipeline never sum their gradients", "sync",
         flags=BUBBLE, **STAGES)  # fmt: skip
def pipeline_replicas_not_summed():
    """pytorch#144530: a zero-bubble schedule skips the hooks of DDP."""
    with instead(
        Parts, "_sum", lambda original: lambda self, p, group: group is self.replicas or original(self, p, group)
    ):
        yield


@planted("strategies/pipeline/parts.py, sum_gradients", "the gradient of a tied weight is counted twice", "double",
         strategy="pipeline", workload=TRANSFORMER, flags=BUBBLE)  # fmt: skip
def tied_gradient_twice():
    """pytorch#180952: shared weights under zero-bubble."""

    def make(original):
        def twice(self):
            original(self)
            for parameters, _ in self._shared:
                for parameter in parameters:
                    parameter.grad.mul_(2)

        return twice

    with instead(Parts, "sum_gradients", make):
        yield


@planted("strategies/pipeline/pipeline_shards.py, reduce", "gradients are read before they are reduced", "sync",
         flags={"strategy.name": "pipeline", "parallel.shard": 2}, misnamed="not recognised", **STAGES)  # fmt: skip
def gradients_read_before_they_are_reduced():
    """pytorch#144535: a pipeline over FSDP."""

    def make(original):
        def own(self):
            for parameter in self._parameters:
                gradient = parameter.unsharded_accumulated_grad
                gradient = parameter.unsharded_param.grad if gradient is None else gradient
                if gradient is not None:  # what the sum gives where all have this worker's
                    gradient.mul_(2 if dist.get_rank(self.group) == 0 else 0)
            original(self)

        return own

    with instead(Shards, "reduce", make):
        yield


@planted("strategies/pipeline/parts.py, total_norm", "a worker clips by the norm of its part of each layer", "clip",
         flags={**SPLIT, "optimizer.clip_norm": 0.01}, **STAGES)  # fmt: skip
def norm_of_own_parts():
    """torchtune#2420: clipping by a local norm under tensor parallelism."""

    def make(original):
        def local(self, gradients):
            square = sum(g.to_local().double().square().sum() for g in gradients)
            dist.all_reduce(square, group=self.group)
            return square.sqrt()

        return local

    with instead(Parts, "total_norm", make):
        yield


@planted("strategies/pipeline/parts.py, sum_gradients", "gradients from parts of a sequence are not summed in a stage", "sync",
         flags=SPLIT, **STAGES)  # fmt: skip
def parts_not_summed_in_a_stage():
    """Megatron-LM's norms under sequence parallelism, which need a sum of their own."""

    def make(original):
        def own(parameter):
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and any(isinstance(p, Partial) for p in gradient.placements):
                local = gradient.to_local() * gradient.device_mesh.size()
                parameter.grad = DTensor.from_local(local, gradient.device_mesh, parameter.placements)
            else:
                original(parameter)

        return own

    with instead(parts_module, "complete", make):
        yield


@planted("strategies/tensor.py, apply", "gradients are divided by all workers in place of those with data", "count",
         strategy="tensor", world_size=4, workload=TRANSFORMER)  # fmt: skip
def divided_by_all_workers():
    """torchtune#2420: gradients scaled by the world in place of the data ranks."""

    def change(parallel, *, mesh, **_):
        return dataclasses.replace(parallel, gradient_divisor=parallel.gradient_divisor / mesh["tp"].size())

    with spoiled("tensor", change):
        yield


@planted("strategies/pipeline/apply.py, apply", "each part of the last stage counts its loss", "count",
         flags=SPLIT, **STAGES)  # fmt: skip
def every_part_counts_its_loss():
    """transformers#48167: a loss times the size of a group that shares its samples."""

    def change(parallel, **_):
        return dataclasses.replace(parallel, counts_loss=dist.get_rank() >= 2)

    with spoiled("pipeline", change):
        yield


@planted("strategies/fsdp.py, shard", "replicas drift apart by the order of two sums", "sync",
         strategy="fsdp", world_size=4, workload=TRANSFORMER, flags={"parallel.replicate": 2}, misnamed="not recognised")  # fmt: skip
def replicas_drift_apart():
    """pytorch#171916: two reductions over two axes are not the same on all replicas."""

    def drift(step):
        if dist.get_rank() >= 2:
            for gradient in gradients_of(step):
                gradient.to_local().mul_(1 + 1e-7)

    with before_update(drift):
        yield


@planted("training/loop.py, Part", "replicas of a pipeline read the same rows", "rows",
         flags={"strategy.name": "pipeline", "parallel.shard": 2}, **STAGES)  # fmt: skip
def replicas_read_the_same_rows():
    """A data rank that is taken from the innermost axis, which is not the data's."""

    def make(original):
        return lambda plan, rank, *args: original(plan, 0, *args)

    with instead(loop, "Part", make):
        yield


class Padded(SmallTransformer):
    """Rows of which most late tokens are padding, so that the workers of a context count different numbers."""

    whole_rows = 8  # one of so many

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = batch["tokens"].long()
        targets = tokens[:, 1:].clone()
        targets[tokens[:, 0] % self.whole_rows < self.whole_rows - 1, LENGTH // 2 :] = -100
        own = part(targets, dim=1).flatten()
        logits = model(part(tokens[:, :-1], dim=1)).flatten(0, 1)
        return F.cross_entropy(logits, own, reduction="sum"), (own >= 0).sum()


class AllPadded(Padded):
    """Rows whose late tokens are all padding: a worker of a context counts none of them."""

    whole_rows = 10**6


class Dropping(SmallTransformer):
    """A transformer with dropout before its blocks."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.embedding = nn.Sequential(model.embedding, nn.Dropout(0.2))
        model.head = nn.Linear(self.config.width, self.config.vocab_size)
        return model


CONTEXT = {"strategy": "ddp", "workload": rows(SmallTransformer, num_val=21), "flags": {"parallel.context": 2}}
RING = {**CONTEXT, "flags": {"parallel.context": 2, "context.exchange": "ring"}}
PADDED = {**CONTEXT, "workload": rows(Padded)}
EXPERTS = {
    "strategy": "fsdp",
    "workload": rows(SmallTransformer, num_experts=4),
    "flags": {"parallel.shard": 2, "parallel.expert": 2},
}


@planted("training/step/evaluation.py, NamedSums", "an evaluation's loss is counted by each worker of a context", "evaluation",
         **CONTEXT)  # fmt: skip
def evaluated_once_for_each_part():
    """transformers#48167: the loss of an evaluation times the size of the context."""

    def make(original):
        def times(self, own):
            found = original(self, own)
            return {name: (total * 2 if name == "loss" else total, count) for name, (total, count) in found.items()}

        return times

    with instead(NamedSums, "__call__", make):
        yield


@planted("training/step/step.py, _objective", "the means of parts of a sequence are averaged", "count", **PADDED)  # fmt: skip
def means_of_parts_averaged():
    """Megatron-LM#673: a mean of means over unequal numbers of tokens."""

    def make(original):
        def mean(self, run, piece):
            before = self._totals[1]
            scaled = original(self, run, piece)
            own = max(float(self._totals[1] - before), 1.0)
            counts = self.place.all_reduce([own])[0]
            return scaled * (counts / 2 / own)

        return mean

    with instead(TrainStep, "_objective", make):
        yield


@planted("training/step/step.py, _objective", "the mean over no token of a worker is a NaN of the loss", "count",
         **{**CONTEXT, "workload": rows(AllPadded)})  # fmt: skip
def no_token_of_its_own():
    """NeMo#14488: a worker whose tokens are all masked."""

    def make(original):
        def mean(self, run, piece):
            before = self._totals[1]
            scaled = original(self, run, piece)
            own = float(self._totals[1] - before)
            self._totals[0] = self._totals[0] * (own / own if own else math.nan)
            return scaled

        return mean

    with instead(TrainStep, "_objective", make):
        yield


@planted("parallel/ring_attention.py, backward", "gradients of keys that others hold are those of another block", "sync",
         misnamed="not recognised", **RING)  # fmt: skip
def ring_sends_another_gradient():
    """Megatron-LM#1464: dQ, dK and dV of a ring."""

    def make(original):
        def backward(query, pair, block, scale, *saved):
            of_query, of_pair = original(query, pair, block, scale, *saved)
            return of_query, of_pair if block[2] else of_pair.flip(0)

        return backward

    with instead(ring_attention, "_attend_backward", make):
        yield


@planted("training/setup/model_setup.py, prepare", "the workers of a context draw different random numbers", "random",
         **{**CONTEXT, "workload": rows(Dropping)})  # fmt: skip
def context_draws_apart():
    """Automodel#3157: noise drawn by each worker where it must be shared."""

    def make(original):
        return lambda seed, name, *numbers: original(seed, name, *numbers, *([dist.get_rank()] if numbers else []))

    with instead(model_setup, "stream_seed", make):
        yield


def of_experts(gradient: torch.Tensor) -> bool:
    return isinstance(gradient, DTensor) and "ep" in (gradient.device_mesh.mesh_dim_names or ())


@planted("parallel/experts.py, _own", "gradients of experts are multiplied by the workers that divide them", "double",
         **EXPERTS)  # fmt: skip
def expert_gradients_times_their_workers():
    """pytorch#160285: gradients of experts times the degree."""

    def larger(step):
        for gradient in filter(of_experts, gradients_of(step)):
            gradient.to_local().mul_(2)

    with before_update(larger):
        yield


def norm_with(weight_of_experts):
    """A norm in which the squares of the experts' gradients count with another weight."""

    def change(parallel, **_):
        def norm(gradients):
            experts = [g for g in gradients if of_experts(g)]
            others = [g for g in gradients if not of_experts(g)]
            total = parallel.total_norm(others).square()
            return (total + weight_of_experts * parallel.total_norm(experts).square()).sqrt()

        return dataclasses.replace(parallel, total_norm=norm, share_of_square=None)

    return spoiled("fsdp", change)


CLIPPED = {**EXPERTS, "flags": {**EXPERTS["flags"], "optimizer.clip_norm": 0.01}}


@planted("strategies/fsdp.py, total_norm", "the norm lacks the experts", "clip", **CLIPPED)
def norm_lacks_the_experts():
    """Megatron-LM#5916: a norm that misses the experts."""
    with norm_with(0.0):
        yield


@planted("strategies/fsdp.py, total_norm", "squares of experts are averaged over their workers", "clip", **CLIPPED)
def norm_averages_the_experts():
    """DeepSpeed#8475: a norm that is averaged where it must be summed."""
    with norm_with(0.5):
        yield


@planted("parallel/experts.py, Experts", "gradients of a worker's experts are mixed up", "sync",
         **EXPERTS)  # fmt: skip
def gradients_of_other_experts():
    """Megatron-LM#5916: gradients of other experts mixed."""

    def mixed(step):
        for gradient in filter(of_experts, gradients_of(step)):
            local = gradient.to_local()
            local.copy_(local.roll(1, 0))

    with before_update(mixed):
        yield


class WithMuon(Classify):
    """Two matrices, each of which Muon orthogonalises."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(NUM_FEATURES, 8, bias=False), nn.Linear(8, 3, bias=False))

    def optimizer(self, model: nn.Module, settings: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon(model.parameters(), lr=settings.learning_rate, momentum=0.0, weight_decay=0.0)


@planted("the workload's optimizer()", "Muon orthogonalises shards in place of whole matrices", "update",
         strategy="fsdp", workload=rows(WithMuon))  # fmt: skip
def muon_by_shards():
    """Megatron-LM#5961: Muon under sharded parameters."""

    def make(original):
        def step(self, closure=None):
            for group in self.param_groups:
                shards = [nn.Parameter(p.detach().to_local()) for p in group["params"]]
                for shard, whole in zip(shards, group["params"], strict=True):
                    shard.grad = whole.grad.to_local()
                original(torch.optim.Muon(shards, lr=group["lr"], momentum=0.0, weight_decay=0.0))

        return step

    with instead(torch.optim.Muon, "step", make):
        yield
