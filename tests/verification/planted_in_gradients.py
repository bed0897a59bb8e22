"""Planted mistakes in how gradients come about: losses, sums over workers, accumulation, clipping, updates, types."""

from __future__ import annotations

import contextlib
import dataclasses
from unittest import mock

import torch
import torch.distributed as dist
from planted_edits import ROWS, instead, planted, spoiled
from small_runs import Classify, Tokens
from small_transformer import SmallTransformer
from torch.distributed.fsdp import MixedPrecisionPolicy
from verified import TRAINING_ON, many

from scaleray.strategies import ddp, fsdp, local_sgd, tensor, zero1
from scaleray.strategies.apart.replicas import Replicas
from scaleray.strategies.compression import hook as compression
from scaleray.strategies.pipeline import apply as pipeline
from scaleray.strategies.pipeline.apply import Pipeline
from scaleray.strategies.pipeline.parts import Parts
from scaleray.training.setup.pruning import Pruning
from scaleray.training.step.step import TrainStep


def rows(workload=Classify, **more):
    return lambda: workload(num_rows=ROWS, **more)


PIPELINE = {"strategy": "pipeline", "workload": rows(SmallTransformer)}
TENSOR = {"strategy": "tensor", "workload": rows(SmallTransformer)}


# what each micro-batch and each worker weighs


@planted(
    "training/step/step.py, _run_micro_batches",
    "each rank divides by its own rows, and means are averaged",
    "count",
    workload=rows(),
)
def means_of_ranks_averaged():
    def make(original):
        def weighs_alike(self, batch, *, num_rows, synchronises, group):
            self._scale *= num_rows / self.place.data_parallel_size / max(1, batch.num_rows)
            return original(self, batch, num_rows=num_rows, synchronises=synchronises, group=group)

        return weighs_alike

    with instead(TrainStep, "_run_micro_batches", make):
        yield


@planted(
    "training/step/step.py, _objective",
    "the placeholder of a rank without rows counts",
    "count",
    workload=rows(),
    world_size=4,
)
def placeholder_counts():
    def make(original):
        return lambda self, model, piece: original(self, model, dataclasses.replace(piece, weight=max(1, piece.weight)))

    with instead(TrainStep, "_objective", make):
        yield


@planted(
    "training/step/step.py, _objective",
    "the gradient of a step's third micro-batch is lost",
    "accumulation",
    workload=rows(),
)
def third_micro_batch_lost():
    calls = [0]

    def make(original):
        def forgetful(self, model, piece):
            calls[0] += 1
            scaled = original(self, model, piece)
            return scaled * 0.0 if calls[0] == 3 else scaled

        return forgetful

    def counted(original):
        def begin(self, *args, **kwargs):
            calls[0] = 0
            return original(self, *args, **kwargs)

        return begin

    with instead(TrainStep, "_objective", make), instead(TrainStep, "_run_micro_batches", counted):
        yield


@planted(
    "training/step/step.py, _update", "the reported loss is divided by the workers", "count", workload=rows(Tokens)
)
def reported_loss_divided():
    def make(original):
        return lambda self, loss_sum, count, **kwargs: original(self, loss_sum / TRAINING_ON[0], count, **kwargs)

    with instead(TrainStep, "_update", make):
        yield


@planted("strategies/tensor.py, apply", "both workers of a replica count its loss", "count", **TENSOR)
def both_tensor_workers_count():
    with spoiled("tensor", lambda parallel, **_: dataclasses.replace(parallel, counts_loss=True)):
        yield


@planted(
    "strategies/pipeline/apply.py, run_micro_batches",
    "a smaller micro-batch at the end of a step is left out",
    "accumulation",
    **PIPELINE,
)
def smaller_micro_batch_left_out():
    def make(original):
        def all_alike(self, pieces, objective, autocast):
            first = pieces[0].batch["tokens"].shape
            kept = [p if p.batch["tokens"].shape == first else dataclasses.replace(p, weight=0) for p in pieces]
            return original(self, kept, objective, autocast)

        return all_alike

    with instead(Pipeline, "_run_micro_batches", make):
        yield


