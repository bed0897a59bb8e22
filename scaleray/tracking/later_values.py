"""Values that are measured of a run after it has ended, added to it in MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleray.errors import TrackingError, first_line
from scaleray.tracking.operations import LogArtifact, LogMetrics
from scaleray.tracking.store import RunStore, check_reachable, open_client, resolve_uri, without_password


def add_to_run(
    about: Mapping[str, Any], metrics: Mapping[str, float], *, step: int, files: Sequence[Path], folder: str
) -> None:
    """Write metrics at a step, and files into a folder of the artifacts. about: what run.json says of the run.

    Raises TrackingError; the run's status stays as it is.
    """
    run_id, experiment_id, uri = (about.get(key) for key in ("run_id", "experiment_id", "tracking_uri"))
    if not run_id:
        raise TrackingError("the run in MLflow", None, "its run.json names none", "add --no-record")
    uri = resolve_uri(uri)
    check_reachable(uri)
    now = int(1000 * time.time())
    try:
        # a promoted model names its run alone
        store = RunStore(uri, run_id, experiment_id or open_client(uri).get_run(run_id).info.experiment_id)
        store.send(LogMetrics([(name, value, now, step) for name, value in metrics.items()]))
        for file in files:
            store.send(LogArtifact(str(file), folder))
    except Exception as exc:  # mlflow, its HTTP client and its database drivers share no base class
        raise TrackingError(
            "MLflow at", without_password(uri), f"it does not take the metrics: {first_line(exc)}", "or add --no-record"
        ) from exc
