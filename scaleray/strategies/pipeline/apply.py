"""Pipeline parallelism: a model's blocks are on neighbouring workers, and micro-batches pass through them in sequence.

The stages are made in `stages`, and the order is one of torch.distributed.pipelining's schedules. Every worker of a
replica has the same rows, so each can call the workload's loss itself: the call ends with the worker's stage, and on
the last stage it returns the loss. Neighbours exchange only activations and their gradients."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.utils._pytree import tree_leaves

from scaleray.common.equal_models import dense_buffers
from scaleray.common.metric_names import BUBBLE_SHARE
from scaleray.common.seeding import stream_seed
from scaleray.config import RunConfig
from scaleray.config.recipe.pipeline_bubble import runs
from scaleray.errors import text_of
from scaleray.records.phases import Enter, Phase
from scaleray.strategies.contract.later import Later, on_device, steps_ahead
from scaleray.strategies.contract.parallel import Metrics, MicroBatch, Objective, Parallel
from scaleray.strategies.pipeline.parts import Parts
from scaleray.strategies.pipeline.pipeline_evaluation import Whole
from scaleray.strategies.pipeline.stages import Passed, Stage


class BusyTime:
    """Time in which this worker computes, and duration of its schedules. On CUDA both are measured by events, which are
    read some steps later, long after they have occurred; that code has not been run."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._later = steps_ahead(device)
        self._steps: deque[tuple[list[Any], list[Any]]] = deque()
        self._busy: list[Any] = []
        self._whole: list[Any] = []

    def start(self) -> None:
        """Begin a step."""
        self._busy, self._whole = [], []

    def working(self) -> contextlib.AbstractContextManager[None]:
        """Context in which this worker computes."""
        return self._timed(self._busy)

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Context in which a schedule runs."""
        return self._timed(self._whole)

    def end(self) -> tuple[float, float] | None:
        """End the step. Returns (seconds of computation, of the schedules) of the last step for which they are known,
        or None."""
        self._steps.append((self._busy, self._whole))
        if len(self._steps) <= self._later:
            return None
        busy, whole = self._steps.popleft()
        return sum(map(self._seconds, busy)), sum(map(self._seconds, whole))

    def _seconds(self, span: Any) -> float:
        if not self._on_cuda:
            return float(span)
        begin, end = span
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    @contextlib.contextmanager
    def _timed(self, spans: list[Any]) -> Iterator[None]:
        if self._on_cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            spans.append((begin, end))
        else:
            started = time.perf_counter()
            yield
            spans.append(time.perf_counter() - started)


def bubble_share(times: Later) -> float:
    """Share of a step in which workers waited for each other. times: seconds of computation, and of the schedules."""
    busy_s, whole_s = times.read()
    return 1.0 - busy_s / whole_s


SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,  # Huang et al. 2019, arXiv:1811.06965
    "1f1b": Schedule1F1B,  # Narayanan et al. 2019, SOSP; 2021, arXiv:2104.04473
    "interleaved_1f1b": ScheduleInterleaved1F1B,  # arXiv:2104.04473, section 2.2
    "zero_bubble": ScheduleInterleavedZeroBubble,  # Qi et al. 2023, arXiv:2401.10241
}
Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


def apply(model: nn.Module, mesh: DeviceMesh | None, config: RunConfig, workload: Any) -> Parallel:
    """Keep this worker's stages of `model`, over `mesh["pp"]`. Replicas of a stage share gradients over the data axes,
    and the workers of `mesh["tp"]` have a part of each layer.

    Collective. `model` itself is unchanged; its parameters on this worker are trained. Raises WorkloadError for a model
    that cannot be cut, during set-up or with the first rows."""
    if mesh is None:
        raise ValueError("pipeline needs a device mesh with the axis 'pp' and those of the data")
    parts = Parts(model, mesh, config, workload)
    degrees = config.degrees(dist.get_world_size())
    replica = dist.get_rank() // degrees.tensor % (degrees.data * degrees.context)
    pipeline, whole = Pipeline(parts, config, workload, replica=replica), Whole(parts)
    return Parallel(
        model=parts.module,
        module=parts.module,
        before_evaluation=parts.share_buffers,
        weights=parts.weights,
        close=pipeline.close,
        let_go=pipeline.let_go,
        total_norm=parts.total_norm,
        forward_is_collective=True,
        is_partitioned=True,
        parameter_names=tuple(parts.names),
        run_micro_batches=pipeline.run_micro_batches,
        counts_loss=parts.has_last and parts.part == 0,
        alone=lambda computation: computation(whole),
        bytes_sent=lambda: parts.sent.num_bytes,
        collectives=parts.sent.rows,
        no_arrivals="stages run one after the other and have no collective in common",
        tell_phases=pipeline.tell_phases,
        before_step=pipeline.before_step,
        metrics=pipeline.metrics,
        notes=[*([parts.split.note] if parts.split else []), parts.note()],
    )


class Pipeline:
    """Runs the micro-batches of a step through the stages of all workers of a replica."""

    def __init__(self, parts: Parts, config: RunConfig, workload: Any, *, replica: int) -> None:
        self.parts, self.workload, self.schedule_name = parts, workload, config.pipeline.schedule
        self._seed_of = partial(stream_seed, config.seed, "pipeline", replica)
        self._seed = self._seed_of(0)
        self._times: Later | None = None  # busy and whole, summed over the workers of the replica
        self._schedules: dict[Any, Any] = {}
        self._boundaries: dict[Any, list[Passed]] = {}
        self._modules = [_StageModule(self, stage) for stage in parts.stages]
        self._busy = BusyTime(parts.device)
        self.enter: Enter = lambda phase: phase
        self._pieces: list[MicroBatch] = []

    def before_step(self, step: int) -> None:
        """Set the seed of step `step`: all workers of a replica must draw the same numbers in the code around the
        blocks, whatever they drew inside."""
        self._seed = self._seed_of(step)

    def tell_phases(self, enter: Enter) -> None:
        """See `Parallel.tell_phases`."""
        self.enter = enter

    def metrics(self) -> Metrics:
        """Share of a step in which workers waited for each other; on a GPU, that of one or two steps earlier."""
        times = self._times
        return {} if times is None else {BUBBLE_SHARE.name: lambda: bubble_share(times)}

    def run_micro_batches(self, pieces: list[MicroBatch], objective: Objective, autocast: Autocast) -> None:
        """Run forward and backward passes of all micro-batches, and sum gradients over the replicas. Collective over
        the replica.

        Micro-batches of one shape pass through the schedule together. A smaller one at the end, and those beyond the
        number that the schedule can order at once, follow separately."""
        with self.parts.gathered():
            self._run_micro_batches(pieces, objective, autocast)
            self.parts.sum_gradients()
        self.parts.share_buffers()

    def _run_micro_batches(self, pieces: list[MicroBatch], objective: Objective, autocast: Autocast) -> None:
        parts = self.parts
        self._objective, self._autocast = objective, autocast
        if not parts.is_checked:
            self._check_by_loss(pieces[0])
        self._busy.start()
        self.enter(Phase.COMMUNICATION)  # but for what `computing` tells
        done = 0
        for signature, equal in _equal_pieces(pieces):
            for size in runs(self.schedule_name, num_workers=parts.num_workers, num_micro_batches=len(equal)):
                self._pieces, self._first = equal[:size], done
                schedule = self._schedule(signature, size)
                numbers = torch.arange(size)
                with self._busy.running(), _own_errors():
                    schedule.step(
                        *((numbers,) if parts.has_first else ()),
                        number=numbers,
                        target=numbers if parts.has_last else None,
                        return_outputs=False,
                    )
                equal = equal[size:]
                done += size
        self._pieces = []
        if (times := self._busy.end()) is not None:
            busy_s, whole_s = times
            parts.sends.seconds = (parts.sends.seconds or 0.0) + whole_s - busy_s
            both = on_device(times, parts.device)
            dist.all_reduce(both, group=parts.group)
            self._times = Later(both)

    @contextlib.contextmanager
    def computing(self, phase: Phase) -> Iterator[None]:
        """Context in which this worker computes without waiting for others."""
        self.enter(phase)
        with self._busy.working():
            yield
        self.enter(Phase.COMMUNICATION)

    def forward(self, stage: Stage, number: int, received: Passed) -> Passed | torch.Tensor:
        """Run one micro-batch through one stage. Returns the tensors that the next stage receives, or the scaled loss
        on the last stage."""
        piece = self._pieces[number]
        devices = [self.parts.device] if self.parts.device.type == "cuda" else []
        self.parts.in_mode_of_module(stage)
        with torch.random.fork_rng(devices):
            torch.manual_seed(_mixed(self._seed, self._first + number, 0))
            stage.entry.on_pass = lambda: _seed(_mixed(self._seed, self._first + number, 1 + stage.index))
            if stage.is_last:
                result: torch.Tensor = stage.run(
                    lambda module: self._objective(lambda computation: computation(module), piece), received
                )
                # totals that the loss does not use have a gradient, too, for which the stage before waits
                return result + sum(0 * totals.sum() for totals in received[1:])
            with self._autocast():
                passed = stage.run(lambda module: self.workload.loss(module, piece.batch), received)
        # a schedule detaches what it sent in place, which torch refuses for a view
        return tuple(
            each.clone() if each._is_view() or any(each is other for other in received) else each
            for each in (each.contiguous() for each in passed)
        )

    def close(self) -> None:
        """Discard gradients and schedules, and copy the values of all stages to the user's model. Collective."""
        self.parts.give_back()
        self._forget()

    def let_go(self) -> None:
        """Discard the gradients and the schedules if the model is no longer needed. Not collective."""
        self.parts.let_go()
        self._forget()

    def _forget(self) -> None:
        for parameter in self.parts.module.parameters():
            parameter.grad = None
        self._schedules.clear()
        self._modules.clear()

    def _check_by_loss(self, piece: MicroBatch) -> None:
        def call(module: nn.Module) -> Any:
            with self._autocast():
                return self.workload.loss(module, piece.batch)[0]

        self.parts.check_chain(call)

    def _schedule(self, signature: Any, size: int) -> Any:
        """Schedule for micro-batches of these shapes. Collective over the replica if the shapes are new."""
        key = (signature, size)
        if key not in self._schedules:
            metas = self._shapes(signature)
            stages = [_TimedStage(self, module, metas) for module in self._modules]
            name = self.schedule_name
            if name == "1f1b" and size < self.parts.num_stages:
                name = "gpipe"  # torch's 1F1B wants one for each stage; with fewer, all are in flight at once in either
            kind = SCHEDULES[name]
            given = stages[0] if name in ("gpipe", "1f1b") else stages
            # the objective is a sum that is divided already
            self._schedules[key] = kind(
                given, n_microbatches=size, loss_fn=lambda loss, number: loss, scale_grads=False
            )
        return self._schedules[key]

    def _shapes(self, signature: Any) -> list[Passed]:
        """Tensors without memory for those that each stage except the last sends. Collective over the replica."""
        if signature in self._boundaries:
            return self._boundaries[signature]
        parts = self.parts
        own = {stage.index: stage for stage in parts.stages}
        buffers = [(buffer, buffer.clone()) for buffer in dense_buffers(parts.module)]
        found: list[Passed] = []
        for index in range(parts.num_stages - 1):
            shared: list[Any] = [None]
            if index in own:
                received = tuple(
                    torch.zeros_like(meta, device=parts.device, requires_grad=meta.requires_grad)
                    for meta in (found[-1] if index else ())
                )
                with torch.enable_grad(), _own_errors():
                    result = self.forward(own[index], 0, received)
                shared = [[(tuple(each.shape), each.dtype, each.requires_grad) for each in result]]
            dist.broadcast_object_list(shared, group=parts.group, group_src=parts.owner(index), device=parts.device)
            found.append(
                tuple(
                    torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)
                    for shape, dtype, requires_grad in shared[0]
                )
            )
        with torch.no_grad():  # statistics of batches count real passes only
            for buffer, before in buffers:
                buffer.copy_(before)
        self._boundaries[signature] = found
        return found


