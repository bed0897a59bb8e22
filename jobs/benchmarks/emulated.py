"""What overlap, pipelines and uneven shares gain, on emulated accelerators: compute is a timed sleep, the rest is real.

Each claim is measured beside its alternative, in random order in each round, in plain gloo processes on this machine:

- overlap: DDP whose gradients go in small buckets while layers still compute, against one bucket after the last of
  them, over a link of a given bandwidth. Ideal: the time of the longer of both, against their sum.
- bubble: share of idle time of torch's GPipe and 1F1B on 4 stages, against (p - 1) / (m + p - 1).
- shares: scaleray's own loop with shares by speed against equal ones, one worker slowed by a factor of 2, and with
  jitter alone, where there is nothing to gain. Ideal: sum of speeds over (workers x slowest speed).
- straggler: what one worker, slowed, costs all others in equal shares: idle time of the fast ones.

    python jobs/benchmarks/emulated.py --repeats 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from scaleray.config import load_config
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.values import DataSize
from scaleray.data import TRAIN, Split, as_source
from scaleray.emulation import BACKWARD, FORWARD, REDUCE, EmulatedLayer, EmulatedLink, Timeline, Timing, busy_s
from scaleray.launch.workers.gloo import GlooProcesses, UserCode, gloo_processes
from scaleray.records.run_record import EventRecord, StepRecord
from scaleray.training import loop
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext

WIDTH = 16
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
Figures = dict[str, float]


# overlap


def overlap(place: RankContext, settings: dict[str, Any]) -> Figures:
    """Median time of a step under DDP, from 0.1 s of layers and nearly as much of transfers."""
    timeline, num_layers = Timeline(), 8
    timing = Timing(forward_s=0.004, jitter=0.1)  # 8 x (4 + 8) ms
    layers = [EmulatedLayer(WIDTH, timing, num_parameters=2**14, index=i, timeline=timeline) for i in range(num_layers)]
    layer_bytes = 4 * 2**14
    bucket_mib = layer_bytes / 2**20 if settings["is_on"] else 100.0
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=bucket_mib)
    link = EmulatedLink(bytes_per_s=layer_bytes / 0.007, timeline=timeline)  # a layer in 7 ms
    model.register_comm_hook(None, link.reduce)
    times, hidden = [], []
    for _ in range(settings["steps"]):
        timeline.clear()
        started = time.perf_counter()
        model(torch.ones(2, WIDTH)).sum().backward()
        times.append(time.perf_counter() - started)
        computing, reducing = timeline.intervals(FORWARD, BACKWARD), timeline.intervals(REDUCE)
        both = busy_s([*computing, *reducing])
        hidden.append((busy_s(computing) + busy_s(reducing) - both) / busy_s(reducing))
    link.close()
    # the first step's buckets are not yet laid out as asked for
    return {"step_s": statistics.median(times[2:]), "hidden_share": statistics.median(hidden[2:])}


# pipelines


def bubble(place: RankContext, settings: dict[str, Any]) -> Figures:
    """Share of the stages' time that is idle, from the first pass of any to the last; median of steps."""
    num_micro = settings["num_micro"]
    timeline = Timeline()
    layer = EmulatedLayer(WIDTH, Timing(forward_s=0.04), index=place.rank, timeline=timeline)
    stage = PipelineStage(layer, place.rank, place.world_size, torch.device("cpu"))
    schedule = SCHEDULES[settings["schedule"]](stage, n_microbatches=num_micro, loss_fn=F.mse_loss)
    x, idle = torch.ones(num_micro, WIDTH), []
    for _ in range(settings["steps"]):
        timeline.clear()
        torch.distributed.barrier()
        if place.rank == 0:
            schedule.step(x)
        elif place.rank == place.world_size - 1:
            schedule.step(target=x, losses=[])
        else:
            schedule.step()
        passes = timeline.intervals(FORWARD, BACKWARD)
        mine = (passes[0].start_s, max(p.end_s for p in passes), busy_s(passes))
        everyone: list[Any] = [None] * place.world_size
        torch.distributed.all_gather_object(everyone, mine)  # on one machine all clocks are the same
        span_s = max(end for _, end, _ in everyone) - min(start for start, _, _ in everyone)
        idle.append(1 - sum(busy for _, _, busy in everyone) / (place.world_size * span_s))
    return {"idle_share": statistics.median(idle[1:])}


