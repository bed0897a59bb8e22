"""What scaleray costs and gains in a training: the same job by hand on torchrun, Ray Train, Lightning and Accelerate.

Each measurement is a fresh command on 2 gloo workers with 1 thread each: same workload, optimizer, gradient clipping,
global batch and seed, and the same order of samples wherever the side can be told one (all but Ray Train).

    pip install -r jobs/benchmarks/requirements.txt
    python jobs/benchmarks/training.py --repeats 5
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from processes import CpuWatch

from scaleray.common.guarded import guarded
from scaleray.config.loading import load_config

SIDES = ("scaleray", "torchrun", "ray_train", "lightning", "accelerate")
BEFORE = "before"  # scaleray as another checkout has it, with --before
BASELINE = "torchrun"
NEEDED_LIBRARY = {"lightning": "lightning", "accelerate": "accelerate"}
WORKLOADS = {"digits": 1000, "language_model": 100}  # jobs/<name>.yaml, and steps of a run
WORKERS = ("ray::RayTrainWorker", *(f"with_{side}.py" for side in SIDES))  # names that `processes.py` gives them
TIMEOUT_S = 1200.0
DISTURBED = 0.1  # cores that processes of others take in the steady part
TRIES = 3
COMMON_FLAGS = {
    "schedule.name": "constant",
    "schedule.warmup": "0 steps",
    "batch.drop_last": True,
    "optimizer.rule": "none",  # the learning rate is that of the file, whatever the batch
    "optimizer.clip_norm": 1.0,
    "evaluation.every": None,  # the hand-written sides do not evaluate; scaleray still does after the last step
}
RULES = """\
{steps} steps of {batch} samples on {world_size} gloo workers with 1 torch thread each; every measurement is a fresh
command. Sides are in random order in each round (seed {seed}), {repeats} rounds. Median (smallest-largest); ratios
are taken in each round, to {baseline} in that round.

- samples/s: global samples over wall time on rank 0, the first 20 % of the steps, at least 10, left out.
- first step: from the start of the command to the end of the first optimizer step on rank 0.
- CPU s to it: CPU seconds of all processes of the command up to then. foreign CPU s: of all other processes of the
  machine, over the whole command: what disturbed the measurement. One in whose steady part they took more than
  {disturbed:.0f} % of a core is made again, at most {again} times; the last counts.
- helpers: CPU time of the command's processes but the workers in the steady part, in percent of one core.
- input wait: share of the steady time that rank 0 spent waiting for its next batch.
- memory: peak resident memory of a worker, the larger of the two; processes of data loaders not counted.
- final loss: mean of the last 20 steps over all workers. A check that all sides train alike; the order of samples is
  Ray's own in ray_train, and scaleray draws other initial weights from the seed."""


@dataclass(frozen=True)
class Job:
    """One workload as all sides run it. `task` is what the hand-written sides read, `flags` what scaleray is told."""

    name: str
    config: str
    flags: dict[str, Any]
    task: dict[str, Any]


def make_job(name: str, arguments: argparse.Namespace) -> Job:
    """The job of jobs/<name>.yaml, with what would differ between the sides taken out."""
    path = f"jobs/{name}.yaml"
    steps = arguments.steps or WORKLOADS[name]
    flags = {**COMMON_FLAGS, "stop.after": f"{steps} steps", "scale.workers": arguments.workers, "seed": arguments.seed}
    config = load_config(harness.REPOSITORY / path, flags=flags)
    task = {
        "workload": config.workload.name,
        "workload_args": dict(config.workload.args),
        "world_size": arguments.workers,
        "global_batch_size": config.batch.global_size,
        "steps": steps,
        "learning_rate": config.optimizer.learning_rate,
        "betas": config.optimizer.betas,
        "epsilon": config.optimizer.epsilon,
        "weight_decay": config.optimizer.weight_decay,
        "clip_norm": config.optimizer.clip_norm,
        "seed": arguments.seed,
        "loader_workers": arguments.loader_workers,
    }
    return Job(name, path, flags, task)


def command_of(side: str, job: Job, folder: Path) -> list[str]:
    """The command line of one side."""
    if side in ("scaleray", BEFORE):
        flags = {
            **job.flags,
            "tracking.uri": f"sqlite:///{folder}/mlflow.db",
            "checkpoint.storage_path": str(folder / "runs"),
        }
        words = [
            word
            for key, value in flags.items()
            for word in (f"--{key.replace('_', '-')}", "null" if value is None else str(value))
        ]
        return [sys.executable, "-m", "scaleray", "train", "-c", job.config, "--json", *words]
    task_file = folder / "task.json"
    task_file.write_text(json.dumps({**job.task, "result": str(folder / "result")}))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.task["world_size"])]
    script = harness.REPOSITORY / "jobs" / "benchmarks" / "sides" / f"with_{side}.py"
    return [sys.executable, *(launcher if side in ("torchrun", "accelerate") else []), str(script), str(task_file)]