@planted(
    "strategies/local_sgd.py, apply",
    "a local gradient is divided by the rows of all workers",
    "count",
    strategy="local_sgd",
    workload=rows(),
    flags={"local_sgd.sync_every": 3},
)
def local_gradient_over_all_rows():
    def make(original):
        return lambda self, s, c, *, correction, **kwargs: original(self, s, c, correction=correction / 2, **kwargs)

    with instead(TrainStep, "_update", make):
        yield


# sums over workers


@planted("training/step/step.py, _run_micro_batches", "a partial batch is not synchronised", "sync", workload=rows())
def partial_batch_not_synchronised():
    def make(original):
        def alone(self, batch, *, num_rows, synchronises, group):
            is_partial = num_rows < self.recipe.global_batch_size
            with self.setup.parallel.no_sync() if is_partial else contextlib.nullcontext():
                return original(self, batch, num_rows=num_rows, synchronises=synchronises, group=group)

        return alone

    with instead(TrainStep, "_run_micro_batches", make):
        yield


@planted("strategies/ddp.py, apply", "gradients are divided by the workers twice", "double", workload=rows())
def gradients_divided_twice():
    with spoiled("ddp", lambda parallel, **_: dataclasses.replace(parallel, gradient_divisor=1)):
        yield


@planted(
    "strategies/fsdp.py, apply",
    "gradients are divided by the workers twice",
    "double",
    strategy="fsdp",
    workload=rows(),
)
def sharded_gradients_divided_twice():
    with spoiled("fsdp", lambda parallel, **_: dataclasses.replace(parallel, gradient_divisor=1)):
        yield


@planted(
    "strategies/ddp.py, apply",
    "the second half of an adapter (LoRA) is not synchronised",
    "sync",
    workload=rows(SmallTransformer),
    flags={"fine_tuning.lora_rank": 2},
)
def adapter_not_synchronised():
    def make(original):
        def forgetful(model, *args, **kwargs):
            left_out = [name for name, _ in model.named_parameters() if name.endswith("lora_b")]
            model._ddp_params_and_buffers_to_ignore = left_out
            return original(model, *args, **kwargs)

        return forgetful

    with instead(ddp, "DistributedDataParallel", make):
        yield


@planted(
    "strategies/pipeline/parts.py, _shared_parameters",
    "the gradient of a tied head is not summed over its stages",
    "sync",
    **PIPELINE,
)
def tied_gradient_not_summed():
    def make(original):
        def without(self):
            self._shared = []
            return original(self)

        return without

    with instead(Parts, "sum_gradients", make):
        yield


@planted(
    "strategies/pipeline/parts.py, _sum",
    "replicas of the last stage do not sum their gradients",
    "sync",
    **PIPELINE,
    world_size=4,
)
def last_stage_not_summed():
    def make(original):
        def partly(self, parameters, group):
            if not (self.has_last and group is self.replicas):
                original(self, parameters, group)

        return partly

    with instead(Parts, "_sum", make):
        yield


# clipping


@planted(
    "strategies/fsdp.py, total_norm",
    "gradients are clipped by the norm of a rank's own shards",
    "clip",
    strategy="fsdp",
    workload=rows(),
    flags={"optimizer.clip_norm": 0.3},
)
def norm_of_own_shards():
    def local_norm(gradients):
        return torch.nn.utils.get_total_norm([g.to_local() for g in gradients])

    with spoiled("fsdp", lambda parallel, **_: dataclasses.replace(parallel, total_norm=local_norm)):
        yield


@planted(
    "strategies/tensor.py, total_norm",
    "what lies on every worker is counted by each in the norm",
    "clip",
    **TENSOR,
    flags={"optimizer.clip_norm": 0.3},
)
def replicated_counted_twice():
    def make(original):
        return lambda gradients, *, device: original(gradients, device=device) * 2**0.5

    with instead(tensor, "total_norm", make):
        yield


@planted(
    "strategies/pipeline/parts.py, total_norm",
    "a tied parameter counts twice in the norm",
    "clip",
    **PIPELINE,
    flags={"optimizer.clip_norm": 0.3},
)
def tied_parameter_counts_twice():
    def make(original):
        def all_of_it(self, gradients):
            with mock.patch.object(self, "_counted_elsewhere", []):
                return original(self, gradients)

        return all_of_it

    with instead(Parts, "total_norm", make):
        yield


