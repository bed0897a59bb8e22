"""The one process that writes a run: it takes workers' messages without making them wait, and keeps what MLflow misses.

Under Ray it is an actor beside the driver; without Ray a plain object. A thread of its own does the writing.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from scaleray import metric_names as names
from scaleray.checkpoints.storage import Store
from scaleray.errors import TrackingError
from scaleray.records import (
    CheckpointRecord,
    EvaluationRecord,
    EventRecord,
    Heartbeat,
    StepRecord,
    SystemRecord,
    WorkerMessage,
    WorkerSummary,
)
from scaleray.tracking.store import Operation, RunStore, run_link, without_password

RETRY_FIRST_S, RETRY_MOST_S = 2.0, 30.0
FLUSH_S = 1.0
EVENT_TAG = "scaleray.event."
CHANGE_TAG = "scaleray.changed."
STEP_COLUMNS = (
    "step",
    "loss",
    "count",
    "num_samples",
    "learning_rate",
    "grad_norm",
    "step_time_s",
    "input_wait_s",
    "epoch",
    "is_finite",
    "world_size",
)


@dataclass(frozen=True)
class RunDescription:
    """What is known about a run before it starts. work_dir: a local folder for its files."""

    tracking_uri: str
    experiment: str
    run_name: str
    work_dir: str
    every_steps: int
    params: Mapping[str, Any]
    tags: Mapping[str, str]
    files: Mapping[str, str]
    """Small text artifacts by name, such as config.yaml."""
    datasets: Sequence[Mapping[str, Any]] = ()
    tokens_per_sample: int | None = None
    started_at: float | None = None
    """Wall clock of the run's start; None is when `start` is called."""
    run_path: str | None = None
    """Where the run's files end up; None is `work_dir`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved config, for whoever resumes the run."""
    base_dir: str | None = None
    """Folder from which a relative workload file was found."""
    continues: Mapping[str, Any] | None = None
    """What `run.json` says of the interrupted run that this one continues."""
    changes: Sequence[str] = ()
    """What differs from the config of that run, a line each. Params of an MLflow run are written once and stay."""


@dataclass(frozen=True)
class RunIdentity:
    """Where the run is in MLflow."""

    run_id: str
    experiment_id: str
    link: str


@dataclass(frozen=True)
class Recording:
    """What the recorder knows when the run has ended."""

    final_loss: float | None
    metrics: dict[str, float]
    summaries: list[WorkerSummary]
    events: list[str]
    resumed_after: list[int]
    last_step: int
    unsent_file: str | None = None


@dataclass
class _Window:
    """Steps since the last point in MLflow."""

    steps: int = 0
    samples: int = 0
    time_s: float = 0.0
    wait_s: float = 0.0


