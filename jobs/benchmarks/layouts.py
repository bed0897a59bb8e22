"""What pairs and triples of axes cost beyond their axes alone, and whether a ring of contexts hides its transfers.

Workers are gloo processes on this machine. A block of the model sleeps for as long as its rows and its share of each row would take on an
accelerator (`scaleray.emulation`); loop, collectives, gradients and optimizer are real.

    python jobs/benchmarks/layouts.py --repeats 5
    python jobs/benchmarks/layouts.py --layouts "replicate 2 x tensor 2" "shard 2 x context 2"
"""

from __future__ import annotations

import argparse
import math
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
worker its share of every row. {steps} steps a run, the first {warmup} do not sleep and are left out; {repeats} runs of each layout in random
order (seed {seed}), gloo workers of one thread. `times`: what the axes alone predict if their costs shrink like the compute, the time of one
worker times, for each axis, the time with that axis alone on two workers over that of one worker, in the same round. `plus`: what they predict
if their costs do not shrink, as those of Python and of latency: the sleep of this layout plus each axis' time beyond its own sleep. `over`: the
measured time over these, less one. `expert` lies inside `shard` and is measured with a mixture of {experts} experts. `calls`: collectives that
the first worker issues in a step, and their number if the axes' calls are added; messages between two workers (of a pipeline and a ring) are
not counted. CPU ms: of the first worker's process in a step, without the warm-up. Median (smallest-largest)."""


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
                "free_passes": arguments.warmup_steps * MICRO_BATCHES,
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
    """The first worker's run: seconds of its steps, its CPU seconds at their ends, and collectives by name in a late step."""
    torch.set_num_threads(1)
    steps: list[tuple[int, float, float]] = []

    def take(record: Any) -> None:
        if isinstance(record, StepRecord):
            steps.append((time.time_ns(), time.process_time(), record.step_time_s))

    loop.run(job, place, sources=sources, emit=take)
    entries = flight_recorder.entries_without_lines() or []
    calls = [e for e in entries if steps and steps[-3][0] <= int(e["time_created_ns"]) < steps[-2][0]]
    names = Counter(e["profiling_name"].removeprefix("gloo:") for e in calls)
    return {"steps": [s for _, _, s in steps], "cpu_s": [cpu_s for _, cpu_s, _ in steps], "calls": dict(names)}


def measure(processes: Any, side: str, arguments: argparse.Namespace) -> harness.Measurement:
    """Step time of one run. side: a layout, in front of it `mixture ` for a model with experts."""
    layout, mixture = side.removeprefix("mixture ").removeprefix("one"), side.startswith("mixture ")
    job, sources = make_job(layout, mixture, arguments)
    found = processes.run(job.world_size, train, job, sources, workload=None)
    steps, cpu_s = found["steps"][arguments.warmup_steps :], found["cpu_s"][arguments.warmup_steps - 1 :]
    return {
        "step_ms": 1e3 * statistics.median(steps),
        "cpu_ms": 1e3 * (cpu_s[-1] - cpu_s[0]) / len(steps),
        "calls": found["calls"],
        "load": os.getloadavg()[0],
    }


def alone(side: str) -> list[str]:
    """Sides of its axes alone."""
    prefix = "mixture " if side.startswith("mixture ") else ""
    return [prefix + word for word in side.removeprefix(prefix).split(" x ")] if " x " in side else []


class _Arrival:
    """A transfer that also takes the time of a slow link."""

    def __init__(self, work: Any, link_s: float) -> None:
        self._work, self._at = work, time.perf_counter() + link_s

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._at - time.perf_counter()))


def ring(place: RankContext, side: str, sleep_s: float, link_s: float) -> dict[str, float]:
    """Forward and backward pass of attention in a ring whose blocks and transfers also sleep, seconds; in turn: every transfer is
    waited for at once."""
    torch.set_num_threads(1)
    query = torch.randn(1, 2, 64, 16, requires_grad=True)
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

    def slowly(self: Any, tensor: torch.Tensor, tag: int = 0) -> Any:
        arriving, works = pass_on(self, tensor, tag)
        works = [_Arrival(work, link_s) for work in works]
        if side == "in turn":
            self.wait(works)
            return arriving, []
        return arriving, works

    ring_attention._attend, ring_attention._attend_backward = slept(attend), slept(attend_backward)
    ring_attention._Neighbours.pass_on = slowly
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
    transfers = 3 * place.world_size - 2  # keys and values go around without a last step twice, their gradients once
    return {
        "step_ms": 1e3 * statistics.median(times[1:]),
        "sleep_ms": 1e3 * 2 * place.world_size * sleep_s,
        "link_ms": 1e3 * transfers * link_s,
    }