@planted(
    "training/step/step.py, __init__",
    "gradients are clipped before they are synchronised",
    "clip",
    workload=rows(),
    flags={"optimizer.clip_norm": 0.3},
)
def clipped_before_synchronisation():
    init = TrainStep.__init__

    def clipping(self, *args, **kwargs):
        init(self, *args, **kwargs)
        limit = self.config.optimizer.clip_norm
        if many() and limit is not None:
            for p in self.setup.parameters:
                p.register_hook(lambda g: g * torch.clamp(limit / 4 / g.norm(), max=1.0))

    with mock.patch.object(TrainStep, "__init__", clipping):
        yield


# updates


@planted(
    "strategies/zero1.py, send_updates",
    "the last rank's updates are not sent",
    "parameters",
    strategy="zero1",
    workload=rows(),
)
def updates_not_sent():
    def make(original):
        return lambda part, group, *, source=0, **kwargs: (
            0 if source == dist.get_world_size(group) - 1 else original(part, group, source=source, **kwargs)
        )

    with instead(zero1, "broadcast", make):
        yield


@planted(
    "training/setup/pruning.py, apply",
    "what is pruned stays zero on rank 0 only",
    "parameters",
    workload=rows(),
    flags={"pruning.method": "magnitude", "pruning.start_step": 2, "optimizer.weight_decay": 0.1},
)
def pruned_on_one_rank():
    def make(original):
        def partly(self):
            original(self)
            if dist.get_rank():
                with torch.no_grad():
                    for parameter, mask in zip(self.parameters.values(), self.masks.values(), strict=True):
                        parameter.add_(mask, alpha=1e-3)

        return partly

    with instead(Pruning, "apply", make):
        yield


# types


@planted(
    "strategies/fsdp.py, mixed_precision", "gradients are reduced in bf16", "dtype", strategy="fsdp", workload=rows()
)
def sharded_gradients_in_bf16():
    def make(original):
        def narrow(config, dtype):
            policy, notes = original(config, dtype)
            is_checked = config.precision.dtype == "fp64"
            return (policy if is_checked else MixedPrecisionPolicy(policy.param_dtype, torch.bfloat16)), notes

        return narrow

    with instead(fsdp, "mixed_precision", make):
        yield


@planted(
    "strategies/ddp.py, apply", "gradients are sent in bf16 although compression is none", "dtype", workload=rows()
)
def gradients_in_bf16():
    def send(state, bucket):
        buffer, narrow = bucket.buffer(), bucket.buffer().bfloat16() / dist.get_world_size()
        done = dist.all_reduce(narrow, async_op=True).get_future()
        return done.then(lambda future: buffer.copy_(future.value()[0]))

    def narrow(parallel, *, model, **_):
        if next(model.parameters()).dtype == torch.float32:
            parallel.model.register_comm_hook(None, send)
        return parallel

    with spoiled("ddp", narrow):
        yield


@planted(
    "strategies/zero1.py, send_updates",
    "updated parameters are sent in bf16",
    "dtype",
    strategy="zero1",
    workload=rows(),
)
def updates_in_bf16():
    def make(original):
        def narrow(part, group, **kwargs):
            sent = original(part, group, **kwargs)
            with torch.no_grad():
                for parameter in part:
                    if parameter.dtype == torch.float32:
                        parameter.copy_(parameter.bfloat16())
            return sent

        return narrow

    with instead(zero1, "broadcast", make):
        yield


@planted("strategies/pipeline/apply.py, forward", "activations go from stage to stage in bf16", "dtype", **PIPELINE)
def activations_in_bf16():
    def make(original):
        def narrow(self, stage, number, received):
            result = original(self, stage, number, received)
            return result if stage.is_last or result.dtype != torch.float32 else result.bfloat16().float()

        return narrow

    with instead(pipeline.Pipeline, "forward", make):
        yield


# replicas that train apart


APART = {"workload": rows(), "flags": {"local_sgd.sync_every": 3}}


@planted(
    "strategies/apart/replicas.py, moving",
    "the first parameter is left out of the averaging",
    "averaging",
    strategy="local_sgd",
    **APART,
)
def parameter_not_averaged():
    with instead(Replicas, "moving", lambda original: lambda self: original(self)[1:]):
        yield


@planted(
    "strategies/apart/replicas.py, _average_optimizer",
    "momentum is not averaged with the parameters",
    "averaging",
    strategy="local_sgd",
    **APART,
)
def momentum_not_averaged():
    with instead(Replicas, "_average_optimizer", lambda original: lambda self, group: None):
        yield


