"""A path whose folder is gone, from its copy in MLflow: what was decided and tried stays, what was trained is open
again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from scaleray.config.base import without_password
from scaleray.config.checkpoint import default_storage_path
from scaleray.errors import UsageError
from scaleray.launch.path.state import copy_in_mlflow, read, write
from scaleray.launch.path.tasks import JOB, POLICY, STATE, again
from scaleray.records.path import PathRecord
from scaleray.tracking.store import open_client, resolve_uri

BEFORE = "path.before.json"
"""The state as MLflow had it, with the figures of what is open again."""


def fetch_path(name: str, *, storage_path: str | None = None, uri: str | None = None) -> PathRecord:
    """Make the folder of a path anew from MLflow, which has its job, its policy and its state, but no runs' files.

    storage_path: folder to make it in, by default that for runs. Raises UsageError for a name that MLflow does not
    know, and where the path's folder is there.
    """
    store = resolve_uri(uri)
    shown = without_password(store)
    found = copy_in_mlflow(store, name)
    if found is None:
        raise UsageError("the path", name, "MLflow has none of this name", f"it looked in {shown}; --uri names another")
    folder = Path(storage_path or default_storage_path()).expanduser().absolute() / f"path-{name}"
    for place in (folder, Path(found.data.params.get("folder", folder))):
        if (place / STATE).exists():
            raise UsageError("the path's folder", str(place), "it is there", f"scaleray path next --name {place}")
    folder.mkdir(parents=True, exist_ok=True)
    client = open_client(store)
    for file in (JOB, POLICY, STATE):
        text = Path(client.download_artifacts(found.info.run_id, file)).read_text()
        (folder / file).write_text(text)
    path = read(folder)
    (folder / BEFORE).write_text((folder / STATE).read_text())
    fresh = again(replace(path, tasks=[]), path.settings)
    skipped = {task.key: task for task in path.tasks if task.status == "skipped"}
    note = f"fetched from MLflow without its runs: {BEFORE} has what they measured"
    return write(
        replace(path, tracking_uri=shown, tasks=[skipped.get(one.key, one) for one in fresh], notes=[*path.notes, note])
    )
