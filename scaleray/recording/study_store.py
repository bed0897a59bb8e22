"""Writes to the MLflow run of a study or sweep, which has a child for each point or trial."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scaleray.recording.seal import MEASURED, seals
from scaleray.recording.store import LONGEST_PARAM, RunStore
from scaleray.records.accepted_names import acceptable_name, acceptable_text
from scaleray.records.chart_points import Point
from scaleray.records.mlflow_operations import (
    LearnChildren,
    LogChild,
    LogMetrics,
    LogToChildren,
    RemoveHalfWritten,
    SaveView,
    StudyOperation,
)

CHILD_TAG = "scaleray.child"
"""Tag of a child that identifies its point or trial of the parent."""


class ChangedPoint(ValueError):
    """A point was measured with other numbers; overwriting it would make MLflow show the later ones."""


class StudyStore(RunStore):
    """The parent's run. children: ID of each child's run by key, once it has been written."""

    def __init__(self, uri: str, run_id: str, experiment_id: str) -> None:
        super().__init__(uri, run_id, experiment_id)
        self.children: dict[str, str] = {}
        self._begun: dict[str, str | None] = {}
        self._known: dict[str, int] = {}
        self._seals: dict[str, str] = {}

    def send(self, operation: StudyOperation) -> None:
        """Write one operation. Existing data is left unchanged."""
        if isinstance(operation, LogChild):
            if operation.key not in self.children:
                self._write_child(operation)
            elif self._seals.get(operation.key) not in (None, _seals_of(operation)[MEASURED]):
                raise ChangedPoint(f"{operation.name} was measured with other numbers, which are kept")
        elif isinstance(operation, LogToChildren):
            for key, points in operation.points.items():
                if run_id := self.children.get(key):
                    self._log(run_id, points, {}, seals(points, {}))
        elif isinstance(operation, LearnChildren):
            self._learn_children()
        elif isinstance(operation, RemoveHalfWritten):
            for run in list(self._find_children()):
                if run.info.status == "RUNNING" and run.info.run_id not in self.children.values():
                    self.client.delete_run(run.info.run_id)
        elif isinstance(operation, SaveView):
            with contextlib.suppress(Exception):  # MLflow's own format, which may change: the link still shows the runs
                self.client.set_experiment_tag(self.experiment_id, operation.key, operation.value)
        else:  # MLflow keeps both values of a metric and step that is written twice
            super().send(operation.after(self._known) if isinstance(operation, LogMetrics) else operation)

    def _write_child(self, child: LogChild) -> None:
        """Write a child as a run, one batch and its end, which takes three writes for up to 1000 evaluations."""
        key = child.key
        run_id = self._begun.get(key)  # made by a try that failed afterwards
        if run_id is None:
            run_id = next((run.info.run_id for run in self._find_children(key)), None) if key in self._begun else None
            self._begun[key] = run_id  # from now on there may be one, although no answer says so
            if run_id is None:
                tags = {"mlflow.parentRunId": self.run_id, CHILD_TAG: key, **child.tags}
                made = self.client.create_run(
                    self.experiment_id, start_time=child.started_at, tags=tags, run_name=child.name
                )
                run_id = self._begun[key] = str(made.info.run_id)
        own = _seals_of(child)
        self._log(run_id, child.points, child.params, own)
        self.client.set_terminated(run_id, child.status, child.ended_at)
        self.children[key], self._seals[key] = run_id, own[MEASURED]

    def _learn_children(self) -> None:
        for run in list(self._find_children()):
            if run.info.status == "RUNNING":
                self.client.delete_run(run.info.run_id)
            elif key := run.data.tags.get(CHILD_TAG):
                self.children[key] = run.info.run_id
                if sealed := run.data.tags.get(MEASURED):
                    self._seals[key] = sealed
        self._known = self.last_steps()

    def _find_children(self, key: str | None = None) -> Iterator[Any]:
        """Children in MLflow: all of them, or those with one name."""
        query = f"tags.`mlflow.parentRunId` = '{self.run_id}'" + (f" and tags.`{CHILD_TAG}` = '{key}'" if key else "")
        token = None
        while True:
            page = self.client.search_runs([self.experiment_id], query, page_token=token, max_results=1000)
            yield from page
            token = page.token
            if not token:
                return

    def _log(self, run_id: str, points: Sequence[Point], params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Log points, params and tags in as few calls as the server's limits of 1000 metrics and 100 params allow."""
        from mlflow.entities import Metric, Param, RunTag

        own = [RunTag(acceptable_name(key), acceptable_text(value)) for key, value in tags.items()]
        metrics = [Metric(acceptable_name(name), value, at_ms, step) for name, value, at_ms, step in points]
        given = [Param(key, value) for key, value in _as_stored(params).items()]
        while metrics or given:
            batch = metrics[: 1000 - len(given[:100])]
            self.client.log_batch(run_id, metrics=batch, params=given[:100], tags=own)
            metrics, given, own = metrics[len(batch) :], given[100:], []


def _seals_of(child: LogChild) -> dict[str, str]:
    points = [(acceptable_name(name), value, at_ms, step) for name, value, at_ms, step in child.points]
    return seals(points, _as_stored(child.params))


def _as_stored(params: Mapping[str, Any]) -> dict[str, str]:
    return {acceptable_name(key): acceptable_text(str(value))[:LONGEST_PARAM] for key, value in params.items()}
