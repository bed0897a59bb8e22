"""What a checkpoint costs the training: beside it, in front of it, and as rank 0's `torch.save`; and what it writes.

Two gloo workers train a model of linear layers with AdamW, real gradients, real all-reduce and real optimizer steps; the
forward pass also sleeps, as a CPU does while an accelerator computes. Checkpoints of the three kinds come in random order
within one run, with plain steps between them.

With --copies, workers send their parts to the memory of two holders after each step of a window, and after none of the next.

    python jobs/benchmarks/checkpoint_stall.py --repeats 5
    python jobs/benchmarks/checkpoint_stall.py --copies --strategy fsdp --sleep 0.1
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from scaleray import Workload
from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.holder import Holder
from scaleray.config import load_config
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.values import DataSize
from scaleray.data import Split, as_source
from scaleray.launch.workers.gloo import UserCode, gloo_processes
from scaleray.records.run_record import CheckpointRecord, EventRecord, StepRecord
from scaleray.training import loop
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.state.checkpointing import Checkpointing
from scaleray.training.state.memory_copies import HolderPlace, Holders

WORLD_SIZE = 2
SIDES = ("asynchronous", "synchronous", "torch_save")
SIZES = {"10M": (1024, 10), "120M": (2048, 28)}
"""Width and number of square layers."""
WARM_UP = 6  # steps that are not counted, after two checkpoints that allocate buffers
QUIET = 2  # last steps of a window, when its checkpoint is complete
RULES = """\
Two gloo workers of one thread each, AdamW, fp32; parameters and both moments are saved ({bytes}). A forward pass takes
{sleep:g} s of sleep on top of its arithmetic. A checkpoint comes after {window} steps each, {repeats} of every kind in random order
(seed {seed}). The cost of one is what its {window} steps took beyond {window} times the median of steps with none in flight,
so that waiting, copying and contention for the cores all count; noise can make it negative. `waited` is the part in which the training thread stood still.
Every checkpoint holds all bytes (`checkpoint.full_every: 1`) and is flushed to the disk; torch_save is what hand-written loops do:
rank 0 saves model and optimizer to one file and flushes it while the others wait at a barrier. Median (smallest-largest)."""


class Layers(Workload):
    """A stack of square layers on two rows: much state, little arithmetic."""

    def __init__(self, width: int = 64, depth: int = 2, sleep_s: float = 0.0, frozen: float = 0.0) -> None:
        self.width, self.depth, self.sleep_s, self.frozen = width, depth, sleep_s, frozen

    def build_model(self) -> nn.Module:
        model = nn.Sequential(*(nn.Linear(self.width, self.width, bias=False) for _ in range(self.depth)))
        for layer in list(model)[: round(self.frozen * self.depth)]:
            layer.requires_grad_(False)
        return model

    def datasets(self) -> dict[str, Any]:
        return {"train": {"x": np.random.default_rng(0).standard_normal((8, self.width), dtype=np.float32)}}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        time.sleep(self.sleep_s)
        return model(batch["x"]).pow(2).sum(), len(batch["x"])


class Scheduled(Checkpointing):
    """Checkpoints of a kind that a schedule names, by step."""

    def __init__(self, *args: Any, schedule: dict[int, str], folder: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.schedule, self.folder = schedule, folder

    def after_step(self, step: int, signals: tuple[float, ...]) -> bool:
        side = self.schedule.get(step)
        if side == "torch_save":
            self._torch_save()
        elif side is not None:
            self.saver.is_asynchronous = side == "asynchronous"
            self.save(step)
        return False

    def _torch_save(self) -> None:
        setup = self.state.setup
        if self.place.rank == 0:
            path = Path(self.folder, "rank0.pt")
            with open(path, "wb") as file:
                torch.save(
                    {"model": setup.parallel.module.state_dict(), "optimizer": setup.optimizer.state_dict()}, file
                )
                file.flush()
                os.fsync(file.fileno())
            path.unlink()
        dist.barrier()


class InWindows(Checkpointing):
    """Copies in memory after each step of every other window."""

    def __init__(self, *args: Any, window: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.window, self.num_copied = window, 0

    def after_step(self, step: int, signals: tuple[float, ...]) -> bool:
        return super().after_step(step, signals) if has_copies(step, self.window) else False


def has_copies(step: int, window: int) -> bool:
    """Whether a step is in a window with copies; the first window warms up."""
    return step // window % 2 == 0


def make_job(workload: Layers, steps: int, **flags: Any) -> tuple[TrainJob, dict[str, Any]]:
    """A job on WORLD_SIZE workers that neither evaluates nor saves by itself."""
    config = load_config(
        flags={
            "workload.name": "checkpoint_stall:Layers",
            "batch.global_size": 4,
            "optimizer.learning_rate": 1e-5,
            "scale.workers": flags.get("scale.workers", WORLD_SIZE),
            "stop.after": f"{steps} steps",
            "checkpoint.every_minutes": None,
            "checkpoint.save_final": False,
            "checkpoint.keep_last": 1,
            "tracking.every_steps": 10**6,
            "tracking.system_metrics": False,
            **flags,
        },
        environ={},
    )
    sources = {name: as_source(value, split=name) for name, value in workload.datasets().items()}
    recipe = derive(config, DataSize(sources["train"].num_rows, None))
    splits = {name: Split.of(name, source) for name, source in sources.items()}
    return TrainJob(config, recipe, workload, splits, time.time()), sources


def train(place: RankContext, job: TrainJob, sources: Any, schedule: dict[int, str], folder: str) -> list[Any]:
    """One worker's run; the records of rank 0."""
    torch.set_num_threads(1)
    records: list[Any] = []
    saves = Scheduled(job, place, Catalog.of_run(folder), emit=records.append, schedule=schedule, folder=folder)
    loop.run(job, place, sources=sources, emit=records.append, checkpointing=saves)
    return [r for r in records if isinstance(r, (StepRecord, CheckpointRecord))]


