"""Checks of a device beside its speed, each by processes of its own; `gpu_training.py` starts them.

    python gpu_checks.py TASK.json RANK     writes what it found to the file that the task names

- certificate: `verify` in float64, on the device, against one process on the CPU, beside the same on the CPU.
- reads: how often the host waits for the device within a steady step, by setting; torch's own warnings count as well.
- overlap: how long the host needs to launch a step, and what the device computes while rows and gradients travel.
- checkpoint: what a checkpoint costs the training, beside it and in front of it.

Not run on a GPU yet. With the CPU in its place everything runs but what only a GPU's profile shows.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import checkpoint_stall
import harness
import torch
import torch.distributed as dist
from gpu_workload import RandomTokens
from host_reads import reads_of_steps
from torch import nn
from torch.autograd import DeviceType

from scaleray.checkpoints.catalog import Catalog
from scaleray.config import load_config
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.values import DataSize
from scaleray.data import TRAIN, Split, as_source
from scaleray.records.certificate import Outcome
from scaleray.records.run_record import CheckpointRecord, StepRecord
from scaleray.strategies.contract.later import STEPS_AHEAD
from scaleray.training import loop
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.step.step import TrainStep
from scaleray.verification.variants import Assignment, Variant, verify_group
from scaleray.verification.verification_plan import make_plan
from scaleray.verification.verify_options import VerifyOptions

Spans = list[tuple[float, float]]
"""Beginning and end of each of some events, in microseconds."""
ADAMW = {"optimizer.name": "adamw", "optimizer.clip_norm": 1.0, "on_nonfinite": "skip"}
READS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw, clipped": ("ddp", ADAMW),
    "bf16": ("ddp", {**ADAMW, "precision.dtype": "bf16"}),
    "fp16": ("ddp", {**ADAMW, "precision.dtype": "fp16"}),
    "sgd": ("ddp", {"optimizer.name": "sgd"}),
    "2 micro-batches": ("ddp", {**ADAMW, "batch.micro_size": 2}),
    "each step's norm": ("ddp", {**ADAMW, "tracking.every_steps": 1}),
    "powersgd": ("ddp", {**ADAMW, "compression.name": "powersgd"}),
    "zero1": ("zero1", ADAMW),
    "fsdp": ("fsdp", ADAMW),
    "fsdp, fp16": ("fsdp", {**ADAMW, "precision.dtype": "fp16"}),
    "local_sgd": ("local_sgd", ADAMW),
    "lamb": ("ddp", {**ADAMW, "optimizer.name": "lamb"}),
}
"""Strategy and flags of each training whose reads are counted; lamb's verdict is the one that the host must read."""
IN_A_GROUP_OF_ONE = ("ddp", "zero1", "fsdp")
STEADY = range(4, 9)
"""Steps, from 1, of which reads are counted."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """device: `cuda` or `cpu`. workers: processes, each with a device. meeting: file where they meet."""

    part: str
    device: str
    is_quick: bool
    workers: int
    meeting: str
    result: str


@dataclass(frozen=True)
class Member(RankContext):
    """A worker in a process group, which it has alone too: so that strategies wrap the model as among many."""

    @property
    def group(self) -> Any:
        return dist.group.WORLD


class FromTheCpu(RandomTokens):
    """The same initial parameters on every device."""

    def build_model(self) -> nn.Module:
        with torch.device("cpu"):
            return super().build_model()


def join(task: Task, rank: int) -> Member:
    """Join the workers of the task. Collective."""
    device = torch.device(task.device, rank) if task.device == "cuda" else torch.device(task.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{task.meeting}", rank=rank, world_size=task.workers)
    return Member(rank, task.workers, rank, task.workers, device=device)


def make_job(
    workload: Any, place: RankContext, strategy: str | None, flags: dict[str, Any]
) -> tuple[TrainJob, dict[str, Any]]:
    """A training that neither evaluates nor saves. strategy: also for a worker alone."""
    config = load_config(
        flags={
            "workload.name": "gpu_workload:RandomTokens",
            "optimizer.learning_rate": 1e-3,
            "scale.workers": place.world_size,
            "scale.gpus_per_worker": int(place.device.type == "cuda"),
            "checkpoint.every_minutes": None,
            "checkpoint.save_final": False,
            "tracking.every_steps": 10**6,
            "tracking.system_metrics": False,
            **flags,
        },
        environ={},
    )
    source = as_source(workload.datasets()[TRAIN], split=TRAIN)
    recipe = derive(config, DataSize(source.num_rows, source.tokens_per_row))
    if strategy is not None:
        recipe = dataclasses.replace(recipe, strategy=strategy)
    return TrainJob(config, recipe, workload, {TRAIN: Split.of(TRAIN, source)}, time.time()), {TRAIN: source}


# the certificate


def certificate(task: Task, place: Member) -> dict[str, Any]:
    """Distances of every variant from one process on the CPU, on the CPU and on the device."""
    workload = FromTheCpu("smoke", 16, num_rows=96)
    config = load_config(
        flags={
            "workload.name": "gpu_checks:FromTheCpu",
            "batch.global_size": 12,
            "optimizer.name": "adamw",
            "optimizer.learning_rate": 1e-3,
            "optimizer.clip_norm": 1.0,
            "stop.after": "4 epochs",
            "scale.gpus_per_worker": int(task.device == "cuda"),
        },
        environ={},
    )
    sources = {TRAIN: as_source(workload.datasets()[TRAIN], split=TRAIN)}
    question = VerifyOptions("all", world_sizes=(1, task.workers), steps=6 if task.is_quick else 20)
    plan = make_plan(config, question, workload, sources)
    box: list[Any] = [tempfile.mkdtemp() if place.rank == 0 else None]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    found: dict[str, dict[str, Any]] = {}
    references: Any = {}
    if place.rank == 0:  # the certificate of the CPU: one process, whose trace is the reference of all others
        alone = Assignment(plan.reference, tuple(plan.groups[1]), question.allowed, box[0])
        outcomes, references = verify_group(RankContext(), alone, {}, sources=sources)
        found |= {o.strategy + f" x 1, {o.accumulation}": {"cpu": shown(o)} for o in outcomes}
    sizes = sorted({1, task.workers}) if task.device == "cuda" else [task.workers]
    for size in sizes:
        here = RankContext(device=place.device) if size == 1 < task.workers else place
        variants = plan.groups[size]
        if task.workers == 1:  # then strategies have a group of one, so that the device's collectives run at least
            variants = [*variants, *(in_a_group(v, name) for v in variants for name in IN_A_GROUP_OF_ONE)]
        if place.rank < size:
            group = Assignment(plan.reference, tuple(variants), question.allowed, box[0])
            outcomes, references = verify_group(here, group, references, sources=sources)
            for o in outcomes:
                found.setdefault(f"{o.strategy} x {size}, {o.accumulation}", {})[task.device] = shown(o)
        dist.barrier()
    return {"bound": question.allowed, "steps": plan.reference.job.recipe.total_steps, "variants": found}


def in_a_group(variant: Variant, strategy: str) -> Variant:
    """The variant under a strategy that nobody would choose for a worker alone."""
    spread = lambda job: dataclasses.replace(job, recipe=dataclasses.replace(job.recipe, strategy=strategy))
    return dataclasses.replace(variant.mapped(spread), strategy=strategy)


def shown(outcome: Outcome) -> str:
    """An outcome in a few words."""
    if outcome.verdict == "differs" and outcome.mismatch is not None:
        return f"differs: {outcome.mismatch.quantity} at step {outcome.mismatch.step}, {outcome.mismatch.why}"[:200]
    if outcome.verdict == "refused":
        return f"refused: {outcome.words}"[:120]
    return f"{outcome.verdict}, {outcome.comparison.largest:.1e}"


# reads


def reads(task: Task, place: Member) -> dict[str, Any]:
    """The most reads in a steady step of each setting, with their places."""
    found: dict[str, Any] = {}
    for name, (strategy, flags) in READS.items():
        workload = RandomTokens("smoke", 16, num_rows=256)
        base = {"batch.global_size": 4 * place.world_size, "stop.after": f"{STEADY[-1]} steps"}
        try:
            job, sources = make_job(workload, place, strategy, {**base, **flags})
            # the CPU takes the part of a device that computes beside the host
            ahead = mock.patch.object(loop, "steps_ahead", return_value=STEPS_AHEAD)
            with ahead, reads_of_steps(task.device) as by_step:
                loop.run(job, place, sources=sources, emit=lambda message: None)
        except Exception as exc:  # the others are still worth knowing
            found[name] = {"not_run": " ".join(f"{type(exc).__name__}: {exc}".split())[:200]}
            continue
        steady = [by_step[step] for step in STEADY]
        worst = max(steady, key=lambda reads: sum(reads.values()))
        found[name] = {"strategy": strategy, "reads": sum(worst.values()), "where": worst}
    return {"settings": found}


# overlap


def overlap(task: Task, place: Member) -> dict[str, Any]:
    """Shares of the time that rows and gradients travel in which something is computed; the host's time for a step."""
    size, length, rows = ("smoke", 32, 4) if task.is_quick else ("124m", 1024, 16)
    workload = RandomTokens(size, length, num_rows=1024)
    flags = {**ADAMW, "precision.dtype": "bf16", "batch.global_size": rows * place.world_size, "stop.after": "16 steps"}
    job, sources = make_job(workload, place, "ddp", flags)
    messages: list[Any] = []
    activities = [torch.profiler.ProfilerActivity.CPU]
    if task.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    with profiled(profiler, first=8, last=13, device=place.device) as launch_s:
        summary = loop.run(job, place, sources=sources, emit=messages.append)
    step_times = [m.step_time_s for m in messages if isinstance(m, StepRecord)]
    spans = spans_of(profiler.events() or [])
    return {
        "model": size,
        "launch_ms": 1000 * statistics.median(launch_s[2:7]),
        "step_ms": 1000 * statistics.median(step_times[2:7]) if step_times else None,
        "memory": summary.memory,
        "device": shares(*spans) if any(spans) else "skipped: only a GPU's profile shows what it computes, and when",
    }


