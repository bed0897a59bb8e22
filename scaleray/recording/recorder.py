"""The one process that writes a run: it receives messages from the workers without delaying them, and stores points
that MLflow has not received.

Under Ray it is an actor next to the driver; without Ray it is a plain object. A separate thread does the writing
(`Writer`)."""

import contextlib
import json
import math
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from scaleray.checkpoints.storage import Store
from scaleray.common import metric_names as names
from scaleray.common.parsing import load_json
from scaleray.common.watchers import Guard, Watcher
from scaleray.errors import StorageError, TrackingError, first_line
from scaleray.live.live_run import LiveFile, live_state
from scaleray.live.published_steps import PublishedSteps
from scaleray.live.rules.series_history import SeriesHistory
from scaleray.live.run_alerts import RunAlerts
from scaleray.live.signs_of_life import ShownMessages, SignsOfLife
from scaleray.live.state.run_state import RunState
from scaleray.live.steps_file import LoggedFiles, StepsFile
from scaleray.profiling.goodput import GoodputLedger
from scaleray.recording.published_metrics import PublishedMetrics
from scaleray.recording.recovery import Recovery
from scaleray.recording.run_note import CHANGE_TAG, Described, RunNote
from scaleray.recording.spool import Spool
from scaleray.recording.store import RunStore, run_link, without_password
from scaleray.recording.writer import STALLED_S, Marker, Writer
from scaleray.records.accepted_names import acceptable_name
from scaleray.records.chart_points import Point, Points, in_ms
from scaleray.records.live_state import FILE, LiveState
from scaleray.records.mlflow_operations import EndRun, LogArtifact, LogMetrics, LogParams, Operation, SetTags
from scaleray.records.profile_record import Goodput
from scaleray.records.published import CountedFlops, LinksMeasured, RankSample
from scaleray.records.read import FILE as RECORD
from scaleray.records.run_description import Recording, RunDescription, RunIdentity
from scaleray.records.run_record import (
    CheckpointRecord,
    DerivedRecord,
    EvaluationRecord,
    EventRecord,
    Heartbeat,
    LoggedFile,
    LoggedMetrics,
    RepeatedMessages,
    RunRecord,
    StepRecord,
    SystemRecord,
    WorkerMessage,
)
from scaleray.records.start import steady_time

GOODPUT = "goodput.json"
SAVE_EVERY_S = 10.0


