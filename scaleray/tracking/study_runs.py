"""The MLflow run of a study or a sweep, with a child for each point or trial. Used by the driver alone.

Writing goes on in a thread, so that a sweep never waits for MLflow; what the server does not take waits in memory. The
record on disk holds everything that is written here: `send_record` brings it to MLflow later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from scaleray.errors import TrackingError
from scaleray.records import RunRecord
from scaleray.study_headlines import study_headline, sweep_headline
from scaleray.study_records import Point, StudyRecord, SweepRecord, Trial
from scaleray.study_tables import escaped, study_tables, sweep_table
from scaleray.sweep_settings import BROKEN
from scaleray.tracking import saved_views
from scaleray.tracking.found_run import record_of
from scaleray.tracking.points import in_ms
from scaleray.tracking.store import LONGEST_PARAM, RunStore, check_reachable, resolve_uri, run_link, without_password
from scaleray.tracking.study_values import (
    Value,
    end_of,
    point_duration_s,
    point_name,
    point_params,
    point_values,
    record_values,
    relative_values,
    safe_name,
    trial_duration_s,
    trial_name,
    trial_params,
    trial_values,
)
from scaleray.tracking.study_views import KEY_TAG, view_of

Kind = Literal["scaling-study", "sweep"]
CHILD_KIND = {"scaling-study": "scaling-point", "sweep": "trial"}
CHILD_TAG = "scaleray.child"
"""On a child: which point or trial of its parent it is."""
RETRY_FIRST_S, RETRY_MOST_S = 2.0, 30.0
LONGEST_WAIT_S = 300.0
"""For the thread to write what it has, at the end."""
LONGEST_TAG, LONGEST_NOTE = 5000, 8000
REFUSALS = (
    "INVALID_PARAMETER_VALUE",
    "BAD_REQUEST",
    "RESOURCE_DOES_NOT_EXIST",
    "RESOURCE_ALREADY_EXISTS",
    "PERMISSION_DENIED",
)
Record = TypeVar("Record", StudyRecord, SweepRecord)


class ParentRun:
    """Open it, log points or trials as they are done, then `identify` and `finish` the record."""

    def __init__(self, store: RunStore, kind: Kind, name: str) -> None:
        self.kind, self.name = kind, name
        self._store = store
        self._children: dict[str, str] = {}
        self._begun: dict[str, str | None] = {}
        self._known: dict[str, int] = {}
        self._waiting: deque[Callable[[], None]] = deque()
        self._problem = "no answer in time"
        self._num_refused = 0
        self._has_work = threading.Condition()
        self._is_closed = self._is_last_try = False
        self._thread = threading.Thread(target=self._write_all, name="scaleray-study-run", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls, tracking_uri: str | None, experiment: str, *, kind: Kind, name: str, config: Mapping[str, Any],
        tags: Mapping[str, str] | None = None, continue_run_id: str | None = None, started_at: float | None = None,
    ) -> ParentRun:  # fmt: skip
        """A new run, or the one of an interrupted study, whose points and trials are then not written again.

        tracking_uri: None is scaleray's own database. config: nested; it becomes params with dotted names.
        Raises TrackingError when MLflow cannot be used; later nothing does.
        """
        uri = resolve_uri(tracking_uri)
        check_reachable(uri)
        own = {"scaleray.kind": kind, "mlflow.source.name": "scaleray", **(tags or {})}
        if continue_run_id:
            store = RunStore.reopen(uri, continue_run_id, "")
            store.experiment_id = store.client.get_run(continue_run_id).info.experiment_id
        else:
            # one that was killed before it could write down the run's id is continued under the same name and beginning
            key = hashlib.sha256(f"{name} {started_at}".encode()).hexdigest()[:16] if started_at is not None else None
            store = RunStore.create(uri, experiment=experiment, run_name=name, tags=own, started_at=started_at, key=key)
        run = cls(store, kind, name)
        if not store.is_new:
            run._later(run._learn_children)
        if not continue_run_id:
            params = {safe_name(key): value for key, value in _leaves(config) if value is not None}
            run._later(lambda: store.send({"op": "params", "values": params}))
            run._later(lambda: store.send({"op": "tags", "values": {KEY_TAG: store.run_id}}))
            run._later(lambda: run._save_view(None))
        return run

    @property
    def run_id(self) -> str:
        """Of the parent."""
        return self._store.run_id

    @property
    def experiment_id(self) -> str:
        """Of the experiment in MLflow."""
        return self._store.experiment_id

    @property
    def tracking_uri(self) -> str:
        """Where it is, without a password."""
        return without_password(self._store.uri)

    @property
    def link(self) -> str:
        """Where a browser shows the charts of this study or sweep, while it goes on too."""
        return saved_views.link(self._store.uri, self.experiment_id, self._view_key)

    @property
    def run_page(self) -> str:
        """Where a browser shows the run with its description and files."""
        return run_link(self._store.uri, self.experiment_id, self.run_id)

    def log_point(self, point: Point) -> None:
        """Write a measured point as a child. Returns at once. A point that is there already is left as it is."""
        key = point_name(point)
        self._later(
            lambda: self._write_child(
                key, key, point_params(point), point_values(point), ended_at=point.measured_at,
                duration_s=point_duration_s(point), tags={"scaleray.marks": ", ".join(point.marks)},
            )
        )  # fmt: skip

    def log_trial(self, trial: Trial) -> None:
        """Write a trial that has ended as a child. Returns at once. A trial that is there already is left as it is."""
        ended = time.time() if trial.ended_at is None else trial.ended_at
        tags = {"scaleray.status": trial.status, "scaleray.error": trial.error}
        status = "FAILED" if trial.status in BROKEN else "FINISHED"
        self._later(
            lambda: self._write_child(
                str(trial.number), trial_name(trial), trial_params(trial), trial_values(trial, ended_at=ended),
                ended_at=ended, duration_s=trial_duration_s(trial), tags=tags, status=status,
            )
        )  # fmt: skip

    def log_progress(self, values: Mapping[str, float], *, step: int) -> None:
        """Write metrics of the parent under `progress/`, such as the number of finished trials. Returns at once."""
        now = time.time()
        made: list[Value] = [(f"progress/{safe_name(key)}", float(value), step, now) for key, value in values.items()]
        self._later(lambda: self._log_new(made))

    def identify(self, record: Record, *, timeout_s: float = LONGEST_WAIT_S) -> Record:
        """The record with where it is in MLflow, for its file: link and run ids, "" for what MLflow has not taken.

        Waits until everything logged is written, or MLflow refuses. Never raises.
        """
        self._drain(timeout_s)
        known = dict(self._children)
        found = dataclasses.replace(
            record, tracking_uri=self.tracking_uri, experiment_id=self.experiment_id, run_id=self.run_id, mlflow_link=self.link
        )  # fmt: skip
        if isinstance(found, SweepRecord):
            trials = [dataclasses.replace(t, run_id=known.get(str(t.number), t.run_id)) for t in found.trials]
            return dataclasses.replace(found, trials=trials)
        curves = []
        for curve in found.curves:
            points = [
                dataclasses.replace(
                    at, point=dataclasses.replace(at.point, run_id=known.get(point_name(at.point), at.point.run_id))
                )
                for at in curve.points
            ]
            curves.append(dataclasses.replace(curve, points=points))
        return dataclasses.replace(found, curves=curves)

    def finish(
        self, record: StudyRecord | SweepRecord | None, *, status: str = "FINISHED", files: Sequence[str | Path] = (),
        ended_at: float | None = None, timeout_s: float = LONGEST_WAIT_S,
    ) -> str | None:  # fmt: skip
        """End the run with its curves, tables, chart page and files; returns what MLflow lacks in words, None for nothing.

        record: None for a study that failed before it had one. status: `FINISHED`, `FAILED` or `KILLED`. files: local
        files, or folders that are kept as such. ended_at: wall clock in s; None is now. Never raises.
        """
        if record is not None:
            self._later(lambda: self._log_new(record_values(record)))
            if isinstance(record, StudyRecord):
                self._later(lambda: self._log_relative(record))
            self._later(lambda: self._store.send({"op": "tags", "values": _closing_tags(record)}))
            self._later(lambda: self._save_view(record))
        self._later(self._remove_half_written)
        for path in files:
            self._later(lambda path=path: self._store.send({"op": "artifact", "path": str(path)}))  # type: ignore[misc]
        end_time = in_ms(time.time() if ended_at is None else ended_at)
        self._later(lambda: self._store.send({"op": "status", "status": status, "end_time": end_time}))
        self._drain(timeout_s)
        with self._has_work:
            self._is_closed = True
            left = len(self._waiting) + self._num_refused
            self._has_work.notify_all()
        return f"{left} writes did not reach MLflow ({self._problem})" if left else None

    @property
    def _view_key(self) -> str:
        return f"scaleray-{self.run_id[:12]}"

    def _later(self, write: Callable[[], None]) -> None:
        with self._has_work:
            self._waiting.append(write)
            self._has_work.notify_all()

    def _drain(self, timeout_s: float) -> None:
        """Return when nothing waits any more, or a last try of what waits has failed."""
        deadline = time.monotonic() + timeout_s
        with self._has_work:
            self._is_last_try = True
            self._has_work.notify_all()
            while self._waiting and self._is_last_try and time.monotonic() < deadline:
                self._has_work.wait(timeout=max(0.0, deadline - time.monotonic()))
            self._is_last_try = False

    def _write_all(self) -> None:
        retry_s = RETRY_FIRST_S
        while True:
            with self._has_work:
                while not self._waiting and not self._is_closed:
                    self._has_work.wait()
                if self._is_closed:
                    return
                write = self._waiting[0]
            try:
                write()
            except Exception as exc:  # whatever MLflow raises, the study goes on
                with self._has_work:
                    self._problem = f"{type(exc).__name__}: {(str(exc).splitlines() or [''])[0]}"[:300]
                    if _is_refusal(exc):
                        self._num_refused += 1
                    else:
                        self._wait_to_retry(retry_s)
                        retry_s = min(RETRY_MOST_S, 2 * retry_s)
                        continue
            retry_s = RETRY_FIRST_S
            with self._has_work:
                self._waiting.popleft()
                self._has_work.notify_all()

    def _wait_to_retry(self, retry_s: float) -> None:
        if self._is_last_try:
            self._is_last_try = False  # whoever waits for it need not wait any longer
            self._has_work.notify_all()
        else:
            self._has_work.wait_for(lambda: self._is_last_try or self._is_closed, timeout=retry_s)

    def _write_child(
        self, key: str, name: str, params: Mapping[str, Any], values: Sequence[Value], *, ended_at: float, duration_s: float,
        tags: Mapping[str, str], status: str = "FINISHED",
    ) -> None:  # fmt: skip
        """A run, one batch and its end: three writes, whatever the number of evaluations up to 1000."""
        if key in self._children:
            return
        client, started_at = self._store.client, ended_at - duration_s
        own = {
            "mlflow.parentRunId": self.run_id, KEY_TAG: self.run_id, CHILD_TAG: key, "scaleray.kind": CHILD_KIND[self.kind],
            "mlflow.source.name": "scaleray", **{k: v[:LONGEST_TAG] for k, v in tags.items() if v},
        }  # fmt: skip
        run_id = self._begun.get(key)  # by a try that failed after it was made
        if run_id is None:
            run_id = next((run.info.run_id for run in self._find_children(key)), None) if key in self._begun else None
            self._begun[key] = run_id  # from now on there may be one, although no answer says so
            if run_id is None:
                made = client.create_run(self.experiment_id, start_time=in_ms(started_at), tags=own, run_name=name)
                run_id = self._begun[key] = str(made.info.run_id)
        _log(client, run_id, values, params)
        client.set_terminated(run_id, status, in_ms(ended_at))
        self._children[key] = run_id

    def _find_children(self, key: str | None = None) -> Iterator[Any]:
        """Those in MLflow, all or of one name."""
        query = f"tags.`mlflow.parentRunId` = '{self.run_id}'" + (f" and tags.`{CHILD_TAG}` = '{key}'" if key else "")
        token = None
        while True:
            page = self._store.client.search_runs([self.experiment_id], query, page_token=token, max_results=1000)
            yield from page
            token = page.token
            if not token:
                return

    def _learn_children(self) -> None:
        """Of a run that is continued: those that were written whole; the others are removed and made anew."""
        for run in list(self._find_children()):
            if run.info.status == "RUNNING":
                self._store.client.delete_run(run.info.run_id)
            elif key := run.data.tags.get(CHILD_TAG):
                self._children[key] = run.info.run_id
        self._known = self._store.last_steps()

    def _remove_half_written(self) -> None:
        """Children that a request made which MLflow's client had given up and repeated; nothing is in them."""
        for run in list(self._find_children()):
            if run.info.status == "RUNNING" and run.info.run_id not in self._children.values():
                self._store.client.delete_run(run.info.run_id)

    def _log_new(self, values: Sequence[Value]) -> None:
        """Values of the parent; MLflow keeps both values of a key and step that is written twice."""
        new = [value for value in values if value[2] > self._known.get(value[0], -1)]
        _log(self._store.client, self.run_id, new, {})

    def _log_relative(self, record: StudyRecord) -> None:
        """Speed-up and efficiency of the points, which are known when the curve is."""
        for at in (at for curve in record.curves for at in curve.points):
            if run_id := self._children.get(point_name(at.point)):
                _log(self._store.client, run_id, relative_values(at), {})

    def _save_view(self, record: StudyRecord | SweepRecord | None) -> None:
        with contextlib.suppress(Exception):  # MLflow's own format, which may change: the link still shows the runs
            key, value = saved_views.tag(self._view_key, view_of(self.kind, self.name, self.run_id, record))
            self._store.client.set_experiment_tag(self.experiment_id, key, value)