@planted(
    "strategies/apart/replicas.py, _average",
    "rank 0 weighs three times as much as the other",
    "averaging",
    strategy="local_sgd",
    **APART,
)
def first_replica_weighs_more():
    def make(original):
        def uneven(self, tensors, group, *, weight=1.0, **kwargs):
            return original(self, tensors, group, weight=0.5 if dist.get_rank() else 1.5, **kwargs)

        return uneven

    with instead(Replicas, "_average", make):
        yield


@planted(
    "strategies/diloco.py, synchronise", "the outer optimizer has no momentum", "averaging", strategy="diloco", **APART
)
def outer_momentum_missing():
    def make(original):
        def without(model, mesh, config, workload):
            changed = config.local_sgd.model_copy(update={"outer_momentum": 0.0})
            return original(model, mesh, config.model_copy(update={"local_sgd": changed}), workload)

        return without

    from scaleray.strategies import STRATEGIES, diloco

    with instead(diloco, "apply", make), mock.patch.dict(STRATEGIES, {"diloco": lambda *args: diloco.apply(*args)}):
        yield


@planted(
    "strategies/diloco.py, synchronise",
    "the anchor is where the last outer step ended only the first time",
    "averaging",
    strategy="diloco",
    **APART,
)
def anchor_stays():
    def stale(parallel, *, model, config, **_):
        start = {}

        def before_step(step):
            parallel.before_step(step)
            for name, value in parallel.state().items():
                if name.startswith("anchor."):
                    start.setdefault(name, value.clone())

        def after_update(step):
            for name, value in parallel.state().items():
                if name in start and step > config.local_sgd.sync_every:
                    value.copy_(start[name])
            parallel.after_update(step)

        return dataclasses.replace(parallel, before_step=before_step, after_update=after_update)

    with spoiled("diloco", stale):
        yield


@planted(
    "strategies/gossip.py, step",
    "neighbours weigh less than the graph says",
    "averaging",
    strategy="gossip",
    workload=rows(),
    world_size=4,
)
def neighbours_weigh_less():
    from scaleray.strategies import gossip

    def make(original):
        def lighter(graph, size, step, **kwargs):
            matrix = original(graph, size, step, **kwargs).copy()
            outside = 0.8 * (matrix - matrix.diagonal() * torch.eye(size).numpy())
            return outside + (1 - outside.sum(axis=1)) * torch.eye(size).numpy()

        return lighter

    with instead(gossip, "mixing_matrix", make):
        yield


assert local_sgd.apply  # the strategies above are those of the table


# compression


TOPK = {"workload": rows(), "flags": {"compression.name": "topk", "compression.density": 0.2}}


@planted("strategies/compression/hook.py, _LeftOver", "what was not sent is forgotten", "compression", **TOPK)
def left_over_forgotten():
    def make(original):
        def forgetful(self, factor, *, was_taken):
            original(self, factor, was_taken=was_taken)
            for values in self.by_name.values():
                values.zero_()

        return forgetful

    with instead(compression._LeftOver, "carry_over", make):
        yield


@planted(
    "strategies/compression/hook.py, _average",
    "what was not sent is kept at half its size",
    "compression",
    workload=rows(),
    flags={"compression.name": "powersgd", "compression.rank": 1},
)
def left_over_halved():
    def make(original):
        def halved(self, buffer, names):
            result = original(self, buffer, names)
            self._left.of(names).mul_(0.5)
            return result

        return halved

    with instead(compression.Compression, "_average", make):
        yield


@planted(
    "strategies/compression/hook.py, _average", "the second rank decodes something else than the first", "sync", **TOPK
)
def ranks_decode_differently():
    def make(original):
        def other(self, buffer, names):
            result = original(self, buffer, names)
            return result.mul_(1.01) if dist.get_rank() else result

        return other

    with instead(compression.Compression, "_average", make):
        yield


@planted(
    "strategies/compression/codecs.py, Cast",
    "a sum in place of the mean is sent in bf16",
    "compression",
    workload=rows(),
    flags={"compression.name": "bf16"},
)
def compressed_sum_for_a_mean():
    def make(original):
        def larger(self, buffer, names):
            return original(self, buffer, names).mul_(2)

        return larger

    with instead(compression.Compression, "_average", make):
        yield
