"""Use of a run's time, over all its attempts: kept in goodput.json next to steps.csv, where the
next attempt finds it.
"""

from __future__ import annotations

import contextlib
import json
import time

from scaleray.checkpoints.storage import Store
from scaleray.parsing import load_json
from scaleray.profiling.goodput import GoodputLedger
from scaleray.records.profile import Goodput
from scaleray.records.run import CheckpointRecord, EvaluationRecord, EventRecord, StepRecord, WorkerMessage
from scaleray.records.start import steady_time
from scaleray.tracking.run_description import RunDescription

FILE = "goodput.json"
SAVE_EVERY_S = 10.0


class RunTime:
    """Hears of a run's messages in the recorder's thread. Nothing is written before this attempt has taken a step."""

    def __init__(self, description: RunDescription) -> None:
        self._roots = list(dict.fromkeys([description.work_dir, description.run_path or description.work_dir]))
        now = steady_time() if description.started_at is None else description.started_at
        kept = self._kept() if description.continues is not None else None
        self._ledger = GoodputLedger.of(kept, started_at=now)
        self._ledger.begin(now)
        self._saved_at, self._has_steps = 0.0, False

    def hear(self, message: WorkerMessage) -> None:
        """Take what says how time went, and ignore everything else."""
        at = getattr(message, "recorded_at", 0.0)
        if isinstance(message, StepRecord):
            self._has_steps = True
            self._ledger.add_step(message.step, step_s=message.step_time_s, waited_s=message.input_wait_s, at=at)
        elif isinstance(message, EvaluationRecord):
            self._ledger.add_evaluation(message.duration_s, at=at)
        elif isinstance(message, CheckpointRecord):
            self._ledger.add_checkpoint(message.step, message.stall_s, at=at, took_s=message.duration_s)
        elif isinstance(message, EventRecord) and message.kind == "resumed" and self._has_steps:
            self._ledger.begin(at)  # workers were lost, and others go on
        if self._has_steps and time.monotonic() - self._saved_at > SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write down what is known, unless the place is away for the moment."""
        self._saved_at = time.monotonic()
        for root in self._roots:
            with contextlib.suppress(OSError):
                Store(root).write_text(FILE, json.dumps(self._ledger.state()))

    def goodput(self) -> Goodput:
        """The whole time until now."""
        if self._has_steps:
            self.save()
        return self._ledger.goodput(steady_time())

    def so_far(self) -> Goodput | None:
        """The time until now, in any thread; None before the first step."""
        return self._ledger.goodput(steady_time()) if self._has_steps else None

    def _kept(self) -> dict | None:
        for root in reversed(self._roots):  # the run's own folder first: this one may be of another machine
            with contextlib.suppress(OSError, ValueError):
                return load_json(Store(root).read(FILE))
        return None