class Recorder:
    """Owns one MLflow run. `log` only queues; `poll` gives the messages to whoever shows them."""

    def __init__(self, description: RunDescription) -> None:
        self.description = description
        self.work_dir = Path(description.work_dir)
        self.work_dir.mkdir(parents=True, exist_ok=True)
        self.unsent = self.work_dir / "unsent.jsonl"
        self._store: RunStore | None = None
        self._has_message = threading.Event()
        self._queue: queue.Queue[WorkerMessage | Operation | None] = queue.Queue()
        self._shown: list[WorkerMessage] = []
        self._shown_from = 0
        self._window = _Window()
        self._last_step = self._last_evaluation = -1
        self._final_loss: float | None = None
        self._nonfinite = 0
        self._metrics: dict[str, float] = {}
        self._summaries: dict[int, WorkerSummary] = {}
        self._events: list[str] = []
        self._resumed_after: list[int] = []
        self._points: list[tuple[str, float, int, int]] = []
        self._retry_at, self._retry_s = 0.0, RETRY_FIRST_S
        self._is_noted = False
        self._unsent: list[str] = []
        self._is_unsent_on_disk = True
        self._known: dict[str, int] = {}
        self._is_continued = self._has_new_steps = False
        self._started = threading.Event()
        self._stop_requested = False
        self._heartbeats: dict[int, tuple[float, Heartbeat]] = {}
        self._beaten_at = time.monotonic()
        self._open_steps()
        self._thread = threading.Thread(target=self._write_all, name="scaleray-recorder", daemon=True)

    def start(self, *, after_first_message_s: float = 0.0) -> RunIdentity:
        """Make the MLflow run and write what is known. Raises TrackingError when MLflow cannot be used.

        after_first_message_s: wait for a first message, at most so long. MLflow's import takes seconds of a core, which
        the workers need more while they start.
        """
        self._has_message.wait(after_first_message_s)
        d = self.description
        if d.continues is not None and d.continues.get("run_id"):
            self._continue(d.continues)  # run.json stays as it is until training has really gone on
            self._thread.start()
            self._started.set()
            return self.identity()
        self._store = RunStore.create(
            d.tracking_uri, experiment=d.experiment, run_name=d.run_name, tags=d.tags, started_at=d.started_at
        )
        with contextlib.suppress(OSError):  # a bucket that is away for the moment; without it there is no checkpoint
            self._note_identity()
        first: list[Operation] = [{"op": "params", "values": dict(d.params)}]
        first += [{"op": "dataset", **dataset} for dataset in d.datasets]
        for name, text in d.files.items():
            path = self.work_dir / name
            path.write_text(text)
            first.append({"op": "artifact", "path": str(path)})
        for operation in first:
            self._queue.put(operation)
        self._thread.start()
        self._started.set()
        return self.identity()

    def durable(self, timeout_s: float = 60.0) -> dict[str, str]:
        """Return when everything that has arrived is in MLflow or on the disk, with the run's identity.

        A checkpoint waits for this before it comes to exist: a run resumed from it must not lack the points before it.
        Raises TrackingError when it takes too long.
        """
        marker = _Marker(is_published=True)
        if not self._started.wait(timeout_s) or not self._wait_until_written(timeout_s, marker):
            raise TrackingError("the recorder", "busy", f"it did not write what it has within {timeout_s:g} s")
        if marker.problem:
            raise TrackingError("the steps so far", "not stored", marker.problem)
        store = self._require_store()
        return {"run_id": store.run_id, "experiment_id": store.experiment_id}

    def beat(self, heartbeat: Heartbeat) -> bool:
        """Take a sign of life; true when the workers should save and leave."""
        self._beaten_at = time.monotonic()
        self._heartbeats[heartbeat.rank] = self._beaten_at, heartbeat
        return self._stop_requested

    def heartbeats(self) -> list[Heartbeat]:
        """The last sign of life of every rank."""
        now, known = time.monotonic(), dict(self._heartbeats)  # others of its threads add to it
        _, newest = max(known.values(), key=lambda pair: pair[0], default=(0.0, None))
        beats = [replace(beat, silent_s=now - at) for _, (at, beat) in sorted(known.items())]
        return [beat for beat in beats if newest and beat.rank < newest.world_size]  # others are of a larger group

    def silent_s(self) -> float:
        """Seconds since the last sign of life of any worker."""
        return time.monotonic() - self._beaten_at

    def request_stop(self) -> None:
        """Ask the workers to save and leave."""
        self._stop_requested = True

    def wait_started(self, timeout_s: float | None = None) -> bool:
        """True once the MLflow run exists; `start` has returned by then, as there is no other process to wait for."""
        return self._store is not None

    def identity(self) -> RunIdentity:
        """The run in MLflow. Only after `start`."""
        store = self._require_store()
        return RunIdentity(store.run_id, store.experiment_id, run_link(store.uri, store.experiment_id, store.run_id))

    def log(self, messages: Sequence[WorkerMessage]) -> None:
        """Take messages from a worker. Returns at once, whatever MLflow does."""
        for message in messages:
            self._queue.put(message)
        self._has_message.set()

    def poll(self, after: int) -> tuple[int, list[WorkerMessage]]:
        """Messages to show, from number `after` on, and the number to ask for next."""
        shown = self._shown[max(0, after - self._shown_from) :]
        return self._shown_from + len(self._shown), shown

    def mark_killed(self) -> None:
        """End the run as KILLED now, before the driver does so in good order, which it may not live long enough for."""
        self._queue.put({"op": "status", "status": "KILLED", "end_time": _now_ms()})
        self._has_message.set()

    def close(self) -> None:
        """Nothing to free: the counterpart of an actor's end."""

    def log_files(self, paths: Sequence[str], folder: str | None = None) -> None:
        """Add local files to the run's artifacts."""
        for path in paths:
            self._queue.put({"op": "artifact", "path": str(path), "folder": folder})

    def drain(self) -> Recording:
        """Write everything that has arrived so far and say what the run came to."""
        self._wait_until_written()
        return Recording(
            final_loss=self._final_loss,
            metrics=dict(self._metrics),
            summaries=[self._summaries[rank] for rank in sorted(self._summaries)],
            events=list(self._events),
            resumed_after=list(self._resumed_after),
            last_step=self._last_step,
            unsent_file=str(self.unsent) if self.unsent.exists() else None,
        )

    def finish(
        self, status: str, *, metrics: Mapping[str, float], tags: Mapping[str, str], files: Mapping[str, str]
    ) -> str | None:
        """End the run in MLflow with `status`; returns the file of what could not be sent, or None.

        A resume that failed before its first step leaves the run and its files as they were.
        """
        if self._is_continued and not self._has_new_steps and status != "FINISHED":
            status, metrics, tags, files = self._require_store().status_before or status, {}, {}, {}
        now = _now_ms()
        if metrics:
            step = max(self._last_step, 0)
            points = [(k, v, now, step) for k, v in metrics.items() if step > self._known.get(k, -1)]
            self._queue.put({"op": "metrics", "points": points})
        if tags:
            self._queue.put({"op": "tags", "values": dict(tags)})
        self._wait_until_written()  # steps.csv is complete
        for name, text in files.items():
            (self.work_dir / name).write_text(text)
        self.log_files([str(self.work_dir / name) for name in ("steps.csv", *files)])
        self._queue.put({"op": "status", "status": status, "end_time": now})
        self._retry_at = 0.0  # a last time, whenever the next would have been
        self._wait_until_written()
        self._queue.put(None)
        self._thread.join(timeout=60)
        return str(self.unsent) if self.unsent.exists() else None

    def _wait_until_written(self, timeout_s: float = 60.0, marker: _Marker | None = None) -> bool:
        if not self._thread.is_alive():
            return False
        marker = marker or _Marker()
        self._queue.put({"op": "marker", "marker": marker})
        return marker.done.wait(timeout=timeout_s)

    def _open_steps(self) -> None:
        """A new steps.csv, or that of the interrupted run, without a last line that was cut."""
        path = self.work_dir / "steps.csv"
        run_path = self.description.run_path
        is_continued = self.description.continues is not None
        if is_continued and not path.exists() and run_path:
            with contextlib.suppress(FileNotFoundError):
                path.write_bytes(Store(run_path).read("steps.csv"))
        lines = path.read_text().splitlines(keepends=True) if is_continued and path.exists() else []
        whole = [line for line in lines if line.endswith("\n") and line.count(",") == len(STEP_COLUMNS) - 1]
        if len(whole) > 1:
            values = whole[-1].split(",")
            self._last_step, self._final_loss = int(values[0]), float(values[1])
            self._nonfinite = sum(line.split(",")[STEP_COLUMNS.index("is_finite")].strip() == "False" for line in whole)
        temporary = path.with_suffix(".part")  # a kill in between must not cost the steps so far
        temporary.write_text("".join(whole))
        temporary.replace(path)
        self._rows = io.StringIO(newline="")
        self._rows_written = path.stat().st_size
        self._steps = csv.writer(self._rows, lineterminator="\n")
        if not whole:
            self._steps.writerow(STEP_COLUMNS)

    def _continue(self, before: Mapping[str, Any]) -> None:
        """Open the interrupted run again, send what it could not, and learn which points it has."""
        self._store = RunStore.reopen(self.description.tracking_uri, before["run_id"], before["experiment_id"])
        self._known = self._store.last_steps()
        self._is_continued = True
        self._num_changes = len(self._store.tags(CHANGE_TAG))
        tags = self._store.tags(EVENT_TAG)
        self._events[:0] = [text.partition(" | ")[2] for _, text in sorted(tags.items())]
        run_path = self.description.run_path
        if not self.unsent.exists() and run_path and run_path != self.description.work_dir:
            with contextlib.suppress(OSError):
                self.unsent.write_bytes(Store(run_path).read(self.unsent.name))
        if not self.unsent.exists():
            return
        _, *lines = self.unsent.read_text().splitlines() or [""]
        for line in lines:
            with contextlib.suppress(ValueError):  # the last line of a process that was killed may be cut
                operation = json.loads(line)
                if operation["op"] == "metrics":  # sent already, but not forgotten yet
                    operation["points"] = [p for p in operation["points"] if p[3] > self._known.get(p[0], -1)]
                    self._known.update({p[0]: p[3] for p in operation["points"]})
                if operation["op"] != "status":
                    self._unsent.append(json.dumps(operation))
        self._store_unsent()

    def _note_changes(self) -> None:
        """What a run that goes on was told to do otherwise, and its whole config, beside those before."""
        if not self.description.changes:
            return
        number = 1 + self._num_changes
        text = "; ".join(self.description.changes)[:4000]
        self._queue.put({"op": "tags", "values": {f"{CHANGE_TAG}{number:03d}": text}})
        config = self.work_dir / f"config-{number}.yaml"
        with contextlib.suppress(OSError):  # on a full disk the tag is enough
            config.write_text(self.description.files.get("config.yaml", ""))
            self._queue.put({"op": "artifact", "path": str(config)})

    def _note_identity(self) -> None:
        """run.json: what is needed to continue this run from its folder alone."""
        d, store = self.description, self._require_store()
        about = {
            "name": d.run_name, "run_id": store.run_id, "experiment_id": store.experiment_id,
            "tracking_uri": without_password(store.uri), "config": dict(d.config), "base_dir": d.base_dir,
            "started_at": d.started_at,
        }  # fmt: skip
        for root in {d.work_dir, d.run_path or d.work_dir}:
            Store(root).write_text("run.json", json.dumps(about, indent=1))
        self._is_noted = True

    def _publish(self) -> str | None:
        """Bring what a resumed run needs to the run's folder, with each checkpoint; gives what went wrong."""
        d = self.description
        if self._rows.tell():
            return f"{self.work_dir / 'steps.csv'} cannot be written"
        if not self._is_unsent_on_disk:
            return f"{self.unsent} cannot be written"
        if d.run_path and d.run_path != d.work_dir:
            store = Store(d.run_path)
            try:
                if not self._is_noted and (self._has_new_steps or not self._is_continued):
                    self._note_identity()
                store.write("steps.csv", [(self.work_dir / "steps.csv").read_bytes()])
                if self.unsent.exists():
                    store.write(self.unsent.name, [self.unsent.read_bytes()])
                else:
                    store.delete(self.unsent.name)
            except OSError as exc:
                return str(exc)
        return None

    def _write_all(self) -> None:
        flushed_at = time.monotonic()
        while True:
            try:
                item = self._queue.get(timeout=FLUSH_S)
            except queue.Empty:
                item = {"op": "tick"}
            if item is None:
                self._flush()
                return
            if isinstance(item, dict):
                if item["op"] in ("tick", "marker") or time.monotonic() - flushed_at > FLUSH_S:
                    self._flush()
                    flushed_at = time.monotonic()
                if item["op"] == "marker":
                    marker = item["marker"]
                    marker.problem = self._publish() if marker.is_published else None
                    marker.done.set()
                elif item["op"] != "tick":
                    self._flush()  # order: points before the status that ends the run
                    self._send(item)
                continue
            try:
                self._take(item)
            except Exception as exc:  # one bad message must not end the recording of all others
                self._event(f"a message could not be recorded ({type(exc).__name__}: {exc}): {type(item).__name__}")
            if time.monotonic() - flushed_at > FLUSH_S:
                self._flush()
                flushed_at = time.monotonic()

    def _take(self, message: WorkerMessage) -> None:
        if isinstance(message, StepRecord):
            is_new = message.step > self._last_step
            self._take_step(message, is_new=is_new)
            if not is_new:
                return  # a restarted worker group repeats steps that were shown already
        elif isinstance(message, EvaluationRecord):
            self._add_points(message.metrics, message.step)
            self._metrics.update(message.metrics)
            if message.step <= self._last_evaluation:
                return  # shown already
            self._last_evaluation = message.step
        elif isinstance(message, SystemRecord):
            self._add_points({f"system/{message.node}/{k}": v for k, v in message.metrics.items()}, message.step)
        elif isinstance(message, CheckpointRecord):
            points = {
                names.CHECKPOINT_STALL_S.name: message.stall_s,
                names.CHECKPOINT_DURATION_S.name: message.duration_s,
                names.CHECKPOINT_WRITTEN_BYTES.name: float(message.bytes_written),
            }
            self._add_points(points, message.step)
        elif isinstance(message, WorkerSummary):
            self._summaries[message.rank] = message
        elif isinstance(message, EventRecord):
            if message.kind == "resumed" and message.step is not None:
                self._resumed_after.append(message.step)
            if message.text in self._events:
                return
            self._events.append(message.text)
            if self._started.is_set():
                number = f"{EVENT_TAG}{len(self._events):03d}"
                self._queue.put({"op": "tags", "values": {number: f"{_clock()} | {message.text}"[:4000]}})
        self._shown.append(message)
        if len(self._shown) > 20_000:  # nobody shows them: a driver's memory must not grow with the number of steps
            self._shown_from += 10_000
            del self._shown[:10_000]

    def _take_step(self, record: StepRecord, *, is_new: bool) -> None:
        """is_new: steps.csv does not have it. MLflow may lack steps that steps.csv has: it may have been away."""
        if self._is_continued and not self._has_new_steps:
            with contextlib.suppress(OSError):  # the next checkpoint tries again
                self._note_identity()
            self._note_changes()
        self._has_new_steps = True
        if is_new:
            self._last_step, self._final_loss = record.step, record.loss
            self._nonfinite += not record.is_finite
            values = asdict(record)
            self._steps.writerow([repr(values[c]) if isinstance(values[c], float) else values[c] for c in STEP_COLUMNS])
        window = self._window
        window.steps += 1
        window.samples += record.num_samples
        window.time_s += record.step_time_s
        window.wait_s += record.input_wait_s
        if record.step % self.description.every_steps and record.step != 1:
            return
        rate = window.samples / window.time_s
        points = {
            names.LOSS.name: record.loss,
            names.LEARNING_RATE.name: record.learning_rate,
            names.EPOCH.name: record.epoch,
            names.SAMPLES_PER_S.name: rate,
            names.STEP_TIME_S.name: window.time_s / window.steps,
            names.INPUT_WAIT_SHARE.name: window.wait_s / window.time_s,
            names.GRAD_NORM.name: record.grad_norm,
            names.LOSS_SCALE.name: record.loss_scale,
            names.TOKENS_PER_S.name: rate * self.description.tokens_per_sample
            if self.description.tokens_per_sample
            else None,
            names.WORKERS.name: float(record.world_size),
            names.SENT_BYTES.name: record.sent_bytes or None,
            **record.more,
            names.NONFINITE_STEPS.name: float(self._nonfinite) if self._nonfinite else None,
        }
        self._add_points({k: v for k, v in points.items() if v is not None}, record.step)
        self._window = _Window()

    def _add_points(self, values: Mapping[str, float], step: int) -> None:
        now = _now_ms()
        for name, value in values.items():
            if step > self._known.get(name, -1):  # a continued run repeats the steps after its checkpoint
                # MLflow stores infinity as the largest float, which ruins charts; NaN it keeps
                self._points.append((name, math.nan if math.isinf(value) else float(value), now, step))
                self._known[name] = step

    def _flush(self) -> None:
        self._write_rows()
        if self._points:
            points, self._points = self._points, []
            self._send({"op": "metrics", "points": points})
        elif self._unsent:
            self._send_unsent()

    def _write_rows(self) -> None:
        """Append new rows to steps.csv; on a full disk they wait until there is room again."""
        if not self._rows.tell():
            return
        try:
            with open(self.work_dir / "steps.csv", "r+b") as file:
                file.seek(self._rows_written)
                file.write(self._rows.getvalue().encode())
                file.truncate()
                self._rows_written = file.tell()
        except OSError as exc:
            self._event(f"steps.csv cannot be written ({exc.strerror}); its rows wait in memory")
            return
        self._rows.seek(0)
        self._rows.truncate()

    def _send(self, operation: Operation) -> None:
        """Send, or keep in the unsent file; while that holds anything, later operations queue behind it."""
        if self._unsent and not self._send_unsent():
            self._keep(operation)
            return
        try:
            self._require_store().send(operation)
        except Exception as exc:  # whatever MLflow raises, training goes on
            self._keep(operation)
            self._event(
                f"MLflow took no more data at step {max(self._last_step, 0)} ({type(exc).__name__}); "
                f"keeping it in {self.unsent} and trying again"
            )
            self._wait_longer()

    def _send_unsent(self) -> bool:
        if time.monotonic() < self._retry_at:
            return False
        for number, line in enumerate(self._unsent):
            try:
                self._require_store().send(json.loads(line))
            except Exception:  # still away: what was sent is forgotten, the rest stays
                if number:
                    del self._unsent[:number]
                    self._store_unsent()
                self._wait_longer()
                return False
        self._unsent.clear()
        self._store_unsent()
        self._retry_s = RETRY_FIRST_S
        self._event(f"MLflow is back at step {max(self._last_step, 0)}; everything kept has been sent")
        return True

    def _wait_longer(self) -> None:
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(RETRY_MOST_S, self._retry_s * 2)

    def _keep(self, operation: Operation) -> None:
        self._unsent.append(json.dumps(operation))
        if len(self._unsent) == 1 or not self._is_unsent_on_disk:
            self._store_unsent()
            return
        try:
            with open(self.unsent, "a") as file:
                file.write(self._unsent[-1] + "\n")
        except OSError:
            self._is_unsent_on_disk = False

    def _store_unsent(self) -> None:
        """Make the file hold what MLflow lacks; a disk that is full takes it later."""
        try:
            if self._unsent:
                self._rewrite()
            else:
                self.unsent.unlink(missing_ok=True)
            self._is_unsent_on_disk = True
        except OSError:
            self._is_unsent_on_disk = False

    def _rewrite(self) -> None:
        store = self._require_store()
        head = {
            "tracking_uri": without_password(store.uri),
            "run_id": store.run_id,
            "experiment_id": store.experiment_id,
        }
        temporary = self.unsent.with_suffix(".part")
        temporary.write_text("".join(line + "\n" for line in [json.dumps(head), *self._unsent]))
        temporary.replace(self.unsent)

    def _event(self, text: str) -> None:
        self._take(EventRecord(text, kind="warning"))

    def _require_store(self) -> RunStore:
        if self._store is None:
            raise TrackingError("the recorder", "not started", "start() comes first")
        return self._store


@dataclass
class _Marker:
    """Passes the queue: everything before it is written then, and published where that is asked for."""

    done: threading.Event = field(default_factory=threading.Event)
    is_published: bool = False
    problem: str | None = None


def _clock() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _now_ms() -> int:
    return int(time.time() * 1000)