def main() -> None:
    """Measure, compare, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", default=[*PAIRS, *TRIPLES, *(f"mixture {one}" for one in WITH_EXPERTS)])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each layout")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup-steps", type=int, default=3, help="steps that do not sleep and are left out")
    parser.add_argument("--step-ms", type=float, default=12_000.0, help="sleep of one worker's step")
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
            found = processes.run(min(4, most), ring, side, 0.04, 0.03, workload=None)
            rings.append({"side": side, "round": number, **found})
    rules = RULES.format(
        blocks=BLOCKS, rows=ROWS, length=SEQUENCE_LENGTH, micro_batches=MICRO_BATCHES, experts=EXPERTS, step_ms=arguments.step_ms,
        steps=arguments.steps, warmup=arguments.warmup_steps, repeats=arguments.repeats, seed=arguments.seed,
    )  # fmt: skip
    text = f"{rules}\n\n{_table(measurements, sides, arguments)}\n\n{_ring_table(rings)}"
    record = {
        "conditions": conditions,
        "arguments": harness.arguments_of(arguments),
        "measurements": measurements,
        "rings": rings,
    }
    harness.write_report(
        "layouts_speed", title="What layouts cost beyond their axes", text=text, record=record, folder=arguments.results
    )


def asleep_ms(side: str, arguments: argparse.Namespace) -> float:
    """Time of a step's sleep in a layout, with the idle time of a pipeline of two stages."""
    degrees = degrees_of(side.removeprefix("mixture ").removeprefix("one"))
    idle = 1 + 1 / MICRO_BATCHES if "pipeline" in degrees else 1
    return arguments.step_ms / workers_of(degrees) * idle


def _table(measurements: list[harness.Measurement], sides: list[str], arguments: argparse.Namespace) -> str:
    rounds: dict[int, dict[str, harness.Measurement]] = {}
    for one in measurements:
        rounds.setdefault(one["round"], {})[one["side"]] = one
    rows = []
    for side in sides:
        mine = [found[side] for found in rounds.values()]
        cells = [str(workers_of(degrees_of(side.removeprefix("mixture ").removeprefix("one")))), side]
        cells += [f"{asleep_ms(side, arguments):.0f}", harness.show([m["step_ms"] for m in mine])]
        cells += _predicted(side, list(rounds.values()), arguments) if alone(side) else [""] * 4
        calls = [sum(rounds[0][one]["calls"].values()) for one in (side, *alone(side))]
        cells += [f"{calls[0]} / {sum(calls[1:])}" if alone(side) else str(calls[0])]
        cells += [harness.show([m["cpu_ms"] for m in mine]), harness.show([m["load"] for m in mine], "{:.1f}")]
        rows.append(cells)
    header = ["workers", "layout", "sleep", "step ms", "times", "over %", "plus", "over %", "calls", "CPU ms", "load"]
    return harness.table(header, rows)


def _predicted(side: str, rounds: list[dict[str, harness.Measurement]], arguments: argparse.Namespace) -> list[str]:
    """Cells of both predictions from the axes alone, each with the measured time over it."""
    base = "mixture one" if side.startswith("mixture ") else "one"
    times, plus = [], []
    for found in rounds:
        whole = found[base]["step_ms"]
        costs = [found[axis]["step_ms"] - asleep_ms(axis, arguments) for axis in alone(side)]
        own = whole - asleep_ms(base, arguments)
        times.append(whole * math.prod(found[axis]["step_ms"] / whole for axis in alone(side)))
        plus.append(asleep_ms(side, arguments) + own + sum(cost - own for cost in costs))
    cells = []
    for predicted in (times, plus):
        over = [100 * (found[side]["step_ms"] / p - 1) for found, p in zip(rounds, predicted, strict=True)]
        cells += [harness.show(predicted), harness.show(over, "{:+.1f}")]
    return cells


def _ring_table(rings: list[harness.Measurement]) -> str:
    sleep, link = (f"{rings[0][name]:.0f}" for name in ("sleep_ms", "link_ms"))
    rows = [[side, harness.show([m["step_ms"] for m in rings if m["side"] == side]), sleep, link] for side in RING]
    note = (
        "Attention in a ring of four workers, forward and backward, whose blocks sleep 40 ms and whose transfers take 30 ms; `in turn` waits for\n"
        "each transfer before it computes.\n\n"
    )
    return note + harness.table(["transfers", "ms", "blocks alone, ms", "transfers alone, ms"], rows)


if __name__ == "__main__":
    main()