class GoodputFile:
    """Ledger of a run's time, filled from the run's state, and its file."""

    def __init__(self, description: RunDescription) -> None:
        self._roots = list(dict.fromkeys([description.work_dir, description.run_path or description.work_dir]))
        now = steady_time() if description.started_at is None else description.started_at
        self.ledger = GoodputLedger.of(self._kept() if description.continues is not None else None, started_at=now)
        self.ledger.begin(now)
        self._saved_at = 0.0

    def save_if_due(self) -> None:
        """Write the file if it was last written at least SAVE_EVERY_S seconds ago."""
        if time.monotonic() - self._saved_at > SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write the file, unless its folder is temporarily unreachable."""
        self._saved_at = time.monotonic()
        for root in self._roots:
            with contextlib.suppress(OSError):
                Store(root).write_text(GOODPUT, json.dumps(self.ledger.state()))

    def _kept(self) -> dict | None:
        for root in reversed(self._roots):  # the run's own folder first: this one may be of another machine
            with contextlib.suppress(OSError, ValueError):
                return load_json(Store(root).read(GOODPUT))
        return None


class Recorder(SignsOfLife):
    """Owns one MLflow run. `log` only queues messages; `poll` returns messages for display."""

    def __init__(self, description: RunDescription) -> None:
        super().__init__()
        self.description = description
        self.work_dir = Path(description.work_dir)
        self.work_dir.mkdir(parents=True, exist_ok=True)
        path = self.work_dir / "steps.csv"
        self.steps = StepsFile(path, is_continued=description.continues is not None, run_path=description.run_path)
        elsewhere = description.run_path if description.run_path != description.work_dir else None
        self._published = PublishedSteps(path, Store(elsewhere)) if elsewhere else None
        self.points = Points(every_steps=description.every_steps, tokens_per_sample=description.tokens_per_sample)
        self.spool = Spool(
            self.work_dir / "unsent.jsonl", say=self._event, where=lambda: f"step {max(self.steps.last_step, 0)}"
        )
        self.recovery = Recovery(description, self.steps, self.points, self.spool, say=self._event)
        self.note = RunNote(description)
        self._goodput_file = GoodputFile(description)
        history = SeriesHistory()
        self.state = RunState(
            tokens_per_sample=description.tokens_per_sample,
            flops_per_sample=description.published.flops_per_sample,
            ledger=self._goodput_file.ledger,
            history=history if description.alerts.watch else None,
        )
        if description.continues is not None:
            with contextlib.suppress(OSError, ValueError):
                self.state.continue_from(LiveState.read(self.work_dir / FILE))
        self._identity: RunIdentity | None = None
        self._live_file = LiveFile(self.work_dir, self.live)
        self.publishing = PublishedMetrics(
            description,
            self.state,
            self.steps,
            self.spool,
            beats=self.heartbeats,
            silent=lambda: self.silent_ranks(self.state.summaries),
        )
        # a slip in one message must not end the recording of all others
        guard = Guard(self._event)
        self._look = partial(guard, Watcher.RECORDING)
        self._writer = Writer[WorkerMessage | Operation](
            self.spool, self._take, self._flush_guarded, name="scaleray-recorder", guard=guard
        )
        self._described = Described(description, self._writer.put)
        self._logged = LoggedFiles(self.work_dir, Store(elsewhere) if elsewhere else None, self._writer.put)
        self._shown = ShownMessages()
        self.publishing.say = lambda text: self._writer.put(EventRecord(text, kind="warning"))
        self.alerts = RunAlerts(
            description,
            series=self.publishing.series,
            history=history,
            tell=self._writer.put,
            act=self.act_on,
            measure_links=self.ask_for_links,
        )
        self._last_evaluation = -1
        self._evaluations: dict[str, dict[int, float]] = {}
        self._events: list[str] = []
        self._derived: dict[str, Any] = {}
        self._renamed: set[str] = set()
        self._previous_step = -1
        self._is_continued = self._has_new_steps = False
        self._started = threading.Event()

    def start(self) -> RunIdentity:
        """Create the MLflow run and write the facts that are known. Raises TrackingError if MLflow cannot be used.

        run.json is written first, with a key by which a resume finds the MLflow run even if this process was killed
        before it could store the ID."""
        d = self.description
        before = d.continues or {}
        if d.continues is None:
            self.note.try_to_write(None)
        self._live_file.start()
        if before.get("run_id"):
            self.spool.store = RunStore.reopen(d.tracking_uri, before["run_id"], before["experiment_id"])
            self._is_continued = True  # run.json stays as it is until training has really gone on
        else:
            self.spool.store = RunStore.create(
                d.tracking_uri,
                experiment=d.experiment,
                run_name=d.run_name,
                tags=d.tags,
                started_at=d.started_at,
                key=self.note.key,
            )
            self.note.try_to_write(self.spool.store)
        if d.continues is not None:
            known = self.recovery.ask_mlflow()
            self._described.changes, self._events = known.tags(CHANGE_TAG), known.events()
            for operation in self.recovery.send_what_mlflow_lacks(known):
                self._writer.put(operation)
        if not self._is_continued or not self.spool.store.is_described():
            self._described.write()
        self._writer.start()
        self._started.set()
        self._identity = self.identity()
        self.publishing.begin(self._identity.link)
        self.alerts.begin(self._identity.link)
        return self._identity

    def durable(self, timeout_s: float = 60.0) -> dict[str, str]:
        """Wait until everything received so far is in MLflow or on the disk, and return the run's identity.

        A checkpoint is completed only after this, since a run resumed from it must not lack earlier points. Raises
        TrackingError if it takes too long."""
        unpublished = "the record could not be copied to the run's folder"
        marker = Marker(then=partial(self._look, self._publish, unpublished))
        if not self._started.wait(timeout_s) or not self._writer.wait_until_written(marker, timeout_s=timeout_s):
            raise TrackingError.problem("The recorder", f"did not write its messages within {timeout_s:g} s")
        if marker.problem:
            raise TrackingError.problem("The steps so far", f"could not be stored: {marker.problem}")
        store = self._require_store()
        return {"run_id": store.run_id, "experiment_id": store.experiment_id}

    def wait_started(self, timeout_s: float | None = None) -> bool:
        """Return true, since `start` creates the MLflow run before it returns and there is no other process to wait
        for."""
        return self.spool.store is not None

    def identity(self) -> RunIdentity:
        """The run in MLflow. Only valid after `start`."""
        store = self._require_store()
        return RunIdentity(store.run_id, store.experiment_id, run_link(store.uri, store.experiment_id, store.run_id))

    def last_step(self, timeout_s: float = 60.0) -> int:
        """Last step of the record, once all messages received so far are in it; 0 or less if there is none."""
        self._writer.wait_until_written(timeout_s=timeout_s)
        return self.steps.last_step

    def log(self, messages: Sequence[WorkerMessage]) -> None:
        """Receive messages from a worker. Returns immediately, whatever the state of MLflow."""
        for message in messages:
            self._writer.put(message)

    def poll(self, after: int) -> tuple[int, list[WorkerMessage | Heartbeat]]:
        """Messages from number `after` on, the number of the next message, and the first worker's current activity."""
        number, messages = self._shown.after(after)
        return number, [*messages, *(replace(beat, tail=()) for beat in self.heartbeats()[:1])]

    def live(self) -> LiveState:
        """Current state of the run, for outside readers."""
        waiting = len(self.spool.points())
        return live_state(
            self.description, self.state, identity=self._identity, beats=self.heartbeats(), waiting=waiting
        )

    def mark_killed(self) -> None:
        """End the run as KILLED now, in case the driver is ended before it can do so properly."""
        self.state.end("KILLED")
        self._writer.put(EndRun("KILLED", in_ms(time.time())))

    def close(self) -> None:
        """Stop serving metrics, as the end of the actor would."""
        self.publishing.close()

    def log_files(self, paths: Sequence[str], folder: str | None = None) -> None:
        """Add local files to the run's artifacts."""
        for path in paths:
            self._writer.put(LogArtifact(str(path), folder))

    def drain(self) -> Recording:
        """Write everything received so far, and return the run's results."""
        self._writer.wait_until_written()
        return Recording(
            final_loss=self.steps.last_loss,
            metrics=dict(self.state.values),
            summaries=[summary for _, summary in sorted(self.state.summaries.items())],
            events=list(self._events),
            resumed_after=list(self.state.resumed_after.values()),
            last_step=self.steps.last_step,
            derived=dict(self._derived),
            goodput=self._look(self._goodput, None, part="goodput"),
            unsent_file=self.spool.unsent_file(),
            alerts=list(self.alerts.raised),
            evaluations={name: sorted(points.items()) for name, points in self._evaluations.items()},
        )

    def finish(
        self, status: str, *, metrics: Mapping[str, float], tags: Mapping[str, str], files: Mapping[str, str]
    ) -> str | None:
        """End the run in MLflow with `status`. Returns the file of unsent operations, or None.

        A resume that failed before its first step leaves the run and its files unchanged."""
        went_on = self._has_new_steps or not self._is_continued or status == "FINISHED"
        if not went_on:
            status, metrics, tags, files = self._require_store().status_before or status, {}, {}, {}
        now = in_ms(time.time())
        if metrics:
            step = max(self.steps.last_step, 0)
            points = [(k, v, now, step) for k, v in metrics.items() if step > self.points.known.get(k, -1)]
            self._writer.put(LogMetrics(points))
        if tags:
            self._writer.put(SetTags(dict(tags)))
        # steps.csv is complete, and the last step has a point
        self._writer.wait_until_written(Marker(then=partial(self._look, self.points.add_last_step, None)))
        if self._published:
            with contextlib.suppress(OSError):  # the parts say the same, and the whole file is uploaded once more
                self._published.join()
        problem: OSError | None = None
        written = ["steps.csv"]
        for name, text in files.items():
            try:
                Store(str(self.work_dir)).write_record(name, text, self.description.tracking_uri)
                written.append(name)
            except OSError as exc:  # the run's end is written all the same
                problem = exc
                self._event(f"{name} cannot be written to {self.work_dir}: {exc.strerror or exc}")
        self.log_files([str(self.work_dir / name) for name in written])
        self.publishing.end(status)
        self.alerts.end(went_on=went_on)
        self._writer.put(EndRun(status, now))
        self.spool.retry_now()  # a last time
        if not self._writer.wait_until_written():
            self._event(
                f"MLflow has accepted nothing for {STALLED_S / 60:.0f} minutes; points not yet written are lost"
            )
        self._writer.close()
        self.state.end(status, tags.get("scaleray.verdict", ""))
        (self._live_file.end if went_on else self._live_file.put_back)()
        if self.note.key is not None:
            with contextlib.suppress(Exception):  # whatever MLflow raises: the run itself is complete
                self._require_store().remove_twins(self.note.key)
        if problem is not None:
            raise StorageError.problem(
                "Cannot",
                f"write the run's record to {self.work_dir}: {problem.strerror or problem}; "
                f"MLflow has the run as {status}",
                "free space or repair the storage, then: scaleray train --resume "
                f"{shlex.quote(without_password(self.description.run_path or self.description.work_dir))}",
            ) from problem
        return self.spool.unsent_file()

    def _goodput(self) -> Goodput:
        """Breakdown of the whole time so far. Writes the file once there is a step."""
        if self.state.last is not None:
            self._goodput_file.save()
        with self.state.lock:
            return self._goodput_file.ledger.goodput(steady_time())

    def _keep_evaluation(self, record: EvaluationRecord) -> None:
        """Store evaluation values for the run's record, along with those from before a resume."""
        for name, value in record.metrics.items():
            if name not in self._evaluations:
                before = self._before(name) if self._is_continued else {}
                self._evaluations[name] = {step: value for step, value in before.items() if step < record.step}
            self._evaluations[name][record.step] = value

    def _before(self, name: str) -> dict[int, float]:
        """Values from before a resume, by step: those of the previous record, and those of MLflow for later steps."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            former = RunRecord.from_json(Store(self.description.run_path or self.description.work_dir).read(RECORD))
            recorded = {int(step or 0): math.nan if v is None else v for step, v in former.evaluations.get(name, [])}
            return recorded | {step: v for _, v, _, step in self._history(name) if step > former.steps}
        return {step: value for _, value, _, step in self._history(name)}

    def _history(self, name: str) -> list[Point]:
        try:
            return self._require_store().history(acceptable_name(name))
        except Exception as exc:  # mlflow, its HTTP client and its database drivers share no base class
            self._event(f"the record lacks {name} from before the resume: MLflow did not return it ({first_line(exc)})")
            return []

    def _publish(self) -> str | None:
        """Copy the files needed to resume to the run's folder, at each checkpoint. Returns the error, if any."""
        if self.steps.is_behind:
            return f"{self.steps.path} cannot be written"
        if self.spool.problem:
            return self.spool.problem
        if self._published is None:
            return None
        try:
            if not self.note.is_complete and (self._has_new_steps or not self._is_continued):
                self.note.write(self.spool.store)
            self._published.send(self.steps.version)
            self._published.send_file(self.spool.path)
        except OSError as exc:
            return str(exc)
        return None

    def _take(self, message: WorkerMessage | Operation) -> None:
        if isinstance(message, Operation):
            self._flush_guarded()  # order: points before the status that ends the run
            return self.spool.send(message)
        if isinstance(message, RepeatedMessages):
            for each in message.messages:
                if each.step > (self.steps.last_step if isinstance(each, StepRecord) else self._last_evaluation):
                    self._take(each)
            return None
        self._look(partial(self.state.take, message), None, part="state of the run")
        if self.state.last is not None:
            self._look(self._goodput_file.save_if_due, None, part="goodput")
        if isinstance(message, StepRecord):
            if message.step != self._previous_step + 1:
                self.recovery.go_on_after(message.step - 1, flush=self._flush)
            self._previous_step = message.step
            is_new = message.step > self.steps.last_step
            self._take_step(message, is_new=is_new)
            if not is_new:
                return  # a restarted worker group repeats steps that were shown already
        elif isinstance(message, EvaluationRecord | LoggedMetrics):
            self.points.add(message.metrics, message.step, at=message.recorded_at)
            if isinstance(message, EvaluationRecord):
                self._keep_evaluation(message)
            if isinstance(message, LoggedMetrics) or message.step <= self._last_evaluation:
                return  # shown already
            self._last_evaluation = message.step
        elif isinstance(message, SystemRecord):
            self.points.add(names.of_system(message.node, message.metrics), message.step, at=message.recorded_at)
        elif isinstance(message, CheckpointRecord):
            self.points.add_checkpoint(message)
        elif isinstance(message, DerivedRecord):
            if not self._derived and not self._is_continued:  # params are written once and stay
                self._writer.put(LogParams({f"derived.{k}": v for k, v in message.values.items()}))
            self._derived = dict(message.values)
            return  # a warning says it where something is to be seen
        elif isinstance(message, LoggedFile):
            return self._logged.add(message)
        elif isinstance(message, EventRecord):
            if message.kind == "resumed" and message.step is not None:
                self.recovery.go_on_after(message.step, flush=self._flush)
            if message.text in self._events:
                return
            self._events.append(message.text)
            self._writer.put(SetTags.of_event(len(self._events), message))
        if not isinstance(message, RankSample | LinksMeasured | CountedFlops):
            self._shown.add(message)

    def _take_step(self, record: StepRecord, *, is_new: bool) -> None:
        """Handle the record of a step.

        is_new: whether steps.csv lacks it. MLflow may lack steps that steps.csv has, if it was unreachable."""
        if self._is_continued and not self._has_new_steps:
            self.note.try_to_write(self.spool.store)  # where it fails, the next checkpoint tries again
            self._described.note_changes()
        self._has_new_steps = True
        if is_new:
            self.steps.add(record)
        self.points.add_step(record, num_nonfinite=self.steps.num_nonfinite)

    def _flush_guarded(self) -> str | None:
        problem: str | None = self._look(self._flush, "steps or points could not be written")
        return problem

    def _flush(self) -> None:
        try:
            self.steps.write()
        except OSError as exc:
            self._event(f"{self.steps.path.name} cannot be written ({exc.strerror}); its rows wait in memory")
        for given, name in self.points.renamed().items():
            if given not in self._renamed:
                self._renamed.add(given)
                self._event(f"MLflow rejects the metric name {given!r}: it is {name!r} there, and unchanged elsewhere")
        if points := self.points.take():
            self.spool.send(LogMetrics(points))
        else:
            self.spool.send_kept()

    def _event(self, text: str) -> None:
        self._take(EventRecord(text, kind="warning"))

    def _require_store(self) -> RunStore:
        if self.spool.store is None:
            raise TrackingError("the recorder", "not started", "call start() first")
        return self.spool.store
