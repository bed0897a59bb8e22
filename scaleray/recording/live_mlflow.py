"""Live state of a run, read from MLflow, for readers that have neither its folder nor its cluster."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleray.common import metric_names as names
from scaleray.live.rules.rule_evaluator import RULES
from scaleray.live.run_alerts import ALERT_TAG
from scaleray.live.state.run_state import MOST_EVENTS, Curve
from scaleray.recording.find_record import reading_mlflow, runs_in_mlflow
from scaleray.recording.store import run_link
from scaleray.records.alert_record import Alert, State
from scaleray.records.live_state import FILE, RUNNING, STARTING, LiveState
from scaleray.records.mlflow_operations import EVENT_TAG

FOLDER_TAG, KIND_TAG, STRATEGY_TAG, VERDICT_TAG = (
    f"scaleray.{name}" for name in ("run_dir", "kind", "strategy", "verdict")
)

STATES: dict[str, State] = {"firing": "firing", "resolved": "resolved"}


def find_in_mlflow(run: str, uri: str) -> tuple[str, Path | None, list[str]]:
    """ID of the run, its folder if it is on this machine, and a note about the choice. Raises TrackingError.

    Of several runs with this name, the only running one is chosen, or else the newest."""
    with reading_mlflow(run, uri):
        _, found = runs_in_mlflow(run, uri)
        running = [one for one in found if one.info.status == "RUNNING"]
        chosen = running[0] if len(running) == 1 else found[0]
        notes = []
        if len(found) > 1:
            others = ", ".join(one.info.run_id for one in found if one is not chosen)
            notes.append(f"{len(found)} runs in MLflow have this name; this is {chosen.info.run_id}, others: {others}")
        folder = Path(chosen.data.tags.get(FOLDER_TAG, ""))
        return chosen.info.run_id, folder if (folder / FILE).exists() else None, notes


def state_in_mlflow(run_id: str, uri: str, notes: Sequence[str] = ()) -> LiveState:
    """Current state of a run in MLflow. Raises TrackingError."""
    with reading_mlflow(run_id, uri):
        client, found = runs_in_mlflow(run_id, uri)
        run = found[0]
        losses = sorted(client.get_metric_history(run_id, names.LOSS.name), key=lambda point: point.step)
        return _state(run, losses, uri, notes)


def _state(run: Any, losses: Sequence[Any], uri: str, notes: Sequence[str]) -> LiveState:
    info, data = run.info, run.data
    curve = Curve()
    for point in losses:
        curve.add(point.step, point.value)
    status = info.status if info.status != "RUNNING" else RUNNING if losses else STARTING
    total = _number(data.params.get("derived.total_steps"))
    step = losses[-1].step if losses else 0
    values = data.metrics
    end_s = info.end_time / 1000 if info.end_time else None
    return LiveState(
        name=info.run_name,
        kind=data.tags.get(KIND_TAG, "train"),
        status=status,
        verdict=data.tags.get(VERDICT_TAG, ""),
        run_id=info.run_id,
        mlflow_link=run_link(uri, info.experiment_id, info.run_id),
        run_dir=data.tags.get(FOLDER_TAG, ""),
        strategy=data.tags.get(STRATEGY_TAG, ""),
        workers=int(_number(data.params.get("topology.workers")) or 0),
        started_at=info.start_time / 1000,
        seen_at=end_s or (losses[-1].timestamp / 1000 if losses else info.start_time / 1000),
        step=step,
        total_steps=int(total) if total else None,
        epoch=values.get(names.EPOCH.name),
        left_s=_left_s(losses, total) if status == RUNNING else None,
        loss=values.get(names.LOSS.name),
        learning_rate=values.get(names.LEARNING_RATE.name),
        grad_norm=values.get(names.GRAD_NORM.name),
        loss_scale=values.get(names.LOSS_SCALE.name),
        curve=curve.points,
        step_time_s=values.get(names.STEP_TIME_S.name),
        samples_per_s=values.get(names.SAMPLES_PER_S.name),
        tokens_per_s=values.get(names.TOKENS_PER_S.name),
        input_wait_share=values.get(names.INPUT_WAIT_SHARE.name),
        metrics={name: value for name, value in values.items() if name.startswith(("val/", "test/"))},
        nonfinite_steps=int(values.get(names.NONFINITE_STEPS.name, 0)),
        goodput=values.get(names.GOODPUT.name),
        events=[value for key, value in sorted(data.tags.items()) if key.startswith(EVENT_TAG)][-MOST_EVENTS:],
        alerts=_alerts(data.tags),
        notes=["from MLflow: without ranks and phases, and some seconds old", *notes],
    )


def _alerts(tags: Mapping[str, str]) -> list[Alert]:
    """The newest state of each alert from the run's tags, without its value and start time."""
    severities = {rule.name: rule.severity for rule in RULES}
    found = []
    for key, text in sorted(tags.items()):
        name, (state, _, summary) = key.removeprefix(ALERT_TAG), text.partition(": ")
        if key.startswith(ALERT_TAG) and state in STATES:
            found.append(Alert(name, severities.get(name, "warning"), STATES[state], 0.0, None, summary))
    return found


def _left_s(losses: Sequence[Any], total: float | None) -> float | None:
    if total is None or len(losses) < 2 or losses[-1].step == losses[0].step:
        return None
    pace_s = (losses[-1].timestamp - losses[0].timestamp) / 1000 / (losses[-1].step - losses[0].step)
    return max(0.0, (total - losses[-1].step) * pace_s)


def _number(text: str | None) -> float | None:
    with contextlib.suppress(TypeError, ValueError):
        return float(text)  # type: ignore[arg-type] # None is a TypeError
    return None
