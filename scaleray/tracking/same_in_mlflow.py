"""Whether a record in a folder says what MLflow was told when the run ended."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from scaleray.parsing import load_json
from scaleray.records.experiment import INVALID
from scaleray.records.json_record import jsonable, leaves
from scaleray.records.read import FILE
from scaleray.records.run import RunRecord
from scaleray.tracking.light_import import import_mlflow
from scaleray.tracking.store import check_reachable, open_client, resolve_uri, sqlite_path


def differences_from_mlflow(record: RunRecord, *, uri: str | None = None) -> list[str] | None:
    """Keys in which the record differs from MLflow's copy, or from the last values of MLflow's metrics, and that it is
    marked as invalid there; None where MLflow cannot be asked, or has no copy. uri: MLflow's, by default the record's
    own."""
    with contextlib.suppress(Exception):  # mlflow, its HTTP client and its database drivers share no base class
        uri = resolve_uri(uri or record.tracking_uri)
        if not record.run_id or (uri.startswith("sqlite:///") and not sqlite_path(uri).exists()):
            return None
        check_reachable(uri, timeout_s=2.0)
        import_mlflow()
        client = open_client(uri)
        with tempfile.TemporaryDirectory() as folder:
            kept = load_json(Path(client.download_artifacts(record.run_id, FILE, folder)).read_bytes())
        mine, theirs = (dict(leaves(jsonable(values))) for values in (record.to_dict(), kept))
        found = [key for key in sorted(mine) if key in theirs and mine[key] != theirs[key]]
        run = client.get_run(record.run_id).data
        stored, invalid = run.metrics, run.tags.get(INVALID)
        return ([f"it is invalid there: {invalid}"] if invalid else []) + found + [
            f"metrics.{name}" for name, value in sorted(record.metrics.items())
            if name in stored and value is not None and stored[name] != value
        ]  # fmt: skip
    return None
