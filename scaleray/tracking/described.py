"""Params and tags logged to MLflow before the first step, and the changes made on resume."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from scaleray.tracking.operations import LogArtifact, LogDataset, LogParams, Operation, SetTags
from scaleray.tracking.run_description import RunDescription

CHANGE_TAG = "scaleray.changed."


class Described:
    """Writes a run's description. put: takes operations. changes: what differed before, a line for each time."""

    def __init__(self, description: RunDescription, put: Callable[[Operation], None]) -> None:
        self.description, self._put = description, put
        self.changes: list[str] = []

    def write(self) -> None:
        """Write what is known of the run before it has a step. Written twice, it is the same."""
        d = self.description
        self._put(LogParams(dict(d.params)))
        for dataset in d.datasets:
            self._put(LogDataset(**dataset))
        for name, text in d.files.items():
            path = Path(d.work_dir) / name
            path.write_text(text)
            self._put(LogArtifact(str(path)))

    def note_changes(self) -> None:
        """Note the changes of a resumed run, and its whole config, next to those before."""
        text = "; ".join(self.description.changes)[:4000]
        if not text or text in self.changes[-1:]:  # noted by a recorder before this one
            return
        number = 1 + len(self.changes)
        self._put(SetTags({f"{CHANGE_TAG}{number:03d}": text}))
        config = Path(self.description.work_dir) / f"config-{number}.yaml"
        with contextlib.suppress(OSError):  # on a full disk the tag is enough
            config.write_text(self.description.files.get("config.yaml", ""))
            self._put(LogArtifact(str(config)))