def run(side: str, job: Job, before: Path | None) -> harness.Measurement:
    """Run one side once. A side that fails gives `not_run` with the reason. before: checkout of the side `before`."""
    library = NEEDED_LIBRARY.get(side)
    if library is not None and importlib.util.find_spec(library) is None:
        return {"not_run": f"{library} is not installed; see jobs/benchmarks/requirements.txt"}
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        started_at = time.time()
        source = before if side == BEFORE and before is not None else harness.REPOSITORY
        code, output, errors, watch = execute(command_of(side, job, folder), source)
        total_s = time.time() - started_at
        if code != 0:
            harness.log(errors[-8000:] or output[-8000:])
            return {"not_run": f"exit code {code}: {reason(errors or output)}"}
        read = read_by_hand if side not in ("scaleray", BEFORE) else read_scaleray
        return with_cpu(read(folder, output, started_at), watch, started_at) | {"total_s": total_s}


def undisturbed(side: str, job: Job, before: Path | None) -> harness.Measurement:
    """Run one side until nobody disturbs its steady part, at most `TRIES` times; the last try counts."""
    for number in range(1, TRIES + 1):
        found = run(side, job, before) | {"tries": number}
        if found.get("foreign_share", 0.0) <= DISTURBED:
            break
    return found


def with_cpu(found: harness.Measurement, watch: CpuWatch, started_at: float) -> harness.Measurement:
    """What was measured, with the CPU seconds of the command's processes and of all others on the machine."""
    start, steady = watch.cpu_s(until=started_at + found["first_step_s"]), watch.cpu_s(*found["steady_at"])
    helpers_s = sum(seconds for name, seconds in steady.items() if name not in WORKERS)
    return {
        **found,
        "start_cpu_s": sum(start.values()),
        "steady_cpu_s": sum(steady.values()),
        "helpers_share": helpers_s / (found["steady_at"][1] - found["steady_at"][0]),
        "foreign_cpu_s": watch.foreign_s(),
        "foreign_share": watch.foreign_s(*found["steady_at"]) / (found["steady_at"][1] - found["steady_at"][0]),
        "start_cpu_s_by_process": {name: round(seconds, 2) for name, seconds in start.items() if seconds >= 0.05},
        "steady_cpu_s_by_process": {name: round(seconds, 2) for name, seconds in steady.items() if seconds >= 0.05},
    }