@contextmanager
def profiled(profiler: Any, *, first: int, last: int, device: torch.device) -> Iterator[list[float]]:
    """Context in which the profiler sees steps `first` to `last`; gives the host's seconds in the launch of each step."""
    launch, times = TrainStep.launch, []

    def timed(self: TrainStep, *args: Any, **kwargs: Any) -> Any:
        if self.num_updates + 1 == first:
            profiler.start()
        started = time.perf_counter()
        launched = launch(self, *args, **kwargs)
        times.append(time.perf_counter() - started)
        if self.num_updates == last:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            profiler.stop()
        return launched

    with mock.patch.object(TrainStep, "launch", timed):
        yield times


def spans_of(events: Sequence[Any]) -> tuple[Spans, Spans, Spans]:
    """When the device computed, copied rows from the host, and communicated."""
    computed: Spans = []
    copied: Spans = []
    communicated: Spans = []
    for event in events:
        # names that the host gives to ranges of work are no work of their own
        if event.device_type != DeviceType.CUDA or event.is_user_annotation:
            continue
        kind = computed
        if "HtoD" in event.name:
            kind = copied
        elif "nccl" in event.name.lower():
            kind = communicated
        kind.append((event.time_range.start, event.time_range.end))
    return computed, copied, communicated


def shares(computed: Spans, copied: Spans, communicated: Spans) -> dict[str, float | None]:
    """Share of the window in which the device computes; shares of copies and of communication that lie under that."""
    everything = [*computed, *copied, *communicated]
    window = max(end for _, end in everything) - min(start for start, _ in everything)
    return {
        "computes": length_of(merged(computed)) / window,
        "copies under it": under(copied, computed),
        "communication under it": under(communicated, computed),
    }