def send_record(path: str | Path, *, uri: str | None = None) -> str | None:
    """Bring a study's or sweep's record.json to the MLflow run that it names; what is there already is left as it is.

    uri: where to send it; None is where the study wrote, whose password, if any, the file does not hold.
    Returns what MLflow still lacks in words. Raises TrackingError when the run cannot be opened.
    """
    try:
        record = record_of(Path(path).read_bytes(), where=str(path))
    except OSError as exc:
        raise TrackingError("the record", str(path), f"it cannot be read: {exc.strerror}") from exc
    if isinstance(record, RunRecord):
        raise TrackingError("the record", str(path), "it is one of a training, whose unsent.jsonl is what can be sent")
    is_study = isinstance(record, StudyRecord)
    run = ParentRun.open(
        uri or record.tracking_uri, "", kind="scaling-study" if is_study else "sweep", name=record.name, config=record.config,
        continue_run_id=record.run_id,
    )  # fmt: skip
    if isinstance(record, StudyRecord):
        for curve in record.curves:
            for at in curve.points:
                run.log_point(at.point)
    else:
        for trial in record.trials:
            run.log_trial(trial)
    return run.finish(record, files=[path], ended_at=end_of(record))


def description(record: StudyRecord | SweepRecord) -> str:
    """The result in Markdown, for the run's page, which shows its first lines: the headline, the sentences, then the tables."""
    tables = study_tables(record, is_brief=True) if isinstance(record, StudyRecord) else [sweep_table(record)]
    headline = study_headline(record) if isinstance(record, StudyRecord) else sweep_headline(record)
    parts = [f"**{escaped(headline)}**\n"]
    if record.marks:
        parts.append(f"**{escaped(', '.join(record.marks))}**\n")
    parts += [f"- {escaped(sentence)}" for sentence in dict.fromkeys(record.words)]
    return "\n".join([*parts, "", *(table.markdown() + "\n" for table in tables), f"Repeat: `{record.command}`"])


