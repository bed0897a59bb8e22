"""All experiments of a team in MLflow: runs, studies with their points, sweeps with their trials, and plans.

Read in pages of a thousand runs, together with their tags, params, last metric values and datasets. No artifacts are
fetched."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from scaleray.common import metric_names as names
from scaleray.errors import ConfigError, TrackingError
from scaleray.recording.find_record import PARENT_TAG, reading_mlflow
from scaleray.recording.seal import problem_of
from scaleray.recording.store import check_reachable, open_client, resolve_uri, sqlite_path, without_password
from scaleray.records import experiment as fields
from scaleray.records.experiment import KINDS, Experiment

PAGE = 1000
UNITS = {"h": "hours", "d": "days", "w": "weeks"}
KIND_TAG = "scaleray.kind"
OF_PARENT = ("model", "owner", "purpose", "hardware", "rule", "data_hash", "code", "environment", "invalid")
"""Fields that a point or trial shares with its study or sweep."""
METRICS = {
    "samples_per_s": (names.POINT_SAMPLES_PER_S, names.TRIAL_SAMPLES_PER_S),
    "step_time_s": (names.POINT_STEP_TIME_S,),
    "efficiency": (names.POINT_EFFICIENCY,),
    "speedup": (names.POINT_SPEEDUP,),
    "mfu": (names.POINT_MFU,),
    "worker_hours": (names.WORKER_HOURS,),
    "cost": (names.COST,),
}
PARAMS = {
    "strategy": ("point.strategy", "derived.strategy", "strategy.name"),
    "global_batch": ("point.global_batch_size", "trial.batch_size", "batch.global_size"),
    "rule": ("trial.rule", "optimizer.rule"),
    "mode": ("point.mode",),
}
TAGS = {
    "status": None, "owner": fields.OWNER, "purpose": fields.PURPOSE, "hardware": fields.HARDWARE,
    "topology": fields.TOPOLOGY, "code": "mlflow.source.git.commit", "environment": "scaleray.environment_hash",
    "invalid": fields.INVALID, "exceptions": fields.EXCEPTIONS, "strategy": "scaleray.strategy",
}  # fmt: skip


def read_experiments(
    uri: str | None = None,
    *,
    model: str | None = None,
    gpus: int | None = None,
    since: str | None = None,
    kinds: Sequence[str] = (),
) -> list[Experiment]:
    """Experiments, newest first.

    model: a part of the workload's name. gpus: number of workers. since: a date such as 2026-11-01, or an age such as
    7d or 12h. kinds: run, profile, study, point, sweep, trial or plan; if empty, all but trials. Raises TrackingError
    for a store that is unreachable or empty, and ConfigError."""
    if gpus is not None and gpus < 1:
        raise ConfigError("--gpus", gpus, "it must be a number of workers, at least 1")
    since_ms = None if since is None else moment_ms(since)
    store = resolve_uri(uri)
    empty = TrackingError.problem(
        "The registry",
        f"at {without_password(store)} has no runs of scaleray",
        "scaleray train -c FILE creates one; choose another database with --uri",
    )
    if store.startswith("sqlite:///") and not sqlite_path(store).exists():
        raise empty  # looking must not make a database
    check_reachable(store)
    with reading_mlflow("of the registry", store):
        client = open_client(store)
        ids = [one.experiment_id for one in client.search_experiments()]
        query = f"attributes.start_time >= {since_ms}" if since_ms is not None else ""
        found = list(_runs(client, ids, query))
        if not found and (since_ms is None or not list(_runs(client, ids, "", most=1))):
            raise empty
        parents = {run.info.run_id: run for run in found}
        for run in found:  # of a study that began before `since`
            parent = run.data.tags.get(PARENT_TAG)
            if parent and parent not in parents:
                parents[parent] = client.get_run(parent)
    rows = {run_id: _experiment(run) for run_id, run in parents.items()}
    made = [
        one
        for one in (_of_parent(rows[run.info.run_id], rows) for run in found)
        if (one.kind in kinds if kinds else one.kind != "trial")
        and (model is None or model.lower() in str(one.values.get("model", "")).lower())
        and (gpus is None or one.values.get("gpus") == gpus)
    ]
    return sorted(made, key=lambda one: str(one.values.get("started")), reverse=True)


def moment_ms(text: str) -> int:
    """Milliseconds since 1970 of a date, a date with a time (UTC), or an age. Raises ConfigError."""
    ago = re.fullmatch(r"(\d{1,4})\s*([hdw])", text.strip())
    try:
        if ago is not None:
            moment = datetime.now(UTC) - timedelta(**{UNITS[ago[2]]: int(ago[1])})
        else:
            moment = datetime.fromisoformat(text.strip())
            moment = moment.replace(tzinfo=moment.tzinfo or UTC)
    except (ValueError, OverflowError):
        allowed = "it must be a date such as 2026-11-01, or an age such as 12h, 7d or 2w"
        raise ConfigError("--since", text, allowed) from None
    return math.floor(moment.timestamp() * 1000)


def _runs(client: Any, ids: Sequence[str], query: str, most: int = PAGE) -> Iterator[Any]:
    """Runs of scaleray's kinds that have not been deleted."""
    token = None
    while ids:
        page = client.search_runs(ids, query, max_results=PAGE, page_token=token)
        yield from (run for run in page if run.data.tags.get(KIND_TAG) in KINDS)
        token = page.token
        if not token or most < PAGE:
            return


