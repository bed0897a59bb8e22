"""What pairs and triples of axes cost beyond their axes alone, and whether a ring of contexts hides its transfers.

Workers are gloo processes on this machine. A block of the model sleeps for as long as its rows and its share of each row would take on an
accelerator (`scaleray.emulation`); loop, collectives, gradients and optimizer are real.

    python jobs/benchmarks/layouts.py --repeats 5
    python jobs/benchmarks/layouts.py --layouts "replicate 2 x tensor 2" "shard 2 x context 2"
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from sleeping_model import SleepingModel

from scaleray.config import load_config
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.values import DataSize
from scaleray.data import Split, as_source
from scaleray.launch.workers.gloo import UserCode, gloo_processes
from scaleray.parallel import ring_attention
from scaleray.records.run_record import StepRecord
from scaleray.training import loop
from scaleray.training.health import flight_recorder
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext

ROWS, MICRO_BATCHES, BLOCKS, EXPERTS = 32, 2, 2, 4
SEQUENCE_LENGTH = 16
AXES = ("pipeline", "replicate", "shard", "context", "tensor")
PAIRS = tuple(f"{first} 2 x {second} 2" for i, first in enumerate(AXES) for second in AXES[i + 1 :])
TRIPLES = (
    "pipeline 2 x shard 2 x tensor 2", "pipeline 2 x replicate 2 x context 2", "replicate 2 x shard 2 x tensor 2",
    "replicate 2 x shard 2 x context 2", "shard 2 x context 2 x tensor 2", "pipeline 2 x context 2 x tensor 2",
)  # fmt: skip
WITH_EXPERTS = ("replicate 2 x expert 2",)
RING = ("overlapped", "in turn")
RULES = """\
A Llama of {blocks} blocks of width 8 over {rows} rows of {length} bytes a step in {micro_batches} micro-batches, so small that its arithmetic is
little: what is left of it is Python and gloo. One worker's step sleeps {step_ms:g} ms in its blocks, of which `tensor` and `context` leave each
worker its share of every row. {steps} steps a run, the first {warmup} left out; {repeats} runs of each layout in random order (seed {seed}), gloo
workers of one thread. `alone`: what the axes alone predict, the time of one worker times, for each axis, the time with that axis alone on two
workers over that of one worker, in the same round. `beyond`: the measured time over it, less one. `expert` lies inside `shard` and is measured
with a mixture of {experts} experts. `calls`: collectives that the first worker issues in a step; messages between two workers (of a pipeline and
a ring) are not counted. CPU s: of all workers' processes over the run, setup included, divided by its steps. Median (smallest-largest)."""


def degrees_of(layout: str) -> dict[str, int]:
    """Degrees by axis; expert 2 comes with shard 2."""
    found = {axis: int(size) for axis, size in (word.split() for word in layout.split(" x "))} if layout else {}
    return {"shard": 2, **found} if "expert" in found else found


def workers_of(degrees: dict[str, int]) -> int:
    """Product of all axes but the experts'."""
    found = 1
    for axis, size in degrees.items():
        found *= size if axis != "expert" else 1
    return found


def make_job(layout: str, mixture: bool, arguments: argparse.Namespace) -> tuple[TrainJob, dict[str, Any]]:
    """A training in this layout."""
    degrees = degrees_of(layout)
    workers = workers_of(degrees)
    data = degrees.get("replicate", 1) * degrees.get("shard", 1)
    share = 1 / (degrees.get("tensor", 1) * degrees.get("context", 1))
    per_row = arguments.step_ms / 1e3 / 3 / ROWS / BLOCKS  # a forward pass takes a third of a step
    model = {
        "size": "1m",
        "width": 8,
        "num_blocks": BLOCKS,
        "num_heads": 2,
        "ffn_width": 8,
        "sequence_length": SEQUENCE_LENGTH,
    }
    config = load_config(
        harness.REPOSITORY / "jobs" / "language_model.yaml",
        flags={
            "workload.name": "jobs/benchmarks/sleeping_model.py:SleepingModel",
            "workload.args": {
                **model,
                **({"num_experts": EXPERTS} if mixture else {}),
                "block_s_per_row": per_row * share,
            },
            "batch.global_size": ROWS,
            "batch.micro_size": ROWS // data // MICRO_BATCHES,
            "scale.workers": workers,
            "stop.after": f"{arguments.steps} steps",
            "schedule.warmup": "0 steps",
            "evaluation.every": None,
            "checkpoint.every_minutes": None,
            "checkpoint.save_final": False,
            "tracking.every_steps": 10**6,
            "tracking.system_metrics": False,
            **({f"parallel.{axis}": size for axis, size in degrees.items()} if workers > 1 else {}),
            **({"context.exchange": arguments.exchange} if "context" in degrees else {}),
        },
        environ={},
    )
    workload = SleepingModel(**config.workload.args)
    sources = {"train": as_source(workload.datasets()["train"], split="train")}
    recipe = derive(config, DataSize(sources["train"].num_rows, sources["train"].tokens_per_row))
    splits = {split: Split.of(split, source) for split, source in sources.items()}
    return TrainJob(config, recipe, workload, splits, time.time()), sources