def _closing_tags(record: StudyRecord | SweepRecord) -> dict[str, str]:
    verdicts = [c.verdict for c in record.curves if c.verdict] if isinstance(record, StudyRecord) else record.words
    return {
        "mlflow.note.content": description(record)[:LONGEST_NOTE],
        "scaleray.verdict": " ".join(verdicts)[:500],
        "scaleray.command": record.command[:LONGEST_TAG],
        "scaleray.environment_hash": record.conditions.environment_hash,
        "scaleray.config_hash": record.conditions.config_hash,
    }


def _log(client: Any, run_id: str, values: Sequence[Value], params: Mapping[str, Any]) -> None:
    """Values and params in as few calls as the server's limits of 1000 metrics and 100 params allow."""
    from mlflow.entities import Metric, Param

    metrics = [Metric(key, value, in_ms(at), step) for key, value, step, at in values]
    given = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in params.items()]
    while metrics or given:
        batch = metrics[: 1000 - len(given[:100])]
        client.log_batch(run_id, metrics=batch, params=given[:100])
        metrics, given = metrics[len(batch) :], given[100:]


def _is_refusal(exc: Exception) -> bool:
    """Whether the same write would be refused again: trying it once more would keep back all that follow."""
    return getattr(exc, "error_code", "") in REFUSALS or isinstance(exc, (FileNotFoundError, ValueError, TypeError))


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
