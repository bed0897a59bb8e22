"""How near a guided sweep comes to the whole grid, and for how many of its samples: on digits and on a small language model.

The grid runs first, every setting with every seed; then the guided sweep runs its own trials of the same space, and its
choice is judged by the grid's figures: samples to the target at the throughput of each batch size.

    python jobs/benchmarks/guided_sweep.py --jobs digits language_model --seeds 3
    python jobs/benchmarks/guided_sweep.py --jobs digits --seeds 1 --workers 1
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import harness

JOBS: dict[str, dict[str, Any]] = {
    "digits": {
        "config": "jobs/digits.yaml",
        "flags": {
            "stop.at": "test/loss <= 0.1",
            "stop.after": "12 epochs",
            "evaluation.every": "256 samples",
            "schedule.name": "constant",
            "schedule.warmup": "0 steps",
        },
        "batch_sizes": "16..1024",
        "rules": "sqrt,linear,adam,none",
    },
    "language_model": {
        "config": "jobs/language_model.yaml",
        "flags": {
            "workload.args": {
                "size": "1m",
                "width": 64,
                "num_blocks": 2,
                "num_heads": 2,
                "sequence_length": 64,
                "text": str(Path(asyncio.__file__).parent),
            },
            "stop.at": "val/loss <= 1.75",
            "stop.after": "40000 samples",
            "evaluation.every": "1024 samples",
            "schedule.name": "constant",
            "schedule.warmup": "0 steps",
        },
        "batch_sizes": "8..512",
        "rules": "sqrt,linear,adam,none",
    },
}
"""Recipe, space and target of each. A constant rate, so that the way to a target does not depend on stop.after; a loss as the
target and frequent evaluations, so that the way there is known better than the differences to be seen."""
RULES = """\
Every trial has {workers} worker(s), and one runs at a time. The grid is {grid} settings x {seeds} seed(s); a setting's time to the
target is the median of its samples to it over the seeds, at the median throughput of its batch size in the grid. `loss` is how far
the guided choice's goodput lies below the grid's best by these figures, `samples` what the guided sweep's trials took of the grid's.
The time to the target is known to the distance of two evaluations, and to the luck of the seeds: where both sweeps see other seeds'
luck, the loss is that luck. Here they see the same seeds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.2, help="of the grid's samples that the guided sweep may take")
    parser.add_argument("--batch-sizes", default=None, help="another range, for a quick look")
    parser.add_argument("--rules", default=None)
    parser.add_argument("--results", type=Path, default=harness.RESULTS)
    arguments = parser.parse_args()
    known = harness.conditions(["torch", "ray"])
    found = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        os.environ |= harness.ray_environment(folder)
        harness.start_ray(num_cpus=arguments.workers + 1)
        for job in arguments.jobs:
            found.append(measure(job, arguments, folder))
            harness.log(f"{job}: {found[-1]}")
        import ray

        ray.shutdown()
    rows = [
        [
            m["job"],
            str(m["grid_trials"]),
            f"{m['best'][0]} {m['best'][1]}",
            f"{m['chosen'][0]} {m['chosen'][1]}",
            f"{m['loss']:.1%}",
            str(m["guided_trials"]),
            f"{m['samples_share']:.1%}",
            f"{m['grid_s']:.0f}",
            f"{m['guided_s']:.0f}",
        ]
        for m in found
    ]
    header = [
        "job",
        "grid trials",
        "its best",
        "guided choice",
        "loss",
        "guided trials",
        "samples",
        "grid s",
        "guided s",
    ]
    rules = RULES.format(workers=arguments.workers, seeds=arguments.seeds, grid=found[0]["grid_settings"])
    words = "\n".join(f"- {m['job']}: {text}" for m in found for text in m["words"])
    record = {"conditions": known, "arguments": harness.arguments_of(arguments), "measurements": found}
    harness.write_report(
        "guided_sweep",
        title="A guided sweep beside the whole grid",
        text=f"{rules}\n\n{harness.table(header, rows)}\n\n{words}",
        record=record,
        folder=arguments.results,
    )


def measure(job: str, arguments: argparse.Namespace, folder: str) -> harness.Measurement:
    """The grid and the guided sweep of one job, one after the other."""
    from scaleray.config import load_config
    from scaleray.sweeps.grid_comparison import compare_with_grid
    from scaleray.sweeps.sweep import sweep

    space = JOBS[job]
    own = {"tracking.uri": f"sqlite:///{folder}/mlflow.db", "checkpoint.storage_path": f"{folder}/runs"}
    config = load_config(harness.REPOSITORY / space["config"], flags={**space["flags"], **own}, environ={})
    asked: dict[str, Any] = {
        "batch_sizes": arguments.batch_sizes or space["batch_sizes"],
        "rules": arguments.rules or space["rules"],
        "seeds": arguments.seeds,
        "workers_per_trial": arguments.workers,
        "search": "grid",
    }
    base_dir = harness.REPOSITORY / "jobs"
    grid = sweep(config, base_dir=base_dir, say=harness.log, **asked)
    asked |= {"guided": True, "guided_share": arguments.share, "against_grid": grid.folder}
    guided = sweep(config, base_dir=base_dir, say=harness.log, **asked)
    compared = compare_with_grid(guided, grid)
    ran = sum(t.samples > 0 for t in grid.trials)
    return {
        "job": job,
        "grid_trials": ran,
        "grid_settings": ran // arguments.seeds,
        "guided_trials": sum(t.samples > 0 for t in guided.trials),
        "best": compared.best[:2],
        "chosen": compared.chosen[:2],
        "loss": compared.loss,
        "samples_share": compared.samples_share,
        "grid_s": grid.duration_s,
        "guided_s": guided.duration_s,
        "words": guided.words[:3],
        "trials": [
            {
                "sweep": name,
                "batch_size": t.batch_size,
                "rule": t.rule,
                "seed": t.seed,
                "status": t.status,
                "samples": t.samples,
                "samples_to_target": t.samples_to_target,
                "samples_per_s": t.samples_per_s,
                "noise_scale": t.noise_scale,
            }
            for name, record in (("grid", grid), ("guided", guided))
            for t in record.trials
        ],
    }


if __name__ == "__main__":
    main()