def under(spans: Spans, others: Spans) -> float | None:
    """Share of the spans' time in which one of the others runs; None without spans."""
    mine, theirs = merged(spans), merged(others)
    total = length_of(mine)
    if not total:
        return None
    return (total + length_of(theirs) - length_of(merged([*mine, *theirs]))) / total


def merged(spans: Spans) -> Spans:
    """The time that the spans cover, without overlaps and in order."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length_of(spans: Spans) -> float:
    """The sum of their lengths."""
    return sum(end - start for start, end in spans)


# checkpoints


def checkpoint(task: Task, place: Member) -> dict[str, Any]:
    """What checkpoints beside the training and in front of it cost, and a `torch.save`."""
    width, depth = (256, 4) if task.is_quick else checkpoint_stall.SIZES["120M"]
    # steps long enough for a checkpoint to be complete before the next one
    workload = checkpoint_stall.Layers(width, depth, sleep_s=0.01 if task.is_quick else 0.4)
    window, warm_up = 8, 6
    order = [side for _, side in harness.interleaved(checkpoint_stall.SIDES, repeats=1 if task.is_quick else 3, seed=0)]
    schedule = {warm_up + window * i: side for i, side in enumerate(["asynchronous", "synchronous", *order])}
    flags = {"checkpoint.full_every": 1, "scale.workers": 1, "scale.gpus_per_worker": int(task.device == "cuda")}
    job, sources = checkpoint_stall.make_job(workload, max(schedule) + 2 * window, **flags)
    messages: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        saves = checkpoint_stall.Scheduled(
            job, place, Catalog.of_run(folder), emit=messages.append, schedule=schedule, folder=folder
        )
        loop.run(job, place, sources=sources, emit=messages.append, checkpointing=saves)
    times = {m.step: m.step_time_s for m in messages if isinstance(m, StepRecord)}
    saved = {m.step: m for m in messages if isinstance(m, CheckpointRecord)}
    plain = statistics.median(times[step] for step in sorted(times)[-window:])
    found: dict[str, list[Any]] = {}
    for step, side in list(schedule.items())[2:]:
        cost_s = sum(times[step + i] for i in range(1, window + 1)) - window * plain
        waited_s = saved[step].stall_s if step in saved else None
        found.setdefault(side, []).append({"cost_s": cost_s, "waited_s": waited_s})
    num_bytes = max((m.total_bytes for m in saved.values()), default=0)
    return {"bytes": num_bytes, "plain_step_s": plain, "sides": found}


PARTS = {"certificate": certificate, "reads": reads, "overlap": overlap, "checkpoint": checkpoint}
ALONE = ("checkpoint",)
"""Parts that one worker does."""


def describe(part: str, found: dict[str, Any]) -> str:
    """What a part found, as Markdown."""
    if part == "certificate":
        devices = sorted({device for by_device in found["variants"].values() for device in by_device})
        rows = [[name, *(of.get(d, "") for d in devices)] for name, of in found["variants"].items()]
        words = f"{found['steps']} steps in float64 against one process on the CPU, bound {found['bound']:g}; the largest difference."
        return f"{words}\n\n{harness.table(['variant', *devices], rows)}"
    if part == "reads":
        rows = []
        for name, of in found["settings"].items():
            where = ", ".join(f"{place} {times}x" for place, times in of.get("where", {}).items())
            rows.append([name, of.get("strategy", ""), str(of.get("reads", "not run")), where or of.get("not_run", "")])
        words = f"Reads of the device by the host within the launch of a step, the most of steps {STEADY[0]} to {STEADY[-1]}."
        return f"{words}\n\n{harness.table(['setting', 'strategy', 'reads', 'where'], rows)}"
    if part == "overlap":
        step = "-" if found["step_ms"] is None else f"{found['step_ms']:.1f}"
        lines = [f"- the host launches a step of {found['model']} in {found['launch_ms']:.1f} ms; it takes {step} ms"]
        if isinstance(found["device"], str):
            return "\n".join([*lines, f"- {found['device']}"])
        told = {name: "none" if share is None else f"{share:.0%}" for name, share in found["device"].items()}
        lines += [f"- {name}: {share}" for name, share in told.items()]
        gib = {k: v / 2**30 for k, v in found["memory"].items() if k.endswith("_bytes") and isinstance(v, (int, float))}
        return "\n".join([*lines, "- memory, GiB: " + ", ".join(f"{k[:-6]} {v:.2f}" for k, v in gib.items())])
    rows = [
        [side, harness.show([m["cost_s"] for m in of], "{:.3f}"), harness.show([m["waited_s"] for m in of], "{:.3f}")]
        for side, of in found["sides"].items()
    ]
    words = f"{found['bytes'] / 2**20:.0f} MiB a checkpoint, {found['plain_step_s']:.4f} s a step without one."
    return f"{words}\n\n{harness.table(['checkpoint', 'cost to training, s', 'waited, s'], rows)}"


def main() -> None:
    task, rank = Task(**json.loads(Path(sys.argv[1]).read_text())), int(sys.argv[2])
    torch.set_num_threads(1)
    found = PARTS[task.part](task, join(task, rank))
    dist.destroy_process_group()
    if rank == 0:
        Path(task.result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