def train(place: RankContext, job: TrainJob, sources: Any) -> dict[str, Any]:
    """One worker's run: seconds of its steps, CPU seconds of all workers, and collectives by name in a late step."""
    torch.set_num_threads(1)
    steps: list[tuple[int, float]] = []

    def take(record: Any) -> None:
        if isinstance(record, StepRecord):
            steps.append((time.time_ns(), record.step_time_s))

    started = time.process_time()
    loop.run(job, place, sources=sources, emit=take)
    cpu_s = torch.tensor([time.process_time() - started], dtype=torch.float64)
    entries = flight_recorder.entries_without_lines() or []
    calls = [e for e in entries if steps and steps[-3][0] <= int(e["time_created_ns"]) < steps[-2][0]]
    if place.world_size > 1:
        dist.all_reduce(cpu_s)
    names = Counter(e["profiling_name"].removeprefix("gloo:") for e in calls)
    return {"steps": [s for _, s in steps], "cpu_s": cpu_s.item() / len(steps or [0]), "calls": dict(names)}


def measure(processes: Any, side: str, arguments: argparse.Namespace) -> harness.Measurement:
    """Step time of one run. side: a layout, in front of it `mixture ` for a model with experts."""
    layout, mixture = side.removeprefix("mixture ").removeprefix("one"), side.startswith("mixture ")
    job, sources = make_job(layout, mixture, arguments)
    found = processes.run(job.world_size, train, job, sources, workload=None)
    steps = found["steps"][arguments.warmup_steps :]
    return {
        "step_ms": 1e3 * statistics.median(steps),
        "cpu_s": found["cpu_s"],
        "calls": found["calls"],
        "load": os.getloadavg()[0],
    }


def alone(side: str) -> list[str]:
    """Sides of its axes alone."""
    prefix = "mixture " if side.startswith("mixture ") else ""
    return [prefix + word for word in side.removeprefix(prefix).split(" x ")] if " x " in side else []


def ring(place: RankContext, side: str, rows: int, sleep_s: float) -> dict[str, float]:
    """Forward and backward pass of attention in a ring whose blocks also sleep, seconds; in turn: every transfer is waited for at once."""
    torch.set_num_threads(1)
    query = torch.randn(rows, 8, 512, 64, requires_grad=True)
    attend, attend_backward, pass_on = (
        ring_attention._attend,
        ring_attention._attend_backward,
        ring_attention._Neighbours.pass_on,
    )

    def slept(function: Any) -> Any:
        def run(*given: Any) -> Any:
            found = function(*given)
            time.sleep(sleep_s)
            return found

        return run

    def in_turn(self: Any, tensor: torch.Tensor, tag: int = 0) -> Any:
        arriving, works = pass_on(self, tensor, tag)
        self.wait(works)
        return arriving, []

    ring_attention._attend, ring_attention._attend_backward = slept(attend), slept(attend_backward)
    if side == RING[1]:
        ring_attention._Neighbours.pass_on = in_turn
    try:
        times = []
        for _ in range(6):
            dist.barrier()
            started = time.perf_counter()
            found = ring_attention.ring_attention(
                query, query, query, dist.group.WORLD, lambda send, payload: send(), is_causal=True, scale=None
            )
            found.sum().backward()
            times.append(time.perf_counter() - started)
    finally:
        ring_attention._attend, ring_attention._attend_backward = attend, attend_backward
        ring_attention._Neighbours.pass_on = pass_on
    return {"step_ms": 1e3 * statistics.median(times[1:]), "sleep_ms": 1e3 * 2 * place.world_size * sleep_s}