def _experiment(run: Any) -> Experiment:
    data, info = run.data, run.info
    tags: Mapping[str, str] = data.tags
    kind = KINDS.get(tags.get(KIND_TAG, ""), tags.get(KIND_TAG, ""))
    values: dict[str, Any] = {
        "name": info.run_name,
        "kind": "profile" if tags.get(fields.PROFILED) else kind,
        "status": info.status,
        "started": datetime.fromtimestamp(info.start_time / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        "model": _model(tags.get("scaleray.workload") or data.params.get("workload.name")),
        "gpus": _workers(data),
        "data_hash": _data_hash(run),
        **{name: tags.get(tag) for name, tag in TAGS.items() if tag},
    }
    values |= {name: found for name, params in PARAMS.items() if (found := _first(data.params, params)) is not None}
    values |= {
        name: data.metrics.get(next((one.name for one in metrics if one.name in data.metrics), ""))
        for name, metrics in METRICS.items()
    }
    if kind == "study":
        values["efficiency"] = _first(
            data.metrics, [names.scaling_curve(mode, "efficiency") for mode in ("strong", "weak")]
        )
    if "global_batch" in values:
        values["global_batch"] = _whole(values["global_batch"])
    return Experiment(
        run_id=info.run_id,
        parent_id=tags.get(PARENT_TAG),
        values={name: value for name, value in values.items() if value not in (None, "")},
        problem=problem_of(tags, data.params, data.metrics),
    )


def _of_parent(row: Experiment, rows: Mapping[str, Experiment]) -> Experiment:
    """A point or trial with the fields of its study or sweep that apply to it."""
    parent = rows.get(row.parent_id or "")
    if parent is not None:
        for name in OF_PARENT:
            if name in parent.values and row.values.get(name) is None:
                row.values[name] = parent.values[name]
    return row


def _model(workload: str | None) -> str | None:
    """Short form of a workload's name: `digits.Digits` for `jobs/digits.py:Digits`."""
    if not workload:
        return None
    place, colon, name = workload.rpartition(":")
    stem = place.rpartition("/")[2].removesuffix(".py") if colon else ""
    return f"{stem}.{name}" if stem else name


def _workers(data: Any) -> int | None:
    text = _first(data.params, ["point.workers", "trial.workers", "topology.workers"])
    found = _whole(text)
    if isinstance(found, int):
        return found
    size = data.metrics.get(names.WORLD_SIZE.name) or data.metrics.get(names.SCALING_IDEAL.name)
    return int(size) if size else None


def _data_hash(run: Any) -> str | None:
    inputs = getattr(run, "inputs", None)
    for one in getattr(inputs, "dataset_inputs", None) or ():
        if one.dataset.name == "train":
            return None if one.dataset.digest == "unhashed" else str(one.dataset.digest)
    return None


def _first(values: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((values[key] for key in keys if key in values), None)


def _whole(text: Any) -> Any:
    return int(text) if str(text).isdecimal() else text
