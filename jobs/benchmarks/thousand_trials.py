"""What a thousand trials cost the sweep itself: their rate, the driver's memory, writes to MLflow, and the report.

A trial is one optimizer step of a model of five parameters, so that nothing but the sweep takes time.

    python jobs/benchmarks/thousand_trials.py --trials 1000
    python jobs/benchmarks/thousand_trials.py --trials 1000 --keep FOLDER    # for page_loads.py: its database and its report
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import harness
import numpy as np

from scaleray import Workload
from scaleray.config import load_config

CPUS = 3
RULES = """\
{trials} trials of one optimizer step each, one worker a trial, {cpus} logical CPUs, scheduler fifo, SQLite MLflow. The rate is over the whole
sweep, its start and its end included; the rate in the middle is between the 10th and the 90th percent of the trials. Memory is the driver's resident
set at the 10th and the 100th percent. Writes are calls of MLflow's client."""


class Trivial(Workload):
    """A line through eight rows."""

    def build_model(self) -> Any:
        from torch import nn

        return nn.Linear(4, 1)

    def datasets(self) -> dict[str, Any]:
        x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
        rows = {"x": x, "y": x.sum(axis=1, keepdims=True)}
        return {"train": rows, "val": rows}

    def loss(self, model: Any, batch: Any) -> Any:
        return (model(batch["x"]) - batch["y"]).pow(2).sum(), len(batch["x"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--keep", type=Path, help="where database, record and report stay; without it they go")
    parser.add_argument("--results", type=Path, default=harness.RESULTS)
    arguments = parser.parse_args()
    known = harness.conditions(["scaleray", "torch", "ray", "mlflow"])
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        os.environ.update(harness.ray_environment(folder))
        kept = folder if arguments.keep is None else str(arguments.keep.resolve())
        os.makedirs(kept, exist_ok=True)
        measured = run(arguments.trials, kept)
    rows = [[name, f"{value:,.4g}"] for name, value in measured.items()]
    text = f"{RULES.format(trials=arguments.trials, cpus=CPUS)}\n\n{harness.table(('figure', 'value'), rows)}"
    record = {"conditions": known, "arguments": {"trials": arguments.trials}, "measurements": measured}
    harness.write_report(
        "thousand-trials", title="A thousand trials", text=text, record=record, folder=arguments.results
    )


def run(num_trials: int, folder: str) -> dict[str, float]:
    """The figures of one sweep."""
    import psutil
    import ray

    from scaleray.sweeps.sweep import sweep
    from scaleray.sweeps.sweep_page import write_sweep_report

    harness.start_ray(num_cpus=CPUS)
    writes = count_writes()
    config = load_config(
        flags={
            "workload.name": "thousand_trials:Trivial",
            "batch.global_size": 8,
            "optimizer.name": "sgd",
            "optimizer.learning_rate": 0.1,
            "stop.after": "1 steps",
            "tracking.uri": f"sqlite:///{folder}/mlflow.db",
            "checkpoint.storage_path": f"{folder}/runs",
        },
        environ={},
    )
    space = {"learning_rates": "1e-4..1", "rules": "none", "trials": num_trials}
    process, done_at, memory = psutil.Process(), [], []

    def say(text: str) -> None:
        if text.startswith("trial "):
            done_at.append(time.perf_counter())
            memory.append(process.memory_info().rss)
        else:
            harness.log(text)

    started = time.perf_counter()
    record = sweep(config, Trivial, say=say, **space)
    seconds = time.perf_counter() - started
    ray.shutdown()
    tenth, most = len(done_at) // 10, len(done_at) * 9 // 10
    report_started = time.perf_counter()
    page, *_ = write_sweep_report(record, Path(folder) / "report")
    finished = sum(t.status == "finished" for t in record.trials)
    return {
        "trials that finished": finished,
        "seconds": seconds,
        "trials a second": finished / seconds,
        "trials a second in the middle": (most - tenth) / (done_at[most] - done_at[tenth]),
        "driver at 10 % (MiB)": memory[tenth] / 2**20,
        "driver at the end (MiB)": memory[-1] / 2**20,
        "driver a trial (KiB)": (memory[-1] - memory[tenth]) / 2**10 / (len(memory) - tenth),
        "MLflow writes": sum(writes.values()),
        "MLflow writes a trial": sum(writes.values()) / finished,
        "record.json (MiB)": (Path(record.folder) / "record.json").stat().st_size / 2**20,
        "report.html (MiB)": page.stat().st_size / 2**20,
        "seconds for the report": time.perf_counter() - report_started,
    }


def count_writes() -> Counter[str]:
    """Calls of MLflow's client by name, from now on."""
    from mlflow import MlflowClient

    counted: Counter[str] = Counter()
    lock = threading.Lock()
    for name in (
        "create_run",
        "log_batch",
        "set_terminated",
        "set_tag",
        "log_artifact",
        "set_experiment_tag",
        "log_inputs",
    ):
        original = getattr(MlflowClient, name)

        def counting(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            with lock:
                counted[_name] += 1
            return _original(*args, **kwargs)

        setattr(MlflowClient, name, counting)
    return counted


if __name__ == "__main__":
    main()
