"""Trials an hour: `scaleray sweep` beside Ray Tune with a TorchTrainer in each trial, on digits.

Both run the same trials (batch sizes of one recipe, whole trainings, an evaluation after each epoch) one round after the
other in random order, each in a process and a Ray cluster of its own. The clock starts when the cluster is up and stops
with the last trial, so that starting the workers counts. scaleray writes its records and MLflow in that time, the other
side nothing.

    python jobs/benchmarks/sweep.py --workers 1 2 --trials 6 --repeats 3
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

from scaleray.common.guarded import guarded

SIDES = ("scaleray", "tune")
BATCH_SIZES = (32, 64, 128, 256, 512, 1024)
CPUS = 3  # two workers and a driver, whatever the machine has
TIMEOUT_S = 1800
RULES = """\
{trials} trials of {epochs} epochs of digits, global batches {sizes}, one training after another where a trial has 2 workers and up
to {cpus} where it has 1, on a cluster of {cpus} logical CPUs. Seconds from the cluster being up to the last trial, {repeats} rounds in
random order (seed {seed}). `tune` is what Ray's documentation shows: a function trial that fits a TorchTrainer over a plain DDP loop,
drivers of 0.01 CPU, a health check every 0.2 s. Median (smallest-largest); the ratio is of trials an hour, round by round."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=harness.RESULTS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # one side, in a process of its own
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        arguments.out.write_text(json.dumps(run_side(arguments.side, arguments)))
        return
    known = harness.conditions(["scaleray", "torch", "ray", "mlflow"])
    found: list[harness.Measurement] = []
    for workers in arguments.workers:
        for number, side in harness.interleaved(SIDES, repeats=arguments.repeats, seed=arguments.seed):
            harness.log(f"{workers} workers, round {number + 1}: {side} ...")
            measured = in_a_process(side, workers, arguments)
            found.append({"side": side, "round": number, "workers": workers, **measured})
            harness.log(f"  {measured}")
    rules = RULES.format(
        trials=arguments.trials,
        epochs=arguments.epochs,
        cpus=CPUS,
        repeats=arguments.repeats,
        seed=arguments.seed,
        sizes=", ".join(map(str, BATCH_SIZES[: arguments.trials])),
    )
    record = {"conditions": known, "arguments": harness.arguments_of(arguments), "measurements": found}
    harness.write_report(
        "sweep",
        title="Trials an hour of a sweep",
        text=f"{rules}\n\n{describe(found)}",
        record=record,
        folder=arguments.results,
    )


