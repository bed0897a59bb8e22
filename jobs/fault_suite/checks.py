"""What must hold after every disturbed run, compared with the undisturbed one."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fault_suite.run import BATCH, Entry, Run
from scaleray import replay
from scaleray.checkpoints.storage import Store
from scaleray.data import StepPlan
from scaleray.records.run_record import RunRecord
from scaleray.training.state.final_weight_files import read_weights

EXACT_METRICS = ("train/loss", "train/grad_norm", "train/learning_rate", "train/epoch", "val/loss")
"""Others are times, which no two runs share."""


@dataclass(frozen=True)
class Outcome:
    """A finished run, as far as it must not depend on faults. points: of every metric in MLflow, by name: (step, value)."""

    status: str
    weights: dict[str, torch.Tensor]
    losses: list[tuple[int, str]]
    points: dict[str, list[tuple[int, float]]]
    final: dict[str, float]


def outcome(run: Run, record: RunRecord) -> Outcome:
    """Read what a run left behind: its weights, steps.csv, and everything MLflow has."""
    folder = _local(run, record)
    with open(folder / "steps.csv", newline="") as file:
        losses = [(int(row["step"]), row["loss"]) for row in csv.DictReader(file)]
    if (unsent := folder / "unsent.jsonl").exists():  # MLflow was away until the end, as the run has said
        replay(unsent, uri=run.tracking_uri)
    points = _points(run.tracking_uri, record.run_id)
    return Outcome(_status(run.tracking_uri, record.run_id), read_weights(folder), losses, points, record.metrics)


def same_weights(undisturbed: Outcome, disturbed: Outcome) -> list[str]:
    """Names of tensors whose bits differ."""
    if undisturbed.weights.keys() != disturbed.weights.keys():
        return ["other tensors"]
    return [n for n, value in undisturbed.weights.items() if not torch.equal(value, disturbed.weights[n])]


def same_records(undisturbed: Outcome, disturbed: Outcome) -> list[str]:
    """What is wrong with steps.csv and MLflow: steps that are missing or doubled, values that differ."""
    problems = []
    if disturbed.status != "FINISHED":
        problems.append(f"MLflow says {disturbed.status}")
    if disturbed.losses != undisturbed.losses:
        problems.append(f"steps.csv: {_difference(undisturbed.losses, disturbed.losses)}")
    for name, points in disturbed.points.items():
        steps = [step for step, _ in points]
        if len(steps) != len(set(steps)):
            doubled = sorted({step for step in steps if steps.count(step) > 1})
            problems.append(f"{name} has several points at {doubled[:5]}")
    for name, points in undisturbed.points.items():
        if name.startswith(("system/", "checkpoint/")) or len(points) <= 1:
            continue
        have = disturbed.points.get(name, [])
        if [step for step, _ in have] != [step for step, _ in points]:
            problems.append(f"{name}: {_difference([(s, 0) for s, _ in points], [(s, 0) for s, _ in have])}")
        elif name in EXACT_METRICS and have != points:
            problems.append(f"{name}: {_difference(points, have)}")
    if disturbed.final != undisturbed.final:
        problems.append(f"the last evaluation is {disturbed.final} instead of {undisturbed.final}")
    return problems


def used_samples(entries: list[Entry], *, steps: int, rows: int = 310, seed: int = 0) -> list[str]:
    """What is wrong with the samples: the last attempt of every step counts, and must be what the plan says."""
    plan = StepPlan(num_samples=rows, global_batch_size=BATCH, seed=seed)
    last: dict[int, dict[int, Entry]] = defaultdict(dict)
    for entry in entries:  # in the order of time
        last[entry.step][entry.rank] = entry
    problems = []
    per_epoch: dict[int, list[int]] = defaultdict(list)
    for step in range(1, steps + 1):
        newest = max(last[step].values(), key=lambda entry: entry.time, default=None)
        if newest is None:
            problems.append(f"nobody trained step {step}")
            continue
        ids: list[int] = []
        for rank in range(newest.size):
            part = last[step].get(rank)
            ids += part.ids if part is not None and part.size == newest.size else []
        if ids != plan.global_indices(step - 1).tolist():
            problems.append(f"step {step} used {len(ids)} samples, not those of the plan")
        per_epoch[(step - 1) // plan.steps_per_epoch] += ids
    for epoch in range(steps // plan.steps_per_epoch):
        counts = np.bincount(per_epoch[epoch], minlength=rows)
        if not (counts == 1).all():
            problems.append(f"epoch {epoch}: {int((counts != 1).sum())} samples were not used exactly once")
    extra = [step for step in last if step > steps]
    return problems + [f"step {step} should not be" for step in extra]


def _difference(expected: list[tuple[int, Any]], found: list[tuple[int, Any]]) -> str:
    steps, wanted = [step for step, _ in found], [step for step, _ in expected]
    missing, extra = sorted(set(wanted) - set(steps)), sorted(set(steps) - set(wanted))
    if missing or extra or len(steps) != len(wanted):
        return f"{len(steps)} instead of {len(wanted)} points, missing {missing[:5]}, extra {extra[:5]}"
    first = next((pair for pair in zip(expected, found, strict=True) if pair[0] != pair[1]), None)
    return f"{first[1]} instead of {first[0]}" if first else "the same"


def _local(run: Run, record: RunRecord) -> Path:
    if "://" not in record.run_dir:
        return Path(record.run_dir)
    folder = run.folder / "fetched"
    folder.mkdir(exist_ok=True)
    for name in ("steps.csv", "weights.pt"):
        (folder / name).write_bytes(Store(record.run_dir).read(name))
    return folder


def _points(uri: str, run_id: str) -> dict[str, list[tuple[int, float]]]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    found = {}
    for name in client.get_run(run_id).data.metrics:
        history = client.get_metric_history(run_id, name)
        found[name] = sorted((metric.step, metric.value) for metric in history)
    return found


def _status(uri: str, run_id: str) -> str:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_run(run_id).info.experiment_id
    if len(client.search_runs([experiment])) != 1:
        return "several runs"
    return str(client.get_run(run_id).info.status)
