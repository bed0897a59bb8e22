"""What scaleray itself costs: launches of 2 to 32 emulated workers, a ladder of 16, plans of 16,384 GPUs, help, and the recorder.

- workers: `scaleray train` of jobs/emulated.yaml on Ray with more and more workers, four samples each, in commands of their own:
  the time to the first step, CPU seconds of all processes and of the driver, its memory, and what driver and recorder need while
  steps run. A power law is fitted to each, and the last doubling stands beside it: 2 is linear.
- commands: wall and CPU time of `scaleray --help` and others, and of plans; with --before FOLDER those of another checkout, in turn.
- ladder: a study of jobs/emulated.yaml up to 16 workers on this machine, whose computing sleeps: how long it takes beside the
  time that its turns trained, how much memory the driver needs, and the efficiencies that it finds.
- reports: the recorder of a training is given step records as workers send them. Time of a record and growth of the memory
  over a run of n and of 10 n steps: both should not depend on n.

    python jobs/benchmarks/tool_scale.py
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from processes import CpuWatch

from scaleray.common.guarded import end_with_parent, guarded
from scaleray.config import load_config
from scaleray.records.run_record import StepRecord

ROOT = Path(__file__).resolve().parents[2]
BATCH = 50  # records of a message
AT_ONCE = 5_000  # records under way at once: faster than any training, and no heap of unwritten ones
FILLED = 25_000  # records after which what the recorder keeps for showing has its full size
MIB = 2**20
TRAINED = 200  # steps of a launch
DRIVER, RECORDER = "scaleray", "ray::PoliteRecorder"
COMMANDS = {
    "--help": 10, "plan --help": 10, "config keys": 10, "plan --model mixtral-8x22b --cluster h100:8x2048": 3,
    "plan --model qwen3-235b-a22b --cluster h100:8x2048": 1,
}  # fmt: skip
"""Commands with the number of times that each is run."""


def launch(num_workers: int) -> dict[str, Any]:
    """One training on so many workers of a Ray of its own, from the command to its end."""
    with tempfile.TemporaryDirectory(prefix="tool-") as folder:
        flags = {
            "scale.workers": num_workers,
            "scale.cpus-per-worker": 1.8 / num_workers,
            "scale.launch-timeout-s": 900,
            "batch.global-size": 4 * num_workers,
            "stop.after": f"{TRAINED} steps",
            "tracking.uri": f"sqlite:///{folder}/mlflow.db",
            "checkpoint.storage-path": f"{folder}/runs",
        }
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "scaleray", "train", "-c", "jobs/emulated.yaml", "--json", *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        started_at = time.time()
        with (
            subprocess.Popen(
                guarded(command), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ) as process,
            CpuWatch(process.pid) as watch,
        ):
            output, errors = process.communicate()
        if process.returncode:
            raise SystemExit(f"{num_workers} workers: {errors[-3000:]}")
        return _launched(num_workers, json.loads(output), watch, started_at)


def _launched(num_workers: int, record: dict[str, Any], watch: CpuWatch, started_at: float) -> dict[str, Any]:
    """What a launch cost until its first step, and in its steps after that."""
    first_at = started_at + record["time_to_first_step_s"]
    start, steps = watch.cpu_s(until=first_at), watch.cpu_s(since=first_at)
    trained_s = record["training_time_s"]
    return {
        "workers": num_workers,
        "first_step_s": record["time_to_first_step_s"],
        "start": record["start"],
        "start_cpu_s": sum(start.values()),
        "start_driver_cpu_s": start.get(DRIVER, 0.0),
        "driver_mib": watch.peak_bytes(DRIVER) / MIB,
        "recorder_mib": watch.peak_bytes(RECORDER) / MIB,
        "training_time_s": trained_s,
        "step_ms": 1e3 * record["step_time_s"],
        "after_driver_cpu_s": steps.get(DRIVER, 0.0),
        "after_recorder_cpu_s": steps.get(RECORDER, 0.0),
        "start_cpu_s_by_process": {name: round(seconds, 2) for name, seconds in start.items() if seconds >= 0.05},
        "after_cpu_s_by_process": {name: round(seconds, 2) for name, seconds in steps.items() if seconds >= 0.05},
        "foreign_cpu_s": watch.foreign_s(),
        "load": os.getloadavg()[0],
        "total_s": record["total_time_s"],
    }


FITTED = (
    "first_step_s", "start_cpu_s", "start_driver_cpu_s", "driver_mib", "recorder_mib", "after_driver_cpu_s",
    "after_recorder_cpu_s",
)  # fmt: skip


def fits(launches: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each figure the exponent of a power law of the workers, and the factor of the last doubling."""
    found = {}
    for name in FITTED:
        points = [(math.log(one["workers"]), math.log(max(one[name], 1e-3))) for one in launches]
        slope, _ = statistics.linear_regression(*zip(*points, strict=True))
        found[name] = {"exponent": slope, "last_doubling": math.exp(points[-1][1] - points[-2][1])}
    return found


