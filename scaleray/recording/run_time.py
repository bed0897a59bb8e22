"""Use of a run's time, over all its attempts: stored in goodput.json next to steps.csv for the next attempt."""

from __future__ import annotations

import contextlib
import json
import time

from scaleray.checkpoints.storage import Store
from scaleray.common.parsing import load_json
from scaleray.profiling.goodput import GoodputLedger
from scaleray.records.run_description import RunDescription
from scaleray.records.start import steady_time

FILE = "goodput.json"
SAVE_EVERY_S = 10.0


class GoodputFile:
    """The ledger of a run's time, which the run's state fills, and its file."""

    def __init__(self, description: RunDescription) -> None:
        self._roots = list(dict.fromkeys([description.work_dir, description.run_path or description.work_dir]))
        now = steady_time() if description.started_at is None else description.started_at
        self.ledger = GoodputLedger.of(self._kept() if description.continues is not None else None, started_at=now)
        self.ledger.begin(now)
        self._saved_at = 0.0

    def save_if_due(self) -> None:
        """Write the file if it was last written at least SAVE_EVERY_S ago."""
        if time.monotonic() - self._saved_at > SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write the file, unless its folder is temporarily unreachable."""
        self._saved_at = time.monotonic()
        for root in self._roots:
            with contextlib.suppress(OSError):
                Store(root).write_text(FILE, json.dumps(self.ledger.state()))

    def _kept(self) -> dict | None:
        for root in reversed(self._roots):  # the run's own folder first: this one may be of another machine
            with contextlib.suppress(OSError, ValueError):
                return load_json(Store(root).read(FILE))
        return None
