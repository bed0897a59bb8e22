"""What scaleray itself costs: a ladder of 16 emulated workers, and the driver's memory and time against the number of steps.

- ladder: a study of jobs/emulated.yaml up to 16 workers on this machine, whose computing sleeps: how long it takes beside the
  time that its turns trained, how much memory the driver needs, and the efficiencies that it finds.
- reports: the recorder of a training is given step records as workers send them. Time of a record and growth of the memory
  over a run of n and of 10 n steps: both should not depend on n.

    python jobs/benchmarks/tool_scale.py
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from scaleray.config import load_config
from scaleray.guarded import end_with_parent
from scaleray.records.run import StepRecord

ROOT = Path(__file__).resolve().parents[2]
BATCH = 50  # records of a message
AT_ONCE = 5_000  # records under way at once: faster than any training, and no heap of unwritten ones
FILLED = 25_000  # records after which what the recorder keeps for showing has its full size
MIB = 2**20


def ladder(settings: dict[str, Any]) -> dict[str, Any]:
    """A whole study, from its start to its report."""
    from scaleray.launch.study.plan import Question
    from scaleray.launch.study.study import study
    from scaleray.reports.records.study import write_study_report

    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            ROOT / "jobs/emulated.yaml",
            flags={"tracking.uri": f"sqlite:///{folder}/mlflow.db", "checkpoint.storage_path": folder},
            environ={},
        )
        sizes = [n for n in (1, 2, 4, 8, 16, 32) if n <= settings["workers"]]
        question = Question(
            world_sizes=sizes, modes=("strong", "weak"), repeats=settings["repeats"], seconds=settings["seconds"]
        )
        started = time.perf_counter()
        record = study(config, question, local=True, say=print, base_dir=ROOT, write_report=write_study_report)
        total_s = time.perf_counter() - started
        trained_s = sum(sum(turn) for curve in record.curves for at in curve.points for turn in at.point.turns)
        return {
            "workers": sizes,
            "turns": question.repeats,
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
    from scaleray.tracking.recorder import Recorder, RunDescription

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
    parser.add_argument("--only", choices=("ladder", "reports"))
    given = parser.parse_args()
    if given.steps <= FILLED:
        parser.error(f"--steps {given.steps}: it must be more than {FILLED}, from where on memory should stay")
    figures: dict[str, Any] = {}
    if given.only != "reports":
        figures["ladder"] = in_own_process(
            ladder, {"workers": given.workers, "repeats": given.repeats, "seconds": given.seconds}
        )
    if given.only != "ladder":
        figures["reports"] = [in_own_process(reports, {"steps": n}) for n in (given.steps, 10 * given.steps)]
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
