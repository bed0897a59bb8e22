"""A plan as an experiment of the registry: checked against the team's policy, and recorded on request."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from scaleray.cli.plan_answer import Answer
from scaleray.cli.plan_record import plan_record
from scaleray.config import RunConfig, load_config
from scaleray.config.loading import read_environment
from scaleray.config.tracking import TrackingSettings
from scaleray.errors import ConfigError
from scaleray.launch.session.experiment import known_of, plan_tags, said_of
from scaleray.records.json_record import jsonable
from scaleray.records.printed import quantity

EXPERIMENT = "scaleray plans"
"""Experiment in MLflow of plans without a config."""


def registered(
    answer: Answer, *, config: Path | None, overrides: Sequence[str], record: bool, command: str
) -> str | None:
    """Where MLflow shows the plan, if it was recorded: with `record`, and always where the team has a policy.

    Raises ConfigError for a plan that breaks the policy, TrackingError where MLflow cannot be used.
    """
    whole = load_config(config, flags=overrides) if config is not None else None
    tracking = whole.tracking if whole is not None else _tracking_of_environment()
    if tracking.policy is None and not record:
        return None
    known = _known(answer, whole, tracking)
    tags = plan_tags(tracking, known)
    return _record(answer, tracking, known, tags, config=whole, command=command)


def _tracking_of_environment() -> TrackingSettings:
    found = read_environment(os.environ)
    section = "tracking."
    values = {key.removeprefix(section): one.value for key, one in found.items() if key.startswith(section)}
    try:
        return TrackingSettings.model_validate(values)
    except ValidationError as exc:
        problem = exc.errors(include_url=False)[0]
        key = f"{section}{problem['loc'][0]}"
        raise ConfigError(f"{found[key].where} {key}", problem["input"], problem["msg"]) from exc


def _known(answer: Answer, config: RunConfig | None, tracking: TrackingSettings) -> dict[str, Any]:
    question, best = answer.advice.question, answer.advice.best
    cluster = question.cluster
    return {
        **(known_of(config) if config is not None else said_of(tracking)),
        "gpus": cluster.num_gpus,
        "model": question.model.name,
        "strategy": best.layout.strategy,
        "global_batch": question.global_batch,
        "hardware": f"{cluster.num_gpus} x {cluster.gpu.name}",
        "topology": f"{quantity(cluster.num_nodes, 'node')}, {quantity(cluster.num_gpus, 'worker')}",
        "cost": cluster.price_per_gpu_hour,
    }


def _record(
    answer: Answer,
    tracking: TrackingSettings,
    known: dict[str, Any],
    tags: dict[str, str],
    *,
    config: RunConfig | None,
    command: str,
) -> str:
    from scaleray import metric_names as names
    from scaleray.tracking.operations import EndRun, LogArtifact, LogMetrics, LogParams
    from scaleray.tracking.store import RunStore, check_reachable, resolve_uri, run_link

    uri = resolve_uri(tracking.uri)
    check_reachable(uri)
    best, now = answer.advice.best, time.time()
    own = {"scaleray.kind": "plan", "scaleray.workload": str(known["model"]), "scaleray.command": command}
    run = RunStore.create(
        uri,
        experiment=tracking.experiment if config is not None else EXPERIMENT,
        run_name=f"plan-{Path(str(known['model'])).name}-{answer.advice.question.cluster.gpu.name}x{known['gpus']}",
        tags={**own, **tags},
        started_at=now,
    )
    at_ms = int(now * 1000)
    run.send(
        LogParams({
            "batch.global_size": known["global_batch"],
            "strategy.name": known["strategy"],
            "topology.workers": known["gpus"],
            "plan.layout": best.layout.describe(),
            **({} if config is None else {"optimizer.rule": config.optimizer.rule}),
        })
    )  # fmt: skip
    values = {
        names.POINT_STEP_TIME_S: best.step_time_s.value,
        names.POINT_SAMPLES_PER_S: best.samples_per_s,
        names.POINT_MFU: best.mfu,
    }
    run.send(LogMetrics([(metric.name, float(value), at_ms, 0) for metric, value in values.items()]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        record = plan_record(answer.advice, answer.seen, rows=50, kept=answer.checkpoints, ways=answer.found.ways)
        path.write_text(json.dumps(jsonable(record), indent=2))
        run.send(LogArtifact(str(path)))
    run.send(EndRun("FINISHED", at_ms))
    return run_link(uri, run.experiment_id, run.run_id)