def recorder_rates(settings: dict[str, Any]) -> dict[str, Any]:
    """What signs of life of so many workers, and the driver's looks at them, cost the recorder."""
    from scaleray.live.signs_of_life import SignsOfLife
    from scaleray.records.run_record import Heartbeat

    life, size, rounds = SignsOfLife(), settings["workers"], 20_000 // settings["workers"]
    started = time.process_time()
    for step in range(rounds):
        for rank in range(size):
            life.beat(Heartbeat(rank, "node", 1, step, "loss", 0.0, world_size=size))
    beats_s = time.process_time() - started
    for _ in range(rounds):
        life.heartbeats()
    looks_s = time.process_time() - started - beats_s
    return {"workers": size, "us_a_beat": 1e6 * beats_s / rounds / size, "us_a_look": 1e6 * looks_s / rounds}


def commands(before: Path | None) -> list[dict[str, Any]]:
    """Wall and CPU time of commands, each checkout in its turn; medians."""
    found = []
    for words, repeats in COMMANDS.items():
        sides: dict[str, list[tuple[float, float]]] = {}
        for _ in range(repeats):
            for side, folder in (("now", ROOT), *((("before", before),) if before else ())):
                sides.setdefault(side, []).append(_timed(words.split(), folder))
        for side, times in sides.items():
            wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
            found.append({"command": words, "side": side, "wall_s": wall, "cpu_s": cpu, "times": repeats})
    return found


def _timed(words: Sequence[str], folder: Path) -> tuple[float, float]:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "scaleray", *words]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ladder(settings: dict[str, Any]) -> dict[str, Any]:
    """A whole study, from its start to its report."""
    from scaleray.studies.study import study
    from scaleray.studies.study_options import StudyOptions

    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            ROOT / "jobs/emulated.yaml",
            flags={"tracking.uri": f"sqlite:///{folder}/mlflow.db", "checkpoint.storage_path": folder},
            environ={},
        )
        sizes = [n for n in (1, 2, 4, 8, 16, 32) if n <= settings["workers"]]
        options = StudyOptions(
            local=True, world_sizes=sizes, mode="strong,weak", repeats=settings["repeats"], seconds=settings["seconds"]
        )
        started = time.perf_counter()
        record = study(config, options=options, say=print, base_dir=ROOT)
        total_s = time.perf_counter() - started
        trained_s = sum(sum(turn) for curve in record.curves for at in curve.points for turn in at.point.turns)
        return {
            "workers": sizes,
            "turns": options.repeats,
            "total_s": total_s,
            "in_steady_steps_s": trained_s,
            "driver_mib": psutil.Process().memory_info().rss / MIB,
            "record_bytes": (Path(record.folder) / "record.json").stat().st_size,
            "efficiency": {
                curve.mode: {at.point.workers: str(at.efficiency) for at in curve.points} for curve in record.curves
            },
        }


