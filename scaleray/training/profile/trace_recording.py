"""Traces of a training's last steps on chosen ranks, made by torch.profiler, as gzipped JSON in the run's folder.

All ranks take part in finding the slowest rank, and in barriers through which clocks are compared. The training is not
affected: the weights are bit-identical."""

import contextlib
import gzip
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity

from scaleray.common.filesystems import open_filesystem
from scaleray.common.model_blocks import find_blocks
from scaleray.common.watchers import Guard, Watcher
from scaleray.profiling.traces.kernel_kinds import Kind, kinds_of
from scaleray.profiling.traces.trace import MODULE_PREFIX, OWN_KEY, read_trace
from scaleray.records.worker_requests import TraceRequest
from scaleray.training.observer import Observer
from scaleray.training.profile.memory_snapshot import MemoryHistory
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.rank_context import RankContext

NUM_BARRIERS = 32
NO_LINES = "6"
"""Log level of Kineto above its lines about each start and stop (USDT, 5), which every process prints on stderr. Its
errors are below this level (4) and concern GPUs, so it is set only on a CPU."""
BYTES_OF_EVENT, SMALLER_BY_GZIP = 420, 12
"""Bytes in the JSON of an event with shapes, and gzip's compression factor: means over the traces of this project's
jobs."""
EVENTS_OF_MODULE, EVENTS_OF_PARAMETER = 40, 25
"""Events of a module without parts in a micro-batch, forward and backward, and events of a parameter in a step."""


class Tells(Protocol):
    """Log of the run, and wrapper of calls that may fail."""

    guard: Guard

    def say(self, text: str) -> None: ...


def tracers(job: TrainJob, place: RankContext, tells: Tells) -> list[Observer]:
    """Observer that traces a training, if requested. Raises ConfigError if the training is too short."""
    return [TraceRecorder(job.trace, job, place, tells)] if job.trace is not None else []


