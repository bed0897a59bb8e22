"""What measuring the gradient noise scale costs a training, way by way, and whether the ways agree.

Every fourth step is measured; beside it, in the same run, lie two that are not. The cost of a measured step is its median
time beyond theirs, and the difference between the two plain ones says what such a difference means on this machine.

    python jobs/benchmarks/noise_scale.py --repeats 5
    python jobs/benchmarks/noise_scale.py --models digits --repeats 3
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from typing import Any

import harness
import torch

sys.path.insert(0, str(harness.REPOSITORY))
from pathlib import Path

from scaleray.config import load_config
from scaleray.config.batch_noise_scale import NoiseScaleSettings
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.values import DataSize
from scaleray.data import Split, as_source
from scaleray.launch.workers.gloo import UserCode, gloo_processes
from scaleray.records.run_record import StepRecord, WorkerSummary
from scaleray.training import loop
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext
from scaleray.workload import load_workload

EVERY = 4
MODELS = {"digits": ("jobs/digits.yaml", 240, {}), "language_model": ("jobs/language_model.yaml", 60, {})}
"""Config, steps, and flags of each."""
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {}),
    "ddp, preconditioned": (2, {"noise_scale.preconditioned": True}),
    "fsdp": (2, {"strategy.name": "fsdp"}),
    "first micro-batch of 4": (1, {"micro": 4}),
    "consecutive steps": (1, {}),
}
"""Workers and flags of each way; `micro` is the number of micro-batches."""
RULES = """\
gloo workers of one thread each. Every {every}th step is measured, the two after it are plain (a third one keeps its gradient
for `consecutive steps`, which counts as cost). {repeats} runs of each way in random order (seed {seed}); the first quarter of a run
is left out. Cost: median time of measured steps beyond that of plain steps, over the median plain step; `at rest` is the same
difference between the plain steps one and two after a measured one, which is what nothing costs here. With
`noise_scale.every_steps: {default}`, the default, a training pays the cost divided by {default}. Median (smallest-largest) of runs."""


def make_job(model: str, way: str, steps: int | None) -> tuple[TrainJob, dict[str, Any]]:
    """A training of the model's own recipe, measured in this way."""
    path, usual, more = MODELS[model]
    workers, flags = WAYS[way]
    flags = {**more, **flags}
    base = load_config(harness.REPOSITORY / path, flags={}, environ={})
    if micro := flags.pop("micro", None):
        flags["batch.micro_size"] = base.batch.global_size // micro
    config = load_config(
        harness.REPOSITORY / path,
        flags={
            "scale.workers": workers,
            "stop.after": f"{steps or usual} steps",
            "schedule.warmup": "0 steps",
            "evaluation.every": None,
            "checkpoint.every_minutes": None,
            "checkpoint.save_final": False,
            "tracking.every_steps": 10**6,
            "tracking.system_metrics": False,
            "noise_scale.measure": True,
            "noise_scale.every_steps": EVERY,
            **flags,
        },
        environ={},
    )
    workload = load_workload(config.workload.name, config.workload.args, base_dir=harness.REPOSITORY)
    sources = {"train": as_source(workload.datasets()["train"], split="train")}
    recipe = derive(config, DataSize(sources["train"].num_rows, sources["train"].tokens_per_row))
    splits = {split: Split.of(split, source) for split, source in sources.items()}
    return TrainJob(config, recipe, workload, splits, time.time()), sources


def train(place: RankContext, job: TrainJob, sources: Any) -> list[Any]:
    """One worker's run; its steps and summary."""
    torch.set_num_threads(1)
    records: list[Any] = []
    loop.run(job, place, sources=sources, emit=records.append)
    return [r for r in records if isinstance(r, (StepRecord, WorkerSummary))]


def measure(model: str, way: str, steps: int | None) -> harness.Measurement:
    """Cost and noise scale of one run."""
    job, sources = make_job(model, way, steps)
    name = job.config.workload
    workers, code = job.world_size, UserCode(name.name, name.args, harness.REPOSITORY)
    with gloo_processes(workers, code, timeout_s=600) as processes:
        records = processes.run(workers, train, job, sources, workload=job.workload)
    times = {r.step: r.step_time_s for r in records if isinstance(r, StepRecord)}
    summary = next(r for r in records if isinstance(r, WorkerSummary))
    counted = [step for step in times if step > len(times) // 4]
    by_place = [statistics.median(times[s] for s in counted if s % EVERY == place) for place in range(EVERY)]
    plain = statistics.median(times[s] for s in counted if s % EVERY in (1, 2))
    extra = by_place[0] - plain
    if summary.noise["is_biased"]:
        extra += by_place[EVERY - 1] - plain
    noise = {key: value for key, value in summary.noise.items() if key != "curve"}
    return {
        "plain_step_s": plain,
        "cost_share": extra / plain,
        "at_rest_share": abs(by_place[1] - by_place[2]) / plain,
        "noise": noise,
    }


def main() -> None:
    """Measure, compare, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each way")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--steps", type=int, default=None, help="of a run; by default enough for the model")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--results", type=Path, default=harness.RESULTS)
    arguments = parser.parse_args()
    conditions = harness.conditions(["torch"])
    measurements: list[harness.Measurement] = []
    for model in arguments.models:
        for number, way in harness.interleaved(arguments.ways, repeats=arguments.repeats, seed=arguments.seed):
            print(f"{model}, {way}, run {number + 1} ...", flush=True)
            found = measure(model, way, arguments.steps)
            measurements.append({"side": way, "model": model, "round": number, **found})
    default = NoiseScaleSettings().every_steps
    rules = RULES.format(every=EVERY, repeats=arguments.repeats, seed=arguments.seed, default=default)
    text = f"{rules}\n\n{_table(measurements, arguments, default)}"
    record = {"conditions": conditions, "seed": arguments.seed, "measurements": measurements}
    harness.write_report(
        "noise_scale", title="What measuring gradient noise costs", text=text, record=record, folder=arguments.results
    )


def _table(measurements: list[harness.Measurement], arguments: argparse.Namespace, default: int) -> str:
    rows = []
    for model in arguments.models:
        for way in arguments.ways:
            mine = [m for m in measurements if (m["model"], m["side"]) == (model, way)]
            cost = [100 * m["cost_share"] for m in mine]
            last = mine[-1]["noise"]
            rows.append(
                [
                    model,
                    way,
                    harness.show([1000 * m["plain_step_s"] for m in mine], "{:.2f}"),
                    harness.show(cost, "{:.1f}"),
                    harness.show([c / default for c in cost], "{:.2f}"),
                    harness.show([100 * m["at_rest_share"] for m in mine], "{:.1f}"),
                    _noise(last),
                ]
            )
    header = [
        "model",
        "way",
        "plain step ms",
        "cost of a measured step %",
        f"of a training, every {default}th %",
        "at rest %",
        "noise scale",
    ]
    return harness.table(header, rows)


def _noise(noise: dict[str, Any]) -> str:
    low, high = (noise[key] if noise[key] is not None else float("nan") for key in ("low", "high"))
    return f"{noise['scale']:.0f} ({low:.0f} to {high:.0f})"


if __name__ == "__main__":
    main()