class _StageModule(nn.Module):
    """Stage as torch's schedules call it: it takes an activation and returns an activation or a loss. number:
    micro-batch."""

    stage: Stage
    pipeline: Pipeline

    def __init__(self, pipeline: Pipeline, stage: Stage) -> None:
        super().__init__()
        self.stage_module = stage.module  # zero bubble asks for its parameters
        self.pipeline, self.stage = pipeline, stage

    def forward(self, *received: torch.Tensor, number: torch.Tensor) -> Passed | torch.Tensor:
        return self.pipeline.forward(self.stage, int(number), received if self.stage.index else ())


class _TimedStage(PipelineStage):
    """torch's stage with given shapes, which also measures its working time and counts the bytes that it sends."""

    def __init__(self, pipeline: Pipeline, module: _StageModule, metas: list[Passed]) -> None:
        parts, stage = pipeline.parts, module.stage
        number = torch.zeros(1, dtype=torch.int64)
        loss = torch.empty((), device="meta", requires_grad=True)
        super().__init__(
            module,
            stage.index,
            parts.num_stages,
            parts.device,
            group=parts.group,
            input_args=metas[stage.index - 1] if stage.index else number,
            output_args=loss if stage.is_last else metas[stage.index],
        )
        self._pipeline = pipeline

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._pipeline.computing(Phase.FORWARD):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._pipeline.computing(Phase.BACKWARD):
            result = super().backward_one_chunk(*args, **kwargs)
            self._pipeline.parts.put_by_gradients()
            return result

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._pipeline.computing(Phase.BACKWARD):
            super().backward_weight_one_chunk(*args, **kwargs)
            self._pipeline.parts.put_by_gradients()

    def _post_metadata_inference_cleanup(self) -> None:
        """Do nothing, since shapes are given. torch 2.13 would free the parameters that FSDP has gathered for this
        step, and drop the gradients of earlier micro-batches."""

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, operations: list[Any]) -> list[Any]:
        for operation in operations:
            self._pipeline.parts.sends.add(operation.tensor)
        return operations


def _equal_pieces(pieces: list[MicroBatch]) -> list[tuple[Any, list[MicroBatch]]]:
    """Groups of successive micro-batches whose tensors have the same shapes, and these shapes."""
    found: list[tuple[Any, list[MicroBatch]]] = []
    for piece in pieces:
        leaves = tree_leaves(piece.batch)
        signature = tuple((tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves)
        if found and found[-1][0] == signature:
            found[-1][1].append(piece)
        else:
            found.append((signature, [piece]))
    return found


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Re-raise a stage's own error, which torch wraps in a less informative RuntimeError with tensor shapes."""
    try:
        yield
    except RuntimeError as exc:
        if "failed to run forward" in text_of(exc) and isinstance(exc.__cause__, Exception):
            raise exc.__cause__ from None
        raise


def _mixed(seed: int, number: int, stage: int) -> int:
    """Seed for the random numbers of a micro-batch in a stage; all seeds differ."""
    return (seed + 0x9E3779B97F4A7C15 * (1 + number * 4096 + stage)) % 2**63


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
