"""The MLflow run of a study or sweep, with a child for each point or trial. Used only by the driver.

A thread (`Writer`) does the writing, so a sweep never waits for MLflow; points that the server rejects wait in memory.
The record on disk contains everything that is written here, and `send_record` can send it again later."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from scaleray.errors import TrackingError
from scaleray.recording import saved_views
from scaleray.recording.find_record import record_of
from scaleray.recording.outbox import Outbox
from scaleray.recording.store import check_reachable, named_or_in_use, resolve_uri, run_link, without_password
from scaleray.recording.study_store import StudyStore
from scaleray.recording.study_values import (
    Value,
    as_points,
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
from scaleray.recording.writer import Writer
from scaleray.records.chart_points import in_ms
from scaleray.records.json_record import leaves
from scaleray.records.mlflow_operations import (
    EndRun,
    LearnChildren,
    LogArtifact,
    LogChild,
    LogDataset,
    LogMetrics,
    LogParams,
    LogToChildren,
    RemoveHalfWritten,
    SaveView,
    SetTags,
    StudyOperation,
)
from scaleray.records.run_record import RunRecord
from scaleray.records.settings import BROKEN
from scaleray.records.study_record import Point, StudyRecord
from scaleray.records.sweep_record import SweepRecord, Trial
from scaleray.records.text.headlines import study_headline, sweep_headline
from scaleray.records.text.study_sweep_tables import escaped, study_tables, sweep_table

LONGEST_TAG, LONGEST_NOTE = 5000, 8000
"""Longest tag that MLflow accepts, and longest description that it shows, in characters."""


def description(record: StudyRecord | SweepRecord) -> str:
    """The result in Markdown for the run's page, which shows the first lines: the headline, the sentences, then the
    tables."""
    tables = study_tables(record, is_brief=True) if isinstance(record, StudyRecord) else [sweep_table(record)]
    headline = study_headline(record) if isinstance(record, StudyRecord) else sweep_headline(record)
    parts = [f"**{escaped(headline)}**\n"]
    if record.marks:
        parts.append(f"**{escaped(', '.join(record.marks))}**\n")
    parts += [f"- {escaped(sentence)}" for sentence in dict.fromkeys(record.words)]
    return "\n".join([*parts, "", *(table.markdown() + "\n" for table in tables), f"Repeat: `{record.command}`"])


def closing_tags(record: StudyRecord | SweepRecord) -> dict[str, str]:
    """Tags for the run of a finished study or sweep: description, verdict, and how to repeat it."""
    verdicts = [c.verdict for c in record.curves if c.verdict] if isinstance(record, StudyRecord) else record.words
    return {
        "mlflow.note.content": description(record)[:LONGEST_NOTE],
        "scaleray.verdict": " ".join(verdicts)[:500],
        "scaleray.command": record.command[:LONGEST_TAG],
        "scaleray.environment_hash": record.conditions.environment_hash,
        "scaleray.config_hash": record.conditions.config_hash,
    }


Kind = Literal["scaling-study", "sweep"]
CHILD_KIND = {"scaling-study": "scaling-point", "sweep": "trial"}
LONGEST_WAIT_S = 300.0
"""Maximum seconds for the thread to finish writing at the end."""
Record = TypeVar("Record", StudyRecord, SweepRecord)


def key_of(name: str, started_at: float) -> str:
    """Key of a run in MLflow. A run killed before it could store its ID is continued under the same name and start."""
    return hashlib.sha256(f"{name} {started_at}".encode()).hexdigest()[:16]


class ParentRun:
    """The MLflow run of a study or sweep: open it, log points or trials as they finish, then `identify` and `finish`
    the record."""

    def __init__(self, store: StudyStore, kind: Kind, name: str) -> None:
        self.kind, self.name = kind, name
        self._store = store
        self._outbox = Outbox[StudyOperation](store, leaves_out_refused=True)
        self._num_asked = 0
        self._writer = Writer[StudyOperation](self._outbox, self._outbox.send, self._flush, name="scaleray-study-run")
        self._writer.start()

    @classmethod
    def open(
        cls,
        tracking_uri: str | None,
        experiment: str,
        *,
        kind: Kind,
        name: str,
        config: Mapping[str, Any],
        tags: Mapping[str, str] | None = None,
        datasets: Sequence[Mapping[str, Any]] = (),
        continue_run_id: str | None = None,
        started_at: float | None = None,
    ) -> ParentRun:
        """Open a new run, or that of an interrupted study, whose points and trials are then not written again.

        tracking_uri: None for scaleray's own database. config: nested; it becomes params with dotted names. datasets:
        arguments of `LogDataset`, one for each split. Raises TrackingError if MLflow cannot be used; later calls never
        do."""
        uri = resolve_uri(tracking_uri)
        check_reachable(uri)
        own = {"scaleray.kind": kind, "mlflow.source.name": "scaleray", **(tags or {})}
        if continue_run_id:
            store = StudyStore.reopen(uri, continue_run_id, "")
            store.experiment_id = store.client.get_run(continue_run_id).info.experiment_id
        else:
            key = key_of(name, started_at) if started_at is not None else None
            store = StudyStore.create(
                uri, experiment=experiment, run_name=name, tags=own, started_at=started_at, key=key
            )
        run = cls(store, kind, name)
        if not store.is_new:
            run.log(LearnChildren())
        if not continue_run_id:
            params = {safe_name(key): value for key, value in leaves(config, of_lists=False) if value is not None}
            run.log(LogParams(params))
            for of_split in datasets:
                run.log(LogDataset(**of_split))
            run.log(SetTags({saved_views.KEY_TAG: store.run_id}))
            run._save_view(None)
        return run

    @property
    def run_id(self) -> str:
        """Id of the parent run."""
        return self._store.run_id

    @property
    def experiment_id(self) -> str:
        """Id of the experiment in MLflow."""
        return self._store.experiment_id

    @property
    def tracking_uri(self) -> str:
        """Tracking URI, without a password."""
        return without_password(self._store.uri)

    @property
    def link(self) -> str:
        """Address of the charts of this study or sweep, which are available while it runs."""
        return saved_views.link(self._store.uri, self.experiment_id, self._view_key)

    @property
    def run_page(self) -> str:
        """Address of the run's page, with its description and files."""
        return run_link(self._store.uri, self.experiment_id, self.run_id)

    @property
    def num_waiting(self) -> int:
        """Number of writes that MLflow has not accepted."""
        return self._outbox.num_kept

    def log(self, operation: StudyOperation) -> None:
        """Write an operation on the parent run or a child. Returns immediately."""
        self._num_asked += 1
        self._writer.put(operation)

    def log_point(self, point: Point) -> None:
        """Write a measured point as a child. Returns immediately. An existing point is left unchanged."""
        with self._whatever_fails():
            key = point_name(point)
            self._write_child(
                key,
                key,
                point_params(point),
                point_values(point),
                ended_at=point.measured_at,
                duration_s=point_duration_s(point),
                tags={"scaleray.marks": ", ".join(point.marks)},
            )

    def log_trial(self, trial: Trial) -> None:
        """Write a finished trial as a child. Returns immediately. An existing trial is left unchanged."""
        with self._whatever_fails():
            ended = time.time() if trial.ended_at is None else trial.ended_at
            self._write_child(
                str(trial.number),
                trial_name(trial),
                trial_params(trial),
                trial_values(trial, ended_at=ended),
                ended_at=ended,
                duration_s=trial_duration_s(trial),
                tags={"scaleray.status": trial.status, "scaleray.error": trial.error},
                status="FAILED" if trial.status in BROKEN else "FINISHED",
            )

    def identify(self, record: Record, *, timeout_s: float = LONGEST_WAIT_S) -> Record:
        """The record with its location in MLflow, for its file: link and run IDs, which are "" for parts that MLflow
        has not accepted.

        Waits until everything logged is written or MLflow refuses it. Never raises."""
        self._try_all(timeout_s)
        known = dict(self._store.children)
        found = dataclasses.replace(
            record,
            tracking_uri=self.tracking_uri,
            experiment_id=self.experiment_id,
            run_id=self.run_id,
            mlflow_link=self.link,
        )
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
        self,
        record: StudyRecord | SweepRecord | None,
        *,
        status: str = "FINISHED",
        files: Sequence[str | Path] = (),
        ended_at: float | None = None,
        timeout_s: float = LONGEST_WAIT_S,
    ) -> str | None:
        """End the run with its curves, tables, chart page and files. Returns a text about the parts that MLflow lacks,
        or None.

        record: None for a study that failed before it had one. status: `FINISHED`, `FAILED` or `KILLED`. files: local
        files, or folders, which are uploaded as folders. ended_at: wall clock in s; None is now. Never raises."""
        if record is not None:
            with self._whatever_fails():
                self._write_conclusions(record)
        self.log(RemoveHalfWritten())
        for path in files:
            self.log(LogArtifact(str(path)))
        self.log(EndRun(status, in_ms(time.time() if ended_at is None else ended_at)))
        self._try_all(timeout_s)
        self._writer.abandon()
        left = self._num_asked - self._outbox.num_sent
        return f"{left} writes did not reach MLflow ({self._outbox.failure})" if left else None

    @property
    def _view_key(self) -> str:
        return f"scaleray-{self.run_id[:12]}"

    def _write_child(
        self,
        key: str,
        name: str,
        params: Mapping[str, Any],
        values: Sequence[Value],
        *,
        ended_at: float,
        duration_s: float,
        tags: Mapping[str, str],
        status: str = "FINISHED",
    ) -> None:
        own = {
            saved_views.KEY_TAG: self.run_id,
            "scaleray.kind": CHILD_KIND[self.kind],
            "mlflow.source.name": "scaleray",
        }
        self.log(
            LogChild(
                key,
                name,
                tags={**own, **{k: v[:LONGEST_TAG] for k, v in tags.items() if v}},
                params=params,
                points=as_points(values),
                started_at=in_ms(ended_at - duration_s),
                ended_at=in_ms(ended_at),
                status=status,
            )
        )

    def _write_conclusions(self, record: StudyRecord | SweepRecord) -> None:
        self.log(LogMetrics(as_points(record_values(record))))
        if isinstance(record, StudyRecord):  # what is known when the curve is
            points = [at for curve in record.curves for at in curve.points]
            self.log(LogToChildren({point_name(at.point): as_points(relative_values(at)) for at in points}))
        self.log(SetTags(closing_tags(record)))
        self._save_view(record)

    @contextlib.contextmanager
    def _whatever_fails(self) -> Iterator[None]:
        """Context for code that only observes a study. A failure in it counts as a write that MLflow lacks."""
        try:
            yield
        except Exception as exc:
            self._num_asked += 1
            self._outbox.failure = f"{type(exc).__name__}: {exc}"

    def _save_view(self, record: StudyRecord | SweepRecord | None) -> None:
        self.log(
            SaveView(*saved_views.tag(self._view_key, saved_views.view_of(self.kind, self.name, self.run_id, record)))
        )

    def _flush(self) -> None:
        self._outbox.send_kept()

    def _try_all(self, timeout_s: float) -> None:
        """Return once nothing is waiting any more, or a last attempt to send the waiting operations has failed."""
        self._outbox.retry_now()
        self._writer.wait_until_written(timeout_s=timeout_s)


