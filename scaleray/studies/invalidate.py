"""Mark measurements as invalid: they are retained with the reason, and no study reuses them."""

from __future__ import annotations

import contextlib
import re
from datetime import UTC, datetime
from typing import Any

from scaleray.common.own_folder import user_or_somebody
from scaleray.errors import ConfigError, TrackingError, first_line
from scaleray.recording.find_record import PARENT_TAG, reading_mlflow, runs_in_mlflow
from scaleray.recording.store import open_client, resolve_uri
from scaleray.records.experiment import INVALID
from scaleray.studies.repeat_store import InvalidRepeats, mark_invalid

LONGEST_REASON = 1000


def invalidate_experiment(run: str, reason: str, *, uri: str | None = None) -> list[str]:
    """Mark a run, study, sweep or a single point as invalid in MLflow: `scaleray tracking invalidate`.

    run: its id or name in MLflow, for a point or trial its id. It stays in MLflow with the reason, and is not used by
    `tracking curve`, by `plan --learn`, or by a later study of the same conditions, which would otherwise reuse its
    measurements. Returns lines on the changes. Raises UsageError for a run that does not exist or is already marked."""
    if not reason.strip() or len(reason) > LONGEST_REASON:
        hint = "state the cause: 'the fan was off'"
        raise ConfigError("--reason", reason, f"it must have 1 to {LONGEST_REASON} characters", hint)
    store = resolve_uri(uri)
    with reading_mlflow(run, store):
        client, found = _find(run, store)
        if known := found.data.tags.get(INVALID):
            raise TrackingError.problem("the run", f"{run} is already marked invalid: {known}")
        text = f"{reason.strip()} ({user_or_somebody()}, {datetime.now(UTC).strftime('%Y-%m-%d')})"
        client.set_tag(found.info.run_id, INVALID, text)
        parent_id = found.data.tags.get(PARENT_TAG)
        study = client.get_run(parent_id) if parent_id else found
    lines = [f"{found.info.run_name} is invalid: {text}"]
    if study.data.tags.get("scaleray.kind") == "scaling-study":
        lines += _keep_from_studies(study, found if parent_id else None, reason)
    return lines


def _find(run: str, store: str) -> tuple[Any, Any]:
    """Find the run; returns it with MLflow's client. A child is found by its id."""
    if re.fullmatch(r"[0-9a-f]{32}", run):
        with contextlib.suppress(Exception):
            client = open_client(store)
            found = client.get_run(run)
            if PARENT_TAG in found.data.tags:
                return client, found
    client, runs = runs_in_mlflow(run, store)
    if len(runs) > 1:
        ids = ", ".join(one.info.run_id for one in runs[:5])
        raise TrackingError.problem(
            "RUN", f"{run} is ambiguous: {len(runs)} runs have this name", f"use the id of one run: {ids}"
        )
    return client, runs[0]


def _keep_from_studies(study: Any, point: Any | None, reason: str) -> list[str]:
    """Mark the measurements of a study as invalid in the folder of reusable measurements."""
    path = study.data.params.get("checkpoint.storage_path")
    if path is None:
        return []
    workers = None if point is None else int(point.data.params["point.workers"])
    end = study.info.end_time or study.info.start_time
    turns = InvalidRepeats(study.info.run_name, reason, study.info.start_time / 1000, end / 1000, workers)
    try:
        mark_invalid(path, turns)
    except (OSError, ValueError) as exc:
        return [f"warning: its measurements in {path} could not be marked and may be reused: {first_line(exc)}"]
    return [f"no study will reuse its measurements: {path}"]
