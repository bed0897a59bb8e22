"""Warn about MLflow runs that the user's code starts in a worker: values logged there are missing from this run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scaleray.records.run_record import StepRecord
from scaleray.training.observer import Observer

if TYPE_CHECKING:
    from scaleray.training.health.reporter import Reporter


class StrayRuns(Observer):
    """Detects a run of MLflow's library that the workload has started. before: ids of runs that existed before the
    workload was loaded; these are the user's, such as that of a script that calls `scaleray.train`. None takes the
    current ones."""

    def __init__(self, reporter: Reporter, before: Sequence[str] | None = None) -> None:
        self.reporter = reporter
        self._before = run_ids() if before is None else tuple(before)
        self._is_said = False

    def after_step(self, taken: StepRecord) -> None:
        self._look()

    def close(self) -> None:
        """Check once more, and end a stray run, which would otherwise remain RUNNING when the worker ends."""
        self._look()
        if (active := _active()) is not None and active.info.run_id not in self._before:
            sys.modules["mlflow"].end_run()

    def _look(self) -> None:
        if not self._is_said and (found := stray(self._before)):
            self._is_said = True
            self.reporter.say(found, is_warning=True)


def stray(before: Sequence[str]) -> str:
    """Warning about a run of MLflow's library that is active or ended last and is not one of these; otherwise empty."""
    new = [run for run in run_ids() if run not in before]
    if not new:
        return ""
    active = _active()
    name = active.info.run_name if active is not None and active.info.run_id in new else new[0]
    return (
        f"the workload logs with mlflow's own functions into the run {name!r} at "
        f"{sys.modules['mlflow'].get_tracking_uri()} instead of this training's run; to log into this one, use "
        "run.log_metrics({...}) in a callback, or metrics()"
    )


def run_ids() -> tuple[str, ...]:
    """IDs of the active run of MLflow's library and of the last one that ended, if any."""
    active, fluent = _active(), sys.modules.get("mlflow.tracking.fluent")
    # mlflow.last_active_run() would ask the server
    last = getattr(getattr(fluent, "_last_active_run_id", None), "get", lambda: None)()
    return tuple(str(run) for run in (active and active.info.run_id, last) if run)


def _active() -> Any:
    library = sys.modules.get("mlflow")  # not imported here: without it there is no run
    find = getattr(library, "active_run", None)
    return find() if find is not None else None
