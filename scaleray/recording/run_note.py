"""run.json, which contains everything needed to continue a run from its folder alone."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from scaleray.checkpoints.storage import Store
from scaleray.common.filesystems import write_whole
from scaleray.recording.store import RunStore, without_password
from scaleray.records.mlflow_operations import LogArtifact, LogDataset, LogParams, Operation, SetTags
from scaleray.records.run_description import RunDescription

CHANGE_TAG = "scaleray.changed."


class Described:
    """Writes the description of a run. put: receives operations. changes: earlier differences, one line per resume."""

    def __init__(self, description: RunDescription, put: Callable[[Operation], None]) -> None:
        self.description, self._put = description, put
        self.changes: list[str] = []

    def write(self) -> None:
        """Write the facts known before the first step. Writing them again changes nothing."""
        d = self.description
        self._put(LogParams(dict(d.params)))
        for dataset in d.datasets:
            self._put(LogDataset(**dataset))
        for name, text in d.files.items():
            Store(d.work_dir).write_record(name, text, d.tracking_uri)
            self._put(LogArtifact(str(Path(d.work_dir) / name)))

    def note_changes(self) -> None:
        """Add the changes of a resumed run to the earlier ones, and note its whole config."""
        text = "; ".join(self.description.changes)[:4000]
        if not text or text in self.changes[-1:]:  # noted by a recorder before this one
            return
        number = 1 + len(self.changes)
        self._put(SetTags({f"{CHANGE_TAG}{number:03d}": text}))
        config = Path(self.description.work_dir) / f"config-{number}.yaml"
        with contextlib.suppress(OSError):  # on a full disk the tag is enough
            write_whole(config, self.description.files.get("config.yaml", ""))
            self._put(LogArtifact(str(config)))


class RunNote:
    """Writes a run's run.json. key: identifies the run before MLflow has given it an ID; None for runs of versions that
    had no keys. is_complete: whether the file already contains MLflow's ID."""

    def __init__(self, description: RunDescription) -> None:
        self.description = description
        before = description.continues
        self.key: str | None = description.key if before is None else before.get("key")
        self.is_complete = False

    def write(self, store: RunStore | None) -> None:
        """Write the file to the local folder and to the run's own. store: the run in MLflow, once it exists. Raises
        OSError."""
        d = self.description
        about = {
            "name": d.run_name,
            "key": self.key,
            "run_id": store.run_id if store else None,
            "experiment_id": store.experiment_id if store else None,
            "tracking_uri": without_password(d.tracking_uri),
            "config": dict(d.config),
            "base_dir": d.base_dir,
            "started_at": d.started_at,
            "repeats": d.repeats,
        }
        for root in {d.work_dir, d.run_path or d.work_dir}:
            Store(root).write_record("run.json", json.dumps(about, indent=1), d.tracking_uri)
        self.is_complete = store is not None

    def try_to_write(self, store: RunStore | None) -> None:
        """Write the file, unless its location is temporarily unreachable: without the bucket there is no checkpoint
        either."""
        with contextlib.suppress(OSError):
            self.write(store)
