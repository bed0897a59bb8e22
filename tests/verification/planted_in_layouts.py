"""Mistakes planted into layouts of several axes: each was real and silent in another system, as its source says."""

from __future__ import annotations

import dataclasses

import torch.distributed as dist
from planted_by_a_reader import TRANSFORMER, before_update, gradients_of
from planted_edits import instead, planted, spoiled
from torch.distributed.tensor import DTensor, Partial

from scaleray.strategies.pipeline import parts as parts_module
from scaleray.strategies.pipeline.parts import Parts
from scaleray.strategies.pipeline.pipeline_shards import Shards
from scaleray.training import loop

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