def in_a_process(side: str, workers: int, arguments: argparse.Namespace) -> harness.Measurement:
    """One side once. One that fails gives `not_run` with the reason."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        out = Path(folder) / "out.json"
        words = [
            sys.executable,
            __file__,
            "--side",
            side,
            "--out",
            str(out),
            "--workers",
            str(workers),
            "--trials",
            str(arguments.trials),
            "--epochs",
            str(arguments.epochs),
            "--seed",
            str(arguments.seed),
        ]
        environment = {**os.environ, **harness.ray_environment(folder), "OMP_NUM_THREADS": "1", "BENCH_FOLDER": folder}
        done = subprocess.run(
            guarded(words), env=environment, cwd=harness.REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        if done.returncode or not out.exists():
            harness.log(done.stderr[-4000:])
            return {"not_run": f"exit code {done.returncode}"}
        return json.loads(out.read_text())


def run_side(side: str, arguments: argparse.Namespace) -> harness.Measurement:
    """Trials an hour of one side, in this process."""
    import ray

    harness.start_ray(num_cpus=CPUS)
    started = time.perf_counter()
    losses = (run_scaleray if side == "scaleray" else run_tune)(arguments, arguments.workers[0])
    seconds = time.perf_counter() - started
    ray.shutdown()
    return {"seconds": seconds, "trials_per_hour": 3600 * len(losses) / seconds, "losses": losses}


def sizes_of(arguments: argparse.Namespace) -> list[int]:
    return [BATCH_SIZES[n % len(BATCH_SIZES)] for n in range(arguments.trials)]


def run_scaleray(arguments: argparse.Namespace, workers: int) -> list[float]:
    from scaleray.config import load_config
    from scaleray.sweeps.sweep import sweep

    folder = os.environ["BENCH_FOLDER"]
    config = load_config(
        "jobs/digits.yaml",
        flags={
            "stop.after": f"{arguments.epochs} epochs",
            "evaluation.every": "1 epoch",
            "seed": arguments.seed,
            "tracking.uri": f"sqlite:///{folder}/mlflow.db",
            "checkpoint.storage_path": f"{folder}/runs",
        },
    )
    repeats = -(-arguments.trials // len(BATCH_SIZES))
    sizes = ",".join(map(str, BATCH_SIZES[: arguments.trials]))
    space = {"batch_sizes": sizes, "search": "grid", "seeds": repeats, "workers_per_trial": workers}
    record = sweep(config, base_dir=harness.REPOSITORY / "jobs", say=harness.log, **space)
    return [t.value for t in record.trials if t.value is not None]


def run_tune(arguments: argparse.Namespace, workers: int) -> list[float]:
    """As a user writes it, with what has to be known of Ray 2.60 so that it does not hang."""
    import ray.train
    from ray import tune
    from ray.train.torch import TorchConfig, TorchTrainer

    folder, epochs = os.environ["BENCH_FOLDER"], arguments.epochs

    def trial(config: dict[str, Any]) -> None:
        result = TorchTrainer(
            train_digits,
            train_loop_config={**config, "epochs": epochs},
            torch_config=TorchConfig(backend="gloo", timeout_s=120),
            scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
            run_config=ray.train.RunConfig(name=tune.get_context().get_trial_id(), storage_path=f"{folder}/train"),
        ).fit()
        tune.report({"loss": result.return_value})

    grid = tune.Tuner(
        tune.with_resources(trial, {"CPU": 0.01}),
        param_space={"batch_size": tune.grid_search(sizes_of(arguments))},
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=int((CPUS - 0.1) // workers)),
        run_config=tune.RunConfig(storage_path=f"{folder}/tune", verbose=0),
    ).fit()
    return [result.metrics["loss"] for result in grid]


def train_digits(config: dict[str, Any]) -> float:
    """The same training by hand: AdamW, cosine after an epoch of warm-up, an evaluation an epoch; gives the last test loss."""
    import math

    import ray.train
    import ray.train.torch
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    sys.path.insert(0, str(harness.REPOSITORY / "jobs"))
    from digits import Digits

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, world = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    workload = Digits()
    data = workload.datasets()
    train = {name: torch.from_numpy(values) for name, values in data["train"].items()}
    test = {name: torch.from_numpy(values) for name, values in data["test"].items()}
    model = ray.train.torch.prepare_model(workload.build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01, fused=True)
    rows, size = len(train["label"]), config["batch_size"]
    steps_per_epoch = -(-rows // size)
    total = steps_per_epoch * config["epochs"]

    def factor(step: int) -> float:
        warm = min(1.0, (step + 1) / steps_per_epoch)
        return warm * 0.5 * (1 + math.cos(math.pi * max(0, step - steps_per_epoch) / max(1, total - steps_per_epoch)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    loss_value = math.nan
    for epoch in range(config["epochs"]):
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(epoch))
        for start in range(0, rows, size):
            mine = order[start : start + size][rank::world]
            logits = model(train["image"][mine])
            loss = F.cross_entropy(logits, train["label"][mine])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            own = slice(rank, None, world)
            sums = F.cross_entropy(model(test["image"][own]), test["label"][own], reduction="sum").double().reshape(1)
            dist.all_reduce(sums)
        model.train()
        loss_value = sums.item() / len(test["label"])
    return loss_value


def describe(found: list[harness.Measurement]) -> str:
    """The table, and the ratios."""
    rows = []
    for workers in dict.fromkeys(m["workers"] for m in found):
        own = [m for m in found if m["workers"] == workers]
        ratio = harness.ratios(own, "trials_per_hour", side="scaleray", baselines=["tune"])
        for side in SIDES:
            good = [m for m in own if m["side"] == side and "not_run" not in m]
            rows.append(
                [
                    str(workers),
                    side,
                    harness.show([m["seconds"] for m in good], "{:.1f}"),
                    harness.show([m["trials_per_hour"] for m in good]),
                    harness.show(ratio, "{:.1f}") if side == "scaleray" else "1",
                    harness.show([sum(m["losses"]) / len(m["losses"]) for m in good], "{:.3f}"),
                ]
            )
    header = ("workers a trial", "side", "seconds", "trials an hour", "times tune", "mean test loss")
    return harness.table(header, rows)


if __name__ == "__main__":
    main()
