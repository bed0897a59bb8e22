"""Warn about MLflow runs that the user's code begins in a worker: their logs are not in this training's run."""

from __future__ import annotations

import sys
from typing import Any

from scaleray.training.health.reporter import Reporter
from scaleray.training.observer import Observer, TakenStep
from scaleray.training.setup.model_setup import Setup


class StrayRuns(Observer):
    """Looks for a run of MLflow's library that was begun after the set-up. One that was active before is the user's, as
    is a script's that calls `scaleray.train`."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self._before: str | None = None
        self._is_said = False

    def begin(self, setup: Setup) -> None:
        self._before = _run_id(_active())

    def after_step(self, taken: TakenStep) -> None:
        self._look()

    def close(self) -> None:
        """Check once more, and end a stray run: the end of a worker would leave it RUNNING."""
        if self._look():
            sys.modules["mlflow"].end_run()

    def _look(self) -> bool:
        run = _active()
        if run is None or _run_id(run) == self._before:
            return False
        if not self._is_said:
            self._is_said = True
            self.reporter.say(
                f"the workload logs with mlflow's own functions, into the run {run.info.run_name!r} at "
                f"{sys.modules['mlflow'].get_tracking_uri()}, not into this training's run; to log into this one use "
                "run.log_metrics({...}) in a callback, or metrics()",
                is_warning=True,
            )
        return True


def _active() -> Any:
    library = sys.modules.get("mlflow")  # not imported here: without it there is no run
    find = getattr(library, "active_run", None)
    return find() if find is not None else None


def _run_id(run: Any) -> str | None:
    return None if run is None else str(run.info.run_id)