def measure(name: str, arguments: argparse.Namespace, folder: str) -> list[harness.Measurement]:
    """The cost of every checkpoint of one model size."""
    width, depth = SIZES[name]
    window = arguments.window
    order = [side for _, side in harness.interleaved(SIDES, repeats=arguments.repeats, seed=arguments.seed)]
    # the first two allocate buffers and warm the page cache; they are not counted
    schedule = {WARM_UP: "asynchronous", WARM_UP + window: "synchronous"}
    schedule |= {WARM_UP + window * (2 + number): side for number, side in enumerate(order)}
    steps = max(schedule) + window + arguments.plain
    workload = Layers(width, depth, arguments.sleep)
    job, sources = make_job(workload, steps, **{"checkpoint.full_every": 1})
    code = UserCode(None, {}, None, workload)
    with gloo_processes(WORLD_SIZE, code, timeout_s=600) as processes:
        records = processes.run(WORLD_SIZE, train, job, sources, schedule, folder, workload=workload)
    times = {r.step: r.step_time_s for r in records if isinstance(r, StepRecord)}
    saved = {r.step: r for r in records if isinstance(r, CheckpointRecord)}
    at_rest = {step + window - i for step in schedule for i in range(QUIET)} | set(
        range(steps - arguments.plain + 1, steps + 1)
    )
    plain = statistics.median(times[step] for step in sorted(at_rest))
    found = []
    for number, (step, side) in enumerate(list(schedule.items())[2:]):
        spent = sum(times[step + i] for i in range(1, window + 1))
        record = saved.get(step)
        found.append(
            {
                "side": side,
                "round": number // len(SIDES),
                "model": name,
                "cost_s": spent - window * plain,
                "plain_step_s": plain,
                "waited_s": record.stall_s if record else None,
                "duration_s": record.duration_s if record else None,
                "bytes": record.total_bytes if record else None,
            }
        )
    return found


def train_in_windows(
    place: RankContext, job: TrainJob, sources: Any, holders: list[HolderPlace], window: int
) -> list[Any]:
    """One worker's run with copies in every other window; its records, and at the end the number of copied states and
    its own CPU seconds."""
    torch.set_num_threads(1)
    records: list[Any] = []
    known = Holders(holders[place.rank % len(holders)], lambda: holders)
    saves = InWindows(job, place, Catalog([]), emit=records.append, holders=known, window=window)
    saves.find = lambda: 0
    loop.run(job, place, sources=sources, emit=records.append, checkpointing=saves)
    problems = [r.text for r in records if isinstance(r, EventRecord) and r.kind == "warning"]
    return [*(r for r in records if isinstance(r, StepRecord)), (saves.memory.num_saved, problems)]