def main() -> None:
    """Measure, compare, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", default=[*PAIRS, *TRIPLES, *(f"mixture {one}" for one in WITH_EXPERTS)])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each layout")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup-steps", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=8000.0, help="sleep of one worker's step")
    parser.add_argument("--exchange", choices=["heads", "ring"], default="ring")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--results", type=Path, default=harness.RESULTS)
    arguments = parser.parse_args()
    conditions = harness.conditions(["torch"])
    axes = dict.fromkeys(axis for side in arguments.layouts for axis in alone(side))
    ones = dict.fromkeys("mixture one" if side.startswith("mixture ") else "one" for side in arguments.layouts)
    sides = [*ones, *axes, *arguments.layouts]
    most = max(workers_of(degrees_of(side.removeprefix("mixture ").removeprefix("one"))) for side in sides)
    measurements: list[harness.Measurement] = []
    rings: list[harness.Measurement] = []
    with gloo_processes(most, UserCode(None, {}, None, None), timeout_s=600) as processes:
        for number, side in harness.interleaved(sides, repeats=arguments.repeats, seed=arguments.seed):
            measurements.append({"side": side, "round": number, **measure(processes, side, arguments)})
            harness.log(f"round {number + 1}, {side}: {measurements[-1]['step_ms']:.0f} ms")
        for number, side in harness.interleaved(RING, repeats=arguments.repeats, seed=arguments.seed):
            found = processes.run(min(4, most), ring, side, 4, 0.02, workload=None)
            rings.append({"side": side, "round": number, **found})
    rules = RULES.format(
        blocks=BLOCKS, rows=ROWS, length=SEQUENCE_LENGTH, micro_batches=MICRO_BATCHES, experts=EXPERTS, step_ms=arguments.step_ms,
        steps=arguments.steps, warmup=arguments.warmup_steps, repeats=arguments.repeats, seed=arguments.seed,
    )  # fmt: skip
    text = f"{rules}\n\n{_table(measurements, sides)}\n\n{_ring_table(rings)}"
    record = {
        "conditions": conditions,
        "arguments": harness.arguments_of(arguments),
        "measurements": measurements,
        "rings": rings,
    }
    harness.write_report(
        "layouts_speed", title="What layouts cost beyond their axes", text=text, record=record, folder=arguments.results
    )


def _table(measurements: list[harness.Measurement], sides: list[str]) -> str:
    rounds: dict[int, dict[str, float]] = {}
    for one in measurements:
        rounds.setdefault(one["round"], {})[one["side"]] = one["step_ms"]
    rows = []
    for side in sides:
        mine = [m for m in measurements if m["side"] == side]
        predicted = []
        for found in rounds.values():
            whole = found["mixture one" if side.startswith("mixture ") else "one"]
            product = whole
            for axis in alone(side):
                product *= found[axis] / whole
            predicted.append(product)
        beyond = [100 * (m["step_ms"] / p - 1) for m, p in zip(mine, predicted, strict=True)]
        rows.append(
            [
                str(workers_of(degrees_of(side.removeprefix("mixture ").removeprefix("one")))),
                side,
                harness.show([m["step_ms"] for m in mine]),
                harness.show(predicted) if alone(side) else "",
                harness.show(beyond, "{:+.1f}") if alone(side) else "",
                str(sum(mine[-1]["calls"].values())),
                harness.show([m["cpu_s"] for m in mine], "{:.2f}"),
                harness.show([m["load"] for m in mine], "{:.1f}"),
            ]
        )
    header = ["workers", "layout", "step ms", "alone ms", "beyond %", "calls", "CPU s", "load"]
    return harness.table(header, rows)


def _ring_table(rings: list[harness.Measurement]) -> str:
    rows = [
        [side, harness.show([m["step_ms"] for m in rings if m["side"] == side]), f"{rings[0]['sleep_ms']:.0f}"]
        for side in RING
    ]
    note = "Attention in a ring of four workers, forward and backward, whose blocks also sleep; `in turn` waits for each transfer before it computes.\n\n"
    return note + harness.table(["transfers", "ms", "of which sleep, ms"], rows)


if __name__ == "__main__":
    main()
