"""Runs as result lines of MLPerf, and the baseline as reference convergence points, for MLPerf's own checkers.

The lines are those of mlperf-logging's `:::MLLOG`, rules of training 6.0.0. A run ends, for MLPerf, at the first
evaluation that reaches the target; times are those at which the steps were recorded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scaleray.config.base import Target
from scaleray.errors import StorageError, TrackingError, UsageError
from scaleray.gates.convergence import Learning
from scaleray.launch.gate.evidence import Evidence, learning, training
from scaleray.tracking.find_record import FoundRun
from scaleray.tracking.steps_file import step_rows

TOKEN = ":::MLLOG"
NAMESPACE = "scaleray"
POINTS = "reference_points.json"


def write_mlperf_log(evidence: Evidence, target: Target | None, folder: Path, *, benchmark: str) -> list[Path]:
    """Write `result_0.txt` and so on of the candidates, and the baselines' samples to the target as reference points,
    to a folder. Raises UsageError without a target, TrackingError for a run without its steps or evaluations."""
    if target is None:
        raise UsageError(
            "--mlperf-log", str(folder), "MLPerf counts to a target, and there is none", "policy: convergence.target"
        )
    written = [folder / f"result_{number}.txt" for number in range(len(evidence.candidates))]
    texts = [
        "".join(f"{line}\n" for line in mlperf_lines(found, target, benchmark=benchmark))
        for found in evidence.candidates
    ]
    if evidence.baselines:
        written.append(folder / POINTS)
        texts.append(json.dumps(_points(evidence, target, benchmark), indent=1))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(written, texts, strict=True):
            path.write_text(text)
    except OSError as exc:
        raise StorageError("--mlperf-log", str(folder), f"it cannot be written: {exc}") from exc
    return written


def mlperf_lines(found: FoundRun, target: Target, *, benchmark: str) -> Iterator[str]:
    """The lines of one run."""
    run, steps = training(found), step_rows(found.steps)
    evaluations = [point for point in found.evaluations.get(target.metric, []) if not math.isnan(point[1])]
    if not steps or not evaluations:
        lacks = "steps.csv" if not steps else f"evaluation of {target.metric} in MLflow"
        raise TrackingError(
            f"the run {run.name}", found.where, f"it has no {lacks}", "give its folder, with MLflow there"
        )
    at = {int(row["step"]): row["recorded_at"] for row in steps}
    batch, per_epoch = int(run.derived["global_batch_size"]), float(run.derived["steps_per_epoch"])
    began = steps[0]["recorded_at"] - steps[0]["step_time_s"]
    splits = {name: int(about["rows"]) for name, about in run.data.items() if about.get("rows")}
    evaluated = target.metric.partition("/")[0]

    def line(time_s: float, key: str, value: Any = None, *, kind: str = "POINT_IN_TIME", **metadata: Any) -> str:
        about = {
            "namespace": NAMESPACE, "time_ms": round(1000 * time_s), "event_type": kind, "key": key, "value": value,
            "metadata": {"file": "steps.csv", "lineno": 0, **metadata},
        }  # fmt: skip
        return f"{TOKEN} {json.dumps(about)}"

    def interval(time_s: float, key: str, **metadata: Any) -> str:
        return line(time_s, key, kind=f"INTERVAL_{'START' if key.endswith('start') else 'END'}", **metadata)

    started = began - float(run.time_to_first_step_s or 0.0)
    facts = {
        "submission_benchmark": benchmark, "submission_org": NAMESPACE, "submission_division": "open",
        "submission_status": "research", "submission_platform": f"{run.workers} x {run.strategy}",
        "cache_clear": False,  # a key that must be there; nobody clears any here
    }  # fmt: skip
    yield from (line(started, key, value) for key, value in facts.items())
    yield interval(started, "init_start")
    settings = {
        "seed": int(run.config["seed"]), "global_batch_size": batch,
        "gradient_accumulation_steps": int(run.derived.get("accumulation_steps") or 1),
        "opt_name": run.config["optimizer"]["name"], "opt_base_learning_rate": run.derived.get("learning_rate"),
        "train_samples": splits.get("train", 0), "eval_samples": splits.get(evaluated, 0),
    }  # fmt: skip
    yield from (line(began, key, value) for key, value in settings.items())
    yield interval(began, "init_stop")
    yield interval(began, "run_start")
    before, reached, now = 0, False, began
    for step, value in evaluations:
        first = {"epoch_num": round(before / per_epoch, 6), "samples_count": before * batch}
        where: dict[str, Any] = {"epoch_num": round(step / per_epoch, 6), "samples_count": step * batch}
        yield interval(now, "block_start", first_epoch_num=first["epoch_num"], samples_count=first["samples_count"])
        now = at.get(step, now)
        yield interval(now, "block_stop", first_epoch_num=first["epoch_num"], samples_count=where["samples_count"])
        yield interval(now, "eval_start", **where)
        yield line(now, "eval_accuracy", value, metric=target.metric, **where)
        yield interval(now, "eval_stop", **where)
        before = step
        if reached := target.is_reached({target.metric: value}):
            break
    yield interval(now, "run_stop", status="success" if reached else "aborted")


def _points(evidence: Evidence, target: Target, benchmark: str) -> dict[str, Any]:
    """The baselines as a file for `--custom_rcps` of MLPerf's checker."""
    run = training(evidence.baselines[0])
    batch, per_epoch = int(run.derived["global_batch_size"]), float(run.derived["steps_per_epoch"])
    learned: list[Learning] = [learning(found, target, None) for found in evidence.baselines]
    samples = [one.samples_to_target for one in learned if one.samples_to_target is not None]
    if len(samples) < len(learned):
        allowed = f"every one must reach {target} to be a reference"
        raise UsageError("runs of the baseline", f"{len(learned) - len(samples)} without the target", allowed)
    return {
        f"{benchmark}_ref_{batch}": {
            "Benchmark": benchmark,
            "BS": batch,
            "Hyperparams": {"opt_base_learning_rate": run.derived.get("learning_rate")},
            "Epochs to converge": [one / batch / per_epoch for one in samples],
            "samples to converge": samples,
        }
    }
