"""How well the planner predicts this machine: a ladder of emulated accelerators, from its points at 1 and 2 workers.

Layers are timed sleeps with real parameters; DDP, gradients and gloo's collectives are real. The point at 1 worker tells the planner what a
layer computes, the one at 2 what the machine's memory carries; 4, 8 and 16 are predicted and measured. Wants a quiet machine with two cores
or more: collectives of all workers share them.

    python jobs/benchmarks/planner_ladder.py --workers 1,2,4,8,16 --repeats 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scaleray.config.hardware.catalogue import CATALOGUE
from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.emulation import EmulatedLayer, Timing
from scaleray.launch.workers.gloo import UserCode, gloo_processes
from scaleray.planner.answers.calibration import calibrate, calibrate_link
from scaleray.planner.cost.layout import Layout
from scaleray.planner.cost.step_time import step_time
from scaleray.planner.models.block_counts import of_size
from scaleray.training.setup.rank_context import RankContext

WIDTH = 64


def ladder(place: RankContext, settings: dict[str, Any]) -> dict[str, float]:
    """Median time of a step of `layers` sleeping layers under DDP."""
    torch.set_num_threads(1)
    timing = Timing(forward_s=settings["forward_s"])
    layers = [
        EmulatedLayer(WIDTH, timing, num_parameters=settings["parameters"], index=i) for i in range(settings["layers"])
    ]
    model: nn.Module = nn.Sequential(*layers)
    if place.world_size > 1:
        model = DistributedDataParallel(model, bucket_cap_mb=settings["bucket_mib"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    times = []
    for _ in range(settings["steps"]):
        started = time.perf_counter()
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    return {"step_s": statistics.median(times[2:])}


def predictions(measured: dict[int, float], settings: dict[str, Any]) -> dict[int, float]:
    """Step times of every size from those of 1 and 2 workers."""
    most = max(measured)
    gpu = CATALOGUE.find_gpu("cpu")
    cluster = Cluster(gpu=gpu, gpus_per_node=most, num_nodes=1, link=CATALOGUE.find_link(gpu.link), network=None)
    # the sleeps have no jitter, so that workers are as even as those of a language model
    size = settings["parameters"] * settings["layers"]
    model = replace(of_size("sleeping layers", size, num_layers=settings["layers"]), kind="transformer")
    layout = Layout(precision="fp32", is_mixed=False, gradient_bytes=4, optimizer_bytes=0)
    compute = calibrate(model, layout, replace(cluster, gpus_per_node=1), measured[1])
    pair = replace(cluster, gpus_per_node=2)
    link = calibrate_link(model, replace(layout, data=2), pair, measured[2], measured=compute)
    return {
        workers: step_time(
            model, replace(layout, data=workers), replace(cluster, gpus_per_node=workers, link=link), measured=compute
        ).total_s
        for workers in measured
    }


def main() -> None:
    """Measure the ladder in turns, predict it, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,2,4,8,16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--forward-s", type=float, default=0.01)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--parameters", type=int, default=2**18, help="of one layer")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    sizes = [int(word) for word in given.workers.split(",")]
    settings = {
        "forward_s": given.forward_s,
        "layers": given.layers,
        "parameters": given.parameters,
        "steps": given.steps,
        "bucket_mib": 4.0,
    }
    turns: dict[int, list[float]] = {size: [] for size in sizes}
    with gloo_processes(max(sizes), UserCode(None, {}, None, None), timeout_s=600) as processes:
        for turn, side in harness.interleaved([str(size) for size in sizes], repeats=given.repeats, seed=0):
            figures = processes.run(int(side), ladder, settings, workload=None)
            turns[int(side)].append(figures["step_s"])
            harness.log(f"turn {turn}, {side} workers: {1e3 * figures['step_s']:.1f} ms")
    measured = {size: statistics.median(values) for size, values in turns.items()}
    predicted = predictions(measured, settings)
    rows = [
        [
            str(size),
            f"{1e3 * measured[size]:.1f} ({1e3 * min(turns[size]):.1f}-{1e3 * max(turns[size]):.1f})",
            f"{1e3 * predicted[size]:.1f}",
            f"{100 * (predicted[size] / measured[size] - 1):+.1f}",
            f"{100 * (measured[1] / measured[size] - 1):+.1f}",
        ]
        for size in sizes
    ]
    text = harness.table(
        ["workers", "measured step, ms", "predicted, ms", "error, %", "constant throughput, error %"], rows
    )
    record = {"settings": settings, "turns": turns, "predicted": predicted, "conditions": harness.conditions(["torch"])}
    print(text)
    print(
        harness.write_report(
            "planner_ladder",
            title="Emulated accelerators, predicted from 1 and 2 workers",
            text=text,
            record=record,
            folder=given.output,
        )
    )


if __name__ == "__main__":
    main()