def execute(command: Sequence[str], source: Path) -> tuple[int, str, str, CpuWatch]:
    """Exit code, stdout, stderr and CPU seconds. All processes of the command end with it, and with this one.

    source: checkout whose package the command runs.
    """
    benchmarks = harness.REPOSITORY / "jobs" / "benchmarks"
    places = [source, benchmarks, benchmarks / "sides"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, places))}
    with subprocess.Popen(
        guarded(command),
        cwd=source,  # where `python -m` looks first
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        watch = CpuWatch(process.pid)
        try:
            with watch:
                output, errors = process.communicate(timeout=TIMEOUT_S)
            return process.returncode, output, errors, watch
        except subprocess.TimeoutExpired:
            return 124, "", f"not done after {TIMEOUT_S:.0f} s", watch
        finally:
            if process.poll() is None:
                process.terminate()


def reason(text: str) -> str:
    """The line of a failed command's output that says most: the last one that names an error, else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["it printed nothing"]
    named = [line for line in lines if "Error" in line or "what():" in line or "Exception" in line]
    return (named or lines)[-1][:300]


def read_by_hand(folder: Path, output: str, started_at: float) -> harness.Measurement:
    """What the ranks of a hand-written side wrote."""
    ranks = [
        json.loads((folder / f"result.{rank}.json").read_text())
        for rank in range(len(list(folder.glob("result.*.json"))))
    ]
    return {
        "samples_per_s": ranks[0]["samples_per_s"],
        "first_step_s": ranks[0]["first_step_at"] - started_at,
        "steady_at": ranks[0]["steady_at"],
        "input_wait_share": ranks[0]["input_wait_share"],
        "peak_memory_bytes": [rank["peak_memory_bytes"] for rank in ranks],
        "final_loss": statistics.fmean(rank["final_loss"] for rank in ranks),
    }


def read_scaleray(folder: Path, output: str, started_at: float) -> harness.Measurement:
    """What scaleray's own record says."""
    record = json.loads(output)
    with open(Path(record["run_dir"]) / "steps.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    times = (float(row["step_time_s"]) for row in rows[1:])
    ends = list(itertools.accumulate(times, initial=started_at + record["time_to_first_step_s"]))
    return {
        "samples_per_s": record["samples_per_s"],
        "first_step_s": record["time_to_first_step_s"],
        "steady_at": [ends[max(10, len(rows) // 5) - 1], ends[-1]],
        "input_wait_share": record["input_wait_share"],
        "peak_memory_bytes": record["peak_memory_bytes"],
        "final_loss": statistics.fmean(float(row["loss"]) for row in rows[-20:]),
    }


def describe(job: Job, found: list[harness.Measurement], arguments: argparse.Namespace) -> str:
    """The rules and the table of one workload."""
    rows, notes = [], []
    for side in arguments.sides:
        own = [m for m in found if m["side"] == side and "not_run" not in m]
        notes += sorted({f"- {side} not run: {m['not_run']}" for m in found if m["side"] == side and "not_run" in m})
        if not own:
            continue
        speed = harness.ratios(found, "samples_per_s", side=side, baselines=[BASELINE])
        start = harness.ratios(found, "first_step_s", side=side, baselines=[BASELINE])
        rows.append(
            [
                side,
                harness.show([m["samples_per_s"] for m in own]),
                harness.show(speed, "{:.2f}"),
                harness.show([m["first_step_s"] for m in own], "{:.1f}"),
                harness.show(start, "{:.2f}"),
                harness.show([m["start_cpu_s"] for m in own], "{:.1f}"),
                harness.show([100 * m["helpers_share"] for m in own], "{:.0f}"),
                harness.show([m["foreign_cpu_s"] for m in own], "{:.0f}"),
                harness.show([100 * m["input_wait_share"] for m in own], "{:.1f}"),
                harness.show([max(m["peak_memory_bytes"]) / 2**20 for m in own]),
                harness.show([m["final_loss"] for m in own], "{:.4f}"),
            ]
        )
    header = [
        "side", "samples/s", "ratio", "first step, s", "ratio", "CPU s to it", "helpers, %", "foreign CPU s", "input wait, %", "memory, MiB",
        "final loss",
    ]  # fmt: skip
    rules = RULES.format(
        steps=job.task["steps"],
        batch=job.task["global_batch_size"],
        world_size=job.task["world_size"],
        seed=arguments.seed,
        repeats=arguments.repeats,
        baseline=BASELINE,
        disturbed=100 * DISTURBED,
        again=TRIES - 1,
    )
    return "\n\n".join([f"## {job.name}", rules, harness.table(header, rows), "\n".join(notes)]).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: text.split(",")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workloads", type=words, default=list(WORKLOADS), help=",".join(WORKLOADS))
    parser.add_argument("--sides", type=words, default=list(SIDES), help=",".join(SIDES))
    parser.add_argument("--steps", type=int, help=f"of each run, by default {WORKLOADS}")
    parser.add_argument(
        "--workers", type=int, default=2, help="ranks; with fewer than cores, Ray's own processes do not compete"
    )
    parser.add_argument("--loader-workers", type=int, default=0, help="processes of each rank's DataLoader")
    parser.add_argument("--seed", type=int, default=0, help="of the training and of the order of sides")
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the report")
    parser.add_argument("--before", type=Path, help="another checkout of scaleray, to be measured as the side `before`")
    arguments = parser.parse_args()
    if arguments.before is not None:
        arguments.sides = [*arguments.sides, BEFORE]
    if unknown := (set(arguments.sides) - {*SIDES, BEFORE}) | (set(arguments.workloads) - set(WORKLOADS)):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if arguments.steps is not None and arguments.steps < 20:
        parser.error("--steps must be at least 20, as the first 10 are left out")
    conditions = harness.conditions(["torch", "ray", "lightning", "accelerate", "numpy"])
    jobs = [make_job(name, arguments) for name in arguments.workloads]
    texts, found = [], []
    for job in jobs:
        own: list[harness.Measurement] = []
        for number, side in harness.interleaved(arguments.sides, repeats=arguments.repeats, seed=arguments.seed):
            own.append(
                {"workload": job.name, "round": number, "side": side, **undisturbed(side, job, arguments.before)}
            )
            harness.log(f"{job.name} round {number + 1}: {json.dumps(own[-1])}")
        texts.append(describe(job, own, arguments))
        found += own
    record = {"conditions": conditions, "tasks": {job.name: job.task for job in jobs}, "measurements": found}
    harness.write_report(
        "training" if arguments.workers == 2 else f"training-{arguments.workers}-workers",
        title="Training, side by side",
        text="\n\n".join(texts),
        record=record,
        folder=arguments.results,
    )


if __name__ == "__main__":
    main()