def measure_copies(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The cost of copies after each step, as a share of a step without them."""
    width, depth = SIZES["10M"]
    window, steps = arguments.window, arguments.window * (2 * arguments.repeats + 1)
    flags = {"checkpoint.memory": {}, "strategy.name": arguments.strategy, "scale.workers": arguments.workers}
    job, sources = make_job(Layers(width, depth, arguments.sleep), steps, **flags)
    load = os.getloadavg()[0]
    holders = [Holder("127.0.0.1", "benchmark") for _ in range(2)]
    places = [HolderPlace(str(i), str(i), "127.0.0.1", h.port, "benchmark") for i, h in enumerate(holders)]
    started = os.times()
    with gloo_processes(arguments.workers, UserCode(None, {}, None, job.workload), timeout_s=600) as processes:
        *records, (num_saved, problems) = processes.run(
            arguments.workers, train_in_windows, job, sources, places, window, workload=job.workload
        )
    ended = os.times()
    held = max(holder.num_bytes for holder in holders)
    times = {r.step: r.step_time_s for r in records}
    means = {w: statistics.mean(times[s] for s in times if s // window == w) for w in range(1, max(times) // window)}
    pairs = [(means[w + 1], means[w]) for w in means if w % 2 == 1 and w + 1 in means]
    shares = [with_copies / without - 1 for with_copies, without in pairs]
    rows = [
        [
            harness.show([1e3 * without for _, without in pairs], "{:.1f}"),
            harness.show([1e3 * copied for copied, _ in pairs], "{:.1f}"),
            harness.show(shares, "{:+.1%}"),
            f"{num_saved} of {sum(has_copies(step, window) for step in times)}",
            f"{held / 2**20:.0f}",
        ]
    ]
    header = ["step without copies, ms", "with copies after each, ms", "cost", "states copied", "MiB a holder"]
    text = (
        f"{arguments.workers} gloo workers, {arguments.strategy}, 10 M parameters, AdamW, fp32; a forward pass sleeps "
        f"{arguments.sleep:g} s. Windows of {window} steps with and without copies follow each other; the cost is that of each "
        f"window to the one before it. Load {load:.1f} before, holders' CPU {ended.user + ended.system - started.user - started.system:.1f} s. "
        f"Median (smallest-largest).\n\n{harness.table(header, rows)}\n{chr(10).join(problems)}"
    )
    return text, {"times": times, "num_saved": num_saved, "shares": shares}


def measure_bytes(folder: str) -> dict[str, Any]:
    """Bytes of the checkpoints of a fine-tune in which 9 of 10 layers are frozen, against full ones."""
    workload = Layers(512, 20, frozen=0.9)
    job, sources = make_job(workload, 6, **{"checkpoint.full_every": 100})
    schedule = dict.fromkeys(range(1, 7), "synchronous")
    with gloo_processes(WORLD_SIZE, UserCode(None, {}, None, workload), timeout_s=600) as processes:
        records = processes.run(WORLD_SIZE, train, job, sources, schedule, folder, workload=workload)
    saved = [r for r in records if isinstance(r, CheckpointRecord)]
    written = [r.bytes_written for r in saved]
    return {"written": written, "full": saved[0].total_bytes, "share": statistics.median(written[1:]) / written[0]}


def main() -> None:
    """Measure, compare, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="checkpoints of each kind")
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--window", type=int, default=8, help="steps from one checkpoint to the next")
    parser.add_argument("--plain", type=int, default=12, help="steps without a checkpoint at the end")
    parser.add_argument("--sleep", type=float, default=1.0, help="seconds that a forward pass sleeps")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints go; a temporary folder by default")
    parser.add_argument("--copies", action="store_true", help="measure copies in memory instead")
    parser.add_argument("--strategy", default="fsdp", help="with --copies")
    parser.add_argument("--workers", type=int, default=4, help="with --copies")
    parser.add_argument("--results", type=Path, default=harness.RESULTS)
    arguments = parser.parse_args()
    conditions = harness.conditions(["torch"])
    if arguments.copies:
        text, found = measure_copies(arguments)
        harness.write_report(
            "memory_copies",
            title="What copies in memory cost the training",
            text=text,
            record={"conditions": conditions, "arguments": harness.arguments_of(arguments), **found},
            folder=arguments.results,
        )
        return
    measurements: list[harness.Measurement] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        fine_tune = measure_bytes(f"{folder}/fine-tune")
        for name in arguments.models:
            print(f"{name} ...", flush=True)
            measurements += measure(name, arguments, f"{folder}/{name}")
    rows = []
    for name in arguments.models:
        of_model = [m for m in measurements if m["model"] == name]
        for side in SIDES:
            mine = [m for m in of_model if m["side"] == side]
            others = {m["round"]: m["cost_s"] for m in of_model if m["side"] == "synchronous"}
            shares = [m["cost_s"] / others[m["round"]] for m in mine if others.get(m["round"])]
            rows.append(
                [
                    name,
                    side,
                    harness.show([m["cost_s"] for m in mine], "{:.3f}"),
                    harness.show(shares, "{:.1%}"),
                    harness.show([m["waited_s"] for m in mine], "{:.3f}"),
                    harness.show([m["duration_s"] for m in mine], "{:.2f}"),
                    f"{mine[0]['plain_step_s']:.2f}",
                ]
            )
    header = [
        "parameters",
        "checkpoint",
        "cost to training, s",
        "of the synchronous one",
        "waited, s",
        "until complete, s",
        "plain step, s",
    ]
    sizes = ", ".join(
        f"{name}: {max(m['bytes'] or 0 for m in measurements if m['model'] == name) / 2**20:.0f} MiB"
        for name in arguments.models
    )
    rules = RULES.format(
        bytes=sizes, sleep=arguments.sleep, window=arguments.window, repeats=arguments.repeats, seed=arguments.seed
    )
    words = (
        f"Fine-tune with 90 % of the parameters frozen (5.2 M parameters, AdamW): the first checkpoint writes {fine_tune['written'][0]:,} bytes, "
        f"each later one {math.floor(statistics.median(fine_tune['written'][1:])):,}: {fine_tune['share']:.1%}."
    )
    text = f"{rules}\n\n{harness.table(header, rows)}\n\n{words}"
    record = {
        "conditions": conditions,
        "arguments": harness.arguments_of(arguments),
        "measurements": measurements,
        "fine_tune": fine_tune,
    }
    harness.write_report(
        "checkpoint_stall",
        title="What a checkpoint costs the training",
        text=text,
        record=record,
        folder=arguments.results,
    )


if __name__ == "__main__":
    main()
