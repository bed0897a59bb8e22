"""A plan as a record, and as an experiment that is checked against the team's policy and recorded on request."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from scaleray.common.printed import quantity
from scaleray.config import RunConfig
from scaleray.config.loading import read_environment
from scaleray.config.tracking_monitoring_study import TrackingSettings
from scaleray.errors import ConfigError
from scaleray.launch.session.experiment import known_of, plan_tags, said_of
from scaleray.planner.answers.advise import Advice, Choice
from scaleray.planner.answers.outlook import Outlook
from scaleray.planner.answers.to_target import Way
from scaleray.planner.cost.checkpoint_stalls import CheckpointCost
from scaleray.records.json_record import jsonable

if TYPE_CHECKING:
    from scaleray.planner.ask.plan import Answer

EXPERIMENT = "scaleray plans"
"""MLflow experiment for plans without a config."""


def plan_record(
    advice: Advice, seen: Outlook, *, rows: int, kept: CheckpointCost | None = None, ways: Sequence[Way] = ()
) -> dict[str, Any]:
    """Return the first `rows` choices, up to 200 rejected layouts, the curve, and checkpoints and ways to a target if
    requested."""
    return (
        _question(advice)
        | _choices(advice, rows)
        | _curve(seen)
        | {
            "checkpoints": None if kept is None else dataclasses.asdict(kept),
            "to_target": [_way(way) for way in ways],
            "limit": seen.limit,
            "next_doubling": {"words": seen.doubling, "gain": seen.doubling_gain},
        }
    )


def _question(advice: Advice) -> dict[str, Any]:
    return {
        "model": advice.question.model.name,
        "num_params": advice.question.model.num_params,
        "num_gpus": advice.question.cluster.num_gpus,
        "gpu": advice.question.cluster.gpu.name,
        "global_batch": advice.question.global_batch,
        "learned": list(advice.question.learned),
        "assumed": [*advice.question.cluster.notes, *advice.question.model.notes],
    }


def _choices(advice: Advice, rows: int) -> dict[str, Any]:
    return {
        "num_layouts": advice.num_layouts,
        "choices": [_choice(one) for one in advice.choices[:rows]],
        "recommended": advice.best.layout.describe(),
        "surely_fits": advice.best.fits == "fits",
        "faster_but_may_not_fit": None
        if advice.faster is None
        else _choice(advice.faster) | {"gain": advice.faster.samples_per_s / advice.best.samples_per_s - 1},
        "rejected": [
            {"words": one.layout.describe(), "reason": one.reason, "missing_gib": one.missing_gib}
            for one in advice.rejected[:200]
        ],
    }


def _choice(one: Choice) -> dict[str, Any]:
    return {
        "layout": dataclasses.asdict(one.layout),
        "words": one.layout.describe(),
        "step_time_s": dataclasses.asdict(one.step_time_s),
        "parts_s": one.step.parts(),
        "hidden_comm_s": one.step.hidden_comm_s,
        "memory_bytes": one.memory.parts(),
        "device_bytes": one.memory.device_bytes,
        "fits": one.fits,
        "samples_per_s": one.samples_per_s,
        "tokens_per_s": one.tokens_per_s,
        "mfu": one.mfu,
        "interval_class": one.kind,
        "interval_reasons": [dataclasses.asdict(reason) for reason in one.reasons],
        "is_trusted": one.is_trusted,
        "doubts": one.doubts,
        "cost_per_million_samples": one.cost_per_million_samples,
    }


def _curve(seen: Outlook) -> dict[str, Any]:
    return {
        "curve": [
            {
                "num_gpus": point.num_gpus,
                "samples_per_s": dataclasses.asdict(point.samples_per_s),
                "efficiency": point.efficiency,
                "words": point.choice.layout.describe(),
                "fits": point.choice.fits,
            }
            for point in seen.points
        ],
        "curve_base": {"words": "one GPU with enough memory", "samples_per_s": seen.alone.samples_per_s},
        "curve_remarks": seen.remarks,
    }


def _way(way: Way) -> dict[str, Any]:
    return {
        "num_gpus": way.num_gpus,
        "batch_size": way.batch_size,
        "words": way.choice.layout.describe(),
        "samples": dataclasses.asdict(way.samples),
        "steps": way.steps,
        "hours": dataclasses.asdict(way.hours),
        "gpu_hours": way.gpu_hours,
        "cost": way.cost,
        "time_ratio": way.time_ratio,
        "fits": way.choice.fits,
        "is_trusted": way.is_trusted,
        "is_on_frontier": way.is_on_frontier,
    }


def registered(answer: Answer, *, record: bool, command: str) -> str | None:
    """Return the plan's page in MLflow, if it is recorded: with `record`, and always under a team policy.

    Raises ConfigError for a plan that violates the policy, TrackingError if MLflow cannot be used.
    """
    whole = answer.advice.question.config
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
    from scaleray.common import metric_names as names
    from scaleray.recording.store import RunStore, check_reachable, resolve_uri, run_link
    from scaleray.records.mlflow_operations import EndRun, LogArtifact, LogMetrics, LogParams

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