class TraceRecorder(Observer):
    """Traces the requested steps. Every rank has one, whether it is traced or not."""

    def __init__(self, request: TraceRequest, job: TrainJob, place: RankContext, tells: Tells) -> None:
        self.request, self.place, self.guard, self.say = request, place, tells.guard, tells.say
        self.num_micro_batches = job.recipe.accumulation_steps
        self.first = request.first_step(job.recipe.total_steps)
        self.is_fixed = request.is_fixed(place.rank, place.local_rank)
        self.is_traced = request.operators and (self.is_fixed or request.slowest)
        self.memory = MemoryHistory(request, place) if request.memory and self.is_fixed else None
        self.profiler: Any = None
        self.setup: Setup | None = None
        self.hooks: list[Any] = []
        self.left_barriers_at_ns: list[int] = []

    def begin(self, setup: Setup) -> None:
        """Log the expected size of the traces before they are written."""
        self.setup = setup
        if self.request.memory and self.place.device.type != "cuda":
            self.say("no memory snapshot is taken: only a GPU's allocator can report what its blocks are for")
        if self.request.operators:
            mib = expected_bytes(setup.parallel.module, self.num_micro_batches, self.request.steps) / 2**20
            which = "every rank, some of whose traces are kept" if self.request.slowest else "each chosen rank"
            self.say(
                f"traces: steps {self.first + self.request.warmup} to {self._end - 1} of {which}, about {mib:.1f} MiB "
                f"each as JSON and {mib / SMALLER_BY_GZIP:.1f} MiB in {self.request.path}"
            )

    @property
    def _end(self) -> int:
        return self.first + self.request.warmup + self.request.steps

    def during_step(self, number: int) -> contextlib.AbstractContextManager[None] | None:
        """Advance the profiler at the beginning of a step; the step itself runs as usual."""
        if number < self.first or number > self._end:
            return None
        if number == self.first + self.request.warmup:
            self._settle()
            self._compare_clocks()
            if self.memory is not None:
                self.guard(Watcher.TRACES, self.memory.start, None, part="memory")
        if number == self._end:
            self._settle()
        if self.is_traced:
            self.guard(Watcher.TRACES, lambda: self._go_on(number), None)
        if number == self._end:
            self._finish()
        return None

    def close(self) -> None:
        """Stop active recordings, even after an error."""
        self._unhook()
        if self.profiler is not None:
            with contextlib.suppress(Exception):  # not by the guard, which calls nobody who has failed
                self.profiler.stop()
            self.profiler = None
        if self.memory is not None:
            self.guard(Watcher.TRACES, self.memory.stop, None, part="memory")

    def _go_on(self, number: int) -> None:
        if number == self.first:
            self.profiler = self._make()
            self.profiler.start()
            return
        if number == self.first + self.request.warmup:
            self._hook()
        if number == self._end:
            about = {
                "rank": self.place.rank,
                "world_size": self.place.world_size,
                "node": self.place.node,
                "torch": torch.__version__,
                "first_step": self.first + self.request.warmup,
                "left_barriers_at_ns": self.left_barriers_at_ns,
            }
            self.profiler.add_metadata_json(OWN_KEY, json.dumps(about))
        self.profiler.step()

    def _make(self) -> Any:
        warmup, active = self.request.warmup, self.request.steps

        def action(step: int) -> ProfilerAction:
            if step < warmup:
                return ProfilerAction.WARMUP
            if step < warmup + active:
                is_last = step == warmup + active - 1
                return ProfilerAction.RECORD_AND_SAVE if is_last else ProfilerAction.RECORD
            return ProfilerAction.NONE

        activities = [ProfilerActivity.CPU]
        if self.place.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        else:
            os.environ.setdefault("KINETO_LOG_LEVEL", NO_LINES)
        return torch.profiler.profile(activities=activities, schedule=action, record_shapes=True)

    def _finish(self) -> None:
        """Save the trace on the chosen ranks; all ranks decide together which is the slowest."""
        self._unhook()
        self.guard(Watcher.TRACES, self._save_memory, None, part="memory")
        with tempfile.TemporaryDirectory() as folder:
            file, waited_ns = Path(folder) / "trace.json", math.inf
            if self.is_traced and self.profiler is not None:
                waited_ns = self.guard(Watcher.TRACES, lambda: self._exported(file), math.inf)
            slowest = self._slowest(waited_ns) if self.request.operators and self.request.slowest else None
            if waited_ns < math.inf and (self.is_fixed or slowest == self.place.rank):
                self.guard(Watcher.TRACES, lambda: self._save("rank", file.read_bytes()), None)

    def _save_memory(self) -> None:
        if self.memory is not None and self.setup is not None:
            snapshot = self.memory.taken(self.setup)
            if snapshot is not None:
                self._save("memory", snapshot)

    def _exported(self, file: Path) -> float:
        """Write the trace. Returns the nanoseconds in it during which this rank communicated."""
        self.profiler.export_chrome_trace(str(file))
        self.profiler.stop()
        self.profiler = None
        if not self.request.slowest:
            return 0.0
        with file.open("rb") as opened:
            trace = read_trace(opened, file.name)
        return float(trace.duration[kinds_of(trace) == Kind.COMMUNICATION].sum())

    def _slowest(self, waited_ns: float) -> int | None:
        """The rank that waited least in collectives: the others waited for it. Collective."""
        # not infinity: infinity times 0 is no number
        known = waited_ns if math.isfinite(waited_ns) else -1.0
        row = [known if rank == self.place.rank else 0.0 for rank in range(self.place.world_size)]
        all_waited = {rank: each for rank, each in enumerate(self.place.all_reduce(row)) if each >= 0}
        return min(all_waited, key=lambda rank: all_waited[rank]) if all_waited else None

    def _save(self, kind: str, content: bytes) -> None:
        filesystem, path = open_filesystem(self.request.path)
        filesystem.create_dir(path, recursive=True)
        with filesystem.open_output_stream(f"{path}/{kind}{self.place.rank}.json.gz", compression=None) as file:
            file.write(gzip.compress(content, 6))

    def _compare_clocks(self) -> None:
        """Leave barriers together with all ranks, and note the time. Collective."""
        for _ in range(NUM_BARRIERS):
            self.place.all_reduce([0.0])
            self.left_barriers_at_ns.append(time.time_ns())

    def _settle(self) -> None:
        """Wait for the device, so that a trace contains all of its steps and nothing from earlier ones."""
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)

    def _hook(self) -> None:
        if self.setup is None or self.setup.compilation is not None:
            return  # a compiled module with hooks would be compiled again
        for name, module in named_parts(self.setup.parallel.module):
            self.hooks += _annotated(name, module)

    def _unhook(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks = []


def expected_bytes(module: nn.Module, num_micro_batches: int, num_steps: int) -> int:
    """Size of a trace as JSON, estimated from the number of modules and parameters. The traces of one job had 0.6 times
    this size, those of another 1.7 times."""
    num_parts = sum(1 for part in module.modules() if next(part.children(), None) is None)
    num_parameters = sum(1 for parameter in module.parameters() if parameter.requires_grad)
    events = num_parts * EVENTS_OF_MODULE * num_micro_batches + num_parameters * EVENTS_OF_PARAMETER
    return events * BYTES_OF_EVENT * num_steps


def named_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts that a trace names: repeated blocks and the modules next to them."""
    blocks = {id(block) for block in find_blocks(module)}
    yield from _named_parts(module, "", blocks)


def _named_parts(module: nn.Module, prefix: str, blocks: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for name, part in module.named_children():
        has_blocks = id(part) not in blocks and any(id(each) in blocks for each in part.modules())
        if has_blocks or name == "module":  # as DistributedDataParallel calls what it wraps
            yield from _named_parts(part, prefix if name == "module" else f"{prefix}{name}.", blocks)
        else:
            yield prefix + name, part


def _annotated(name: str, module: nn.Module) -> list[Any]:
    """Hooks that mark the forward pass of a module in a trace with the module's name."""
    under_way: list[Any] = []

    def before(*_: Any) -> None:
        annotation = torch.profiler.record_function(MODULE_PREFIX + name)
        annotation.__enter__()
        under_way.append(annotation)

    def after(*_: Any) -> None:
        if under_way:
            under_way.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]
