"""The files of a run's final weights among its artifacts in MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaleray.checkpoints.model_layout import FINAL_WEIGHTS, TRAINED_WEIGHTS
from scaleray.errors import TrackingError, first_line
from scaleray.recording.store import check_reachable, open_client, resolve_uri, sqlite_path, without_password

ARTIFACTS = {FINAL_WEIGHTS: "model", TRAINED_WEIGHTS: "trained_model"}
"""Folder of the artifacts that has the weights of this name."""


def fetch_model_files(about: Mapping[str, Any], folder: Path, name: str = FINAL_WEIGHTS) -> Path | None:
    """Download weights of a run into `folder`, and give the one below it that has them; None where MLflow has none.

    about: what run.json says of the run. name: FINAL_WEIGHTS or TRAINED_WEIGHTS. Raises TrackingError where MLflow
    cannot be asked.
    """
    run_id, uri = about.get("run_id"), about.get("tracking_uri")
    if not run_id or not uri:
        return None
    uri = resolve_uri(uri)
    if uri.startswith("sqlite:///") and not sqlite_path(uri).exists():
        return None  # looking must not make a database
    check_reachable(uri)
    try:
        client = open_client(uri)
        if not client.list_artifacts(run_id, ARTIFACTS[name]):
            return None
        client.download_artifacts(run_id, ARTIFACTS[name], str(folder))
    except Exception as exc:  # mlflow, its HTTP client and its database drivers share no base class
        shown = without_password(uri)
        raise TrackingError("MLflow at", shown, f"the weights of {run_id} cannot be read: {first_line(exc)}") from exc
    return folder / ARTIFACTS[name]
