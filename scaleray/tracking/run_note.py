"""run.json, which has what is needed to continue a run from its folder alone."""

from __future__ import annotations

import contextlib
import json

from scaleray.checkpoints.storage import Store
from scaleray.tracking.run_description import RunDescription
from scaleray.tracking.store import RunStore, without_password


class RunNote:
    """Writes a run's run.json. key: what the run is known by before MLflow has given it an id; None for one of before
    there were keys. is_complete: whether the file has MLflow's id too."""

    def __init__(self, description: RunDescription) -> None:
        self.description = description
        before = description.continues
        self.key: str | None = description.key if before is None else before.get("key")
        self.is_complete = False

    def write(self, store: RunStore | None) -> None:
        """Write it to the local folder and the run's own. store: the run in MLflow, once it exists. Raises OSError."""
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
        }
        for root in {d.work_dir, d.run_path or d.work_dir}:
            Store(root).write_text("run.json", json.dumps(about, indent=1))
        self.is_complete = store is not None

    def try_to_write(self, store: RunStore | None) -> None:
        """Write it, unless its place is away for the moment: without a bucket there is no checkpoint either."""
        with contextlib.suppress(OSError):
            self.write(store)