# shares and stragglers, through scaleray's own loop


class Emulated:
    """A network whose time is that of one sleeping layer, on made-up rows."""

    def __init__(self, slowdown: dict[int, float], timelines: list[Timeline]) -> None:
        self.slowdown, self.timelines = slowdown, timelines

    def build_model(self) -> nn.Module:
        timing = Timing(forward_s_per_sample=0.001, jitter=0.1, slowdown=self.slowdown)
        self.timelines.append(Timeline())
        layer = EmulatedLayer(WIDTH, timing, num_parameters=2**14, timeline=self.timelines[-1])
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, 2))

    def datasets(self) -> dict[str, Any]:
        draw = np.random.default_rng(0)
        return {TRAIN: {"x": draw.normal(size=(4096, WIDTH)).astype(np.float32), "y": draw.integers(0, 2, 4096)}}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


def training(place: RankContext, settings: dict[str, Any]) -> Figures:
    """Median time of the steps after the last change of shares, and how long the fastest worker idled in them."""
    flags = {
        "workload.name": "emulated:Emulated",
        "batch.global_size": settings["batch"],
        "optimizer.learning_rate": 0.01,
        "stop.after": f"{settings['steps']} steps",
        "scale.workers": place.world_size,
        "tracking.system_metrics": False,
        "shares.by": settings["by"],
        "shares.measure_every": settings["steps"] // 4,
    }
    config, timelines = load_config(flags=flags, environ={}), []
    workload = Emulated({0: settings["slowdown"]} if settings["slowdown"] != 1 else {}, timelines)
    sources = {name: as_source(value, split=name) for name, value in workload.datasets().items()}
    recipe = derive(config, DataSize(sources[TRAIN].num_rows))
    splits = {name: Split.of(name, source) for name, source in sources.items()}
    job = TrainJob(config, recipe, workload, splits, time.time())
    messages: list[Any] = []
    loop.run(job, place, sources=sources, emit=messages.append)
    times = [m.step_time_s for m in messages if isinstance(m, StepRecord)]
    steady = settings["steps"] // 2  # two measurements are behind it
    passes = timelines[-1].intervals(FORWARD, BACKWARD)
    late = passes[len(passes) // 2 :]
    idle = 1 - busy_s(late) / (late[-1].end_s - late[0].start_s)
    everyone: list[Any] = [None] * place.world_size
    torch.distributed.all_gather_object(everyone, idle)
    changes = [m.text for m in messages if isinstance(m, EventRecord) and m.text.startswith("shares of")]
    return {
        "step_s": statistics.median(times[steady:]) if times else 0.0,
        "samples_per_s": settings["batch"] / statistics.median(times[steady:]) if times else 0.0,
        "idle_share_of_the_fastest": max(everyone),
        "shares": changes[-1] if changes else "equal",
    }


# what is measured, and how it is told


def sides(arguments: argparse.Namespace) -> dict[str, tuple[int, Callable[..., Figures], dict[str, Any]]]:
    """(workers, function, settings) by name."""
    found: dict[str, tuple[int, Callable[..., Figures], dict[str, Any]]] = {}
    for name, is_on in (("overlap on", True), ("overlap off", False)):
        found[name] = (2, overlap, {"is_on": is_on, "steps": 8})
    for schedule in SCHEDULES:
        for num_micro in (4, 8, 16):
            found[f"{schedule}, {num_micro} micro-batches"] = (
                4,
                bubble,
                {"schedule": schedule, "num_micro": num_micro, "steps": 4},
            )
    for workers in (2, 4):
        for by in ("equal", "speed"):
            settings = {"batch": 24 * workers, "by": by, "steps": arguments.steps, "slowdown": 2.0}
            found[f"{workers} workers, one slowed, shares {by}"] = (workers, training, settings)
    for by in ("equal", "speed"):
        settings = {"batch": 48, "by": by, "steps": arguments.steps, "slowdown": 1.0}
        found[f"2 workers, none slowed, shares {by}"] = (2, training, settings)
    return found


def describe(found: list[harness.Measurement]) -> str:
    """The tables of all claims."""

    def values(side: str, key: str) -> list[float]:
        return [m[key] for m in found if m["side"] == side and key in m]

    def gains(side: str, baseline: str) -> list[float]:
        return [1 / ratio for ratio in harness.ratios(found, "step_s", side=side, baselines=[baseline])]

    texts = []
    if values("overlap on", "step_s") and values("overlap off", "step_s"):
        # compute 8 x 12 ms and transfers 8 x 7 ms; overlapped, the transfer of the first layer is left over
        ideal = (96 + 56) / (96 + 7)
        rows = [
            [
                side,
                harness.show([1000 * v for v in values(side, "step_s")]),
                harness.show([100 * v for v in values(side, "hidden_share")]),
            ]
            for side in ("overlap on", "overlap off")
        ]
        gain = harness.show(gains("overlap on", "overlap off"), "{:.2f}")
        texts.append(
            f"## Overlap\n\n{harness.table(['DDP', 'step, ms', 'transfers hidden, %'], rows)}\n\nGain {gain}, ideal {ideal:.2f}."
        )
    rows = []
    for side in dict.fromkeys(m["side"] for m in found if "idle_share" in m):
        micro = int(side.split(", ")[1].split()[0])
        formula, measured = 3 / (micro + 3), values(side, "idle_share")
        rows.append(
            [
                side,
                f"{100 * formula:.1f}",
                harness.show([100 * v for v in measured], "{:.1f}"),
                harness.show([v / formula for v in measured], "{:.2f}"),
            ]
        )
    if rows:
        texts.append(
            "## Pipeline bubble, 4 stages\n\n" + harness.table(["schedule", "formula, %", "idle, %", "ratio"], rows)
        )
    rows = []
    for side in dict.fromkeys(m["side"] for m in found if "shares" in m):
        workers, slowdown = int(side.split()[0]), 2.0 if ", one slowed" in side else 1.0
        speeds = [1 / slowdown, *[1.0] * (workers - 1)]
        ideal = sum(speeds) / (workers * min(speeds)) if side.endswith("speed") else 1.0
        gain = gains(side, side.replace("shares speed", "shares equal")) if side.endswith("speed") else []
        rows.append(
            [
                side,
                harness.show([1000 * v for v in values(side, "step_s")]),
                harness.show(gain, "{:.2f}"),
                f"{ideal:.2f}",
                harness.show([100 * v for v in values(side, "idle_share_of_the_fastest")]),
                [m["shares"] for m in found if m["side"] == side][-1],
            ]
        )
    if rows:
        header = ["training", "step, ms", "gain", "ideal", "idle of the fastest, %", "last shares"]
        texts.append("## Shares and stragglers\n\n" + harness.table(header, rows))
    return "\n\n".join(texts)


def measure(
    processes: GlooProcesses, workers: int, function: Callable[..., Figures], settings: dict[str, Any]
) -> Figures:
    """One measurement by a fresh group of the processes."""
    figures: Figures = processes.run(workers, function, settings, workload=None)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of each training")
    parser.add_argument("--only", default="", help="measure sides whose name contains this")
    parser.add_argument("--seed", type=int, default=0, help="of the order of sides")
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the report")
    arguments = parser.parse_args()
    if arguments.steps < 8:
        parser.error("--steps must be at least 8: shares are measured every quarter of them")
    todo = {name: side for name, side in sides(arguments).items() if arguments.only in name}
    if not todo:
        parser.error(f"--only {arguments.only}: there are {', '.join(sides(arguments))}")
    conditions = harness.conditions(["torch", "numpy"])
    found: list[harness.Measurement] = []
    with gloo_processes(4, UserCode(None, {}, None, None), timeout_s=120) as processes:
        for number, name in harness.interleaved(list(todo), repeats=arguments.repeats, seed=arguments.seed):
            found.append({"side": name, "round": number, **measure(processes, *todo[name])})
            harness.log(f"round {number + 1}: {json.dumps(found[-1])}")
    record = {"conditions": conditions, "measurements": found}
    harness.write_report(
        "emulated",
        title="Emulated accelerators: overlap, bubbles, uneven shares",
        text=describe(found),
        record=record,
        folder=arguments.results,
    )


if __name__ == "__main__":
    main()