def send_record(path: str | Path, *, uri: str | None = None) -> str | None:
    """Send the record.json of a study or sweep to the MLflow run that it names. Existing parts are left unchanged.

    uri: tracking URI; None for the one in use, if the record names it. Returns a text about the parts that MLflow still
    lacks. Raises TrackingError if the run cannot be opened."""
    try:
        record = record_of(Path(path).read_bytes(), where=str(path))
    except OSError as exc:
        raise TrackingError.problem("The record", f"{path} cannot be read: {exc.strerror}") from exc
    if isinstance(record, RunRecord):
        raise TrackingError.problem(
            "The record", f"{path} belongs to a training, whose unsent.jsonl can be sent instead"
        )
    if (store := named_or_in_use(record.tracking_uri, uri)) is None:
        raise TrackingError.problem(
            "The record",
            f"{path} names an MLflow other than the one in use, so nothing is sent to it unless you name it",
            "scaleray tracking replay FILE --uri URI",
        )
    is_study = isinstance(record, StudyRecord)
    run = ParentRun.open(
        store,
        "",
        kind="scaling-study" if is_study else "sweep",
        name=record.name,
        config=record.config,
        continue_run_id=record.run_id,
    )
    if isinstance(record, StudyRecord):
        for curve in record.curves:
            for at in curve.points:
                run.log_point(at.point)
    else:
        for trial in record.trials:
            run.log_trial(trial)
    return run.finish(record, files=[path], ended_at=end_of(record))