def reports(settings: dict[str, Any]) -> dict[str, Any]:
    """A recorder that is given `steps` records, in a process of its own: memory before and after, and time of a record."""
    from scaleray.recording.recorder import Recorder, RunDescription

    with tempfile.TemporaryDirectory() as folder:
        description = RunDescription(
            tracking_uri=f"sqlite:///{folder}/mlflow.db",
            experiment="tool",
            run_name="run",
            work_dir=folder,
            every_steps=10,
            params={},
            tags={},
            files={},
            datasets=[],
            tokens_per_sample=None,
            started_at=time.time(),
            run_path=folder,
            config={},
            base_dir=None,
            continues=None,
            changes=[],
        )
        recorder = Recorder(description)
        recorder.start()
        recorder.wait_started()
        process, before, started = psutil.Process(), 0.0, time.perf_counter()
        for first in range(1, settings["steps"] + 1, BATCH):
            messages = [
                StepRecord(
                    step=step,
                    loss=1.0,
                    count=64,
                    num_samples=64,
                    learning_rate=1e-3,
                    grad_norm=1.0,
                    step_time_s=1e-3,
                    input_wait_s=0.0,
                    epoch=0.0,
                )
                for step in range(first, first + BATCH)
            ]
            recorder.log(list(messages))
            if first % AT_ONCE == 1:
                recorder.drain()
            if first > FILLED and not before:
                before = process.memory_info().rss
        recorder.drain()
        each_s = (time.perf_counter() - started) / settings["steps"]
        grown = process.memory_info().rss - before
        recorder.finish("FINISHED", metrics={}, tags={}, files={})
        return {"steps": settings["steps"], "us_a_record": 1e6 * each_s, "grown_mib": grown / MIB}


def in_own_process(function: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The figures of a function that starts with an empty memory."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(function, settings, theirs), daemon=True)
    process.start()
    theirs.close()
    found: dict[str, Any] = ours.recv()
    process.join()
    return found


def _send(function: Any, settings: dict[str, Any], pipe: Any) -> None:
    end_with_parent()
    pipe.send(function(settings))


def main() -> None:
    """Measure, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument(
        "--steps", type=int, default=50_000, help="of the shorter run of reports; the longer has ten times as many"
    )
    parser.add_argument("--only", choices=("workers", "commands", "ladder", "reports"), help="default: all")
    parser.add_argument("--sizes", default="2,4,8,16,32", help="numbers of workers of launches")
    parser.add_argument("--before", type=Path, help="another checkout, whose commands are timed in turn")
    parser.add_argument(
        "--out", type=Path, help="JSON file for the figures, to which launches of other sizes are added"
    )
    given = parser.parse_args()
    if given.steps <= FILLED:
        parser.error(f"--steps {given.steps}: it must be more than {FILLED}, from where on memory should stay")
    figures: dict[str, Any] = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    if given.only in (None, "workers"):
        sizes = [int(size) for size in given.sizes.split(",")]
        launches = {one["workers"]: one for one in figures.get("launches", [])} | {n: launch(n) for n in sizes}
        figures["launches"] = [launches[size] for size in sorted(launches)]
        figures["fits"] = fits(figures["launches"]) if len(launches) > 1 else {}
        figures["signs_of_life"] = [recorder_rates({"workers": size}) for size in sorted(launches)]
    if given.only in (None, "commands"):
        figures["commands"] = commands(given.before)
    if given.only in (None, "ladder"):
        figures["ladder"] = in_own_process(
            ladder, {"workers": given.workers, "repeats": given.repeats, "seconds": given.seconds}
        )
    if given.only in (None, "reports"):
        figures["reports"] = [in_own_process(reports, {"steps": n}) for n in (given.steps, 10 * given.steps)]
    text = json.dumps(figures, indent=2)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
