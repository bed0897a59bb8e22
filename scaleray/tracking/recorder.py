"""The one process that writes a run: it takes workers' messages without making them wait, and keeps what MLflow misses.

Under Ray it is an actor beside the driver; without Ray a plain object. A thread of its own does the writing.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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
from scaleray.tracking.points import Points, now_ms
from scaleray.tracking.run_description import RunDescription
from scaleray.tracking.spool import Spool
from scaleray.tracking.steps_file import StepsFile
from scaleray.tracking.store import Operation, RunStore, run_link, without_password

FLUSH_S = 1.0
EVENT_TAG = "scaleray.event."
CHANGE_TAG = "scaleray.changed."


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


class Recorder:
    """Owns one MLflow run. `log` only queues; `poll` gives the messages to whoever shows them."""

    def __init__(self, description: RunDescription) -> None:
        self.description = description
        self.work_dir = Path(description.work_dir)
        self.work_dir.mkdir(parents=True, exist_ok=True)
        path = self.work_dir / "steps.csv"
        self.steps = StepsFile(path, is_continued=description.continues is not None, run_path=description.run_path)
        self.points = Points(every_steps=description.every_steps, tokens_per_sample=description.tokens_per_sample)
        self.spool = Spool(
            self.work_dir / "unsent.jsonl", say=self._event, where=lambda: f"step {max(self.steps.last_step, 0)}"
        )
        self._has_message = threading.Event()
        self._queue: queue.Queue[WorkerMessage | Operation | None] = queue.Queue()
        self._shown: list[WorkerMessage] = []
        self._shown_from = 0
        self._last_evaluation = -1
        self._metrics: dict[str, float] = {}
        self._summaries: dict[int, WorkerSummary] = {}
        self._events: list[str] = []
        self._resumed_after: list[int] = []
        self._is_noted = False
        self._is_continued = self._has_new_steps = False
        self._started = threading.Event()
        self._stop_requested = False
        self._heartbeats: dict[int, tuple[float, Heartbeat]] = {}
        self._beaten_at = time.monotonic()
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
        self.spool.store = RunStore.create(
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
        return self.spool.store is not None

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
        self._queue.put({"op": "status", "status": "KILLED", "end_time": now_ms()})
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
            final_loss=self.steps.last_loss,
            metrics=dict(self._metrics),
            summaries=[self._summaries[rank] for rank in sorted(self._summaries)],
            events=list(self._events),
            resumed_after=list(self._resumed_after),
            last_step=self.steps.last_step,
            unsent_file=self.spool.unsent_file(),
        )

    def finish(
        self, status: str, *, metrics: Mapping[str, float], tags: Mapping[str, str], files: Mapping[str, str]
    ) -> str | None:
        """End the run in MLflow with `status`; returns the file of what could not be sent, or None.

        A resume that failed before its first step leaves the run and its files as they were.
        """
        if self._is_continued and not self._has_new_steps and status != "FINISHED":
            status, metrics, tags, files = self._require_store().status_before or status, {}, {}, {}
        now = now_ms()
        if metrics:
            step = max(self.steps.last_step, 0)
            points = [(k, v, now, step) for k, v in metrics.items() if step > self.points.known.get(k, -1)]
            self._queue.put({"op": "metrics", "points": points})
        if tags:
            self._queue.put({"op": "tags", "values": dict(tags)})
        self._wait_until_written()  # steps.csv is complete
        for name, text in files.items():
            (self.work_dir / name).write_text(text)
        self.log_files([str(self.work_dir / name) for name in ("steps.csv", *files)])
        self._queue.put({"op": "status", "status": status, "end_time": now})
        self.spool.retry_now()  # a last time
        self._wait_until_written()
        self._queue.put(None)
        self._thread.join(timeout=60)
        return self.spool.unsent_file()

    def _wait_until_written(self, timeout_s: float = 60.0, marker: _Marker | None = None) -> bool:
        if not self._thread.is_alive():
            return False
        marker = marker or _Marker()
        self._queue.put({"op": "marker", "marker": marker})
        return marker.done.wait(timeout=timeout_s)

    def _continue(self, before: Mapping[str, Any]) -> None:
        """Open the interrupted run again, send what it could not, and learn which points it has."""
        self.spool.store = store = RunStore.reopen(
            self.description.tracking_uri, before["run_id"], before["experiment_id"]
        )
        self.points.known = store.last_steps()
        self._is_continued = True
        self._num_changes = len(store.tags(CHANGE_TAG))
        tags = store.tags(EVENT_TAG)
        self._events[:0] = [text.partition(" | ")[2] for _, text in sorted(tags.items())]
        d = self.description
        self.spool.take_over(d.run_path if d.run_path != d.work_dir else None, self.points.known)

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
        if self.steps.is_behind:
            return f"{self.steps.path} cannot be written"
        if self.spool.problem:
            return self.spool.problem
        if d.run_path and d.run_path != d.work_dir:
            store = Store(d.run_path)
            try:
                if not self._is_noted and (self._has_new_steps or not self._is_continued):
                    self._note_identity()
                store.write(self.steps.path.name, [self.steps.path.read_bytes()])
                if self.spool.path.exists():
                    store.write(self.spool.path.name, [self.spool.path.read_bytes()])
                else:
                    store.delete(self.spool.path.name)
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
                    self.spool.send(item)
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
            is_new = message.step > self.steps.last_step
            self._take_step(message, is_new=is_new)
            if not is_new:
                return  # a restarted worker group repeats steps that were shown already
        elif isinstance(message, EvaluationRecord):
            self.points.add(message.metrics, message.step)
            self._metrics.update(message.metrics)
            if message.step <= self._last_evaluation:
                return  # shown already
            self._last_evaluation = message.step
        elif isinstance(message, SystemRecord):
            self.points.add({f"system/{message.node}/{k}": v for k, v in message.metrics.items()}, message.step)
        elif isinstance(message, CheckpointRecord):
            self.points.add_checkpoint(message)
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
            self.steps.add(record)
        self.points.add_step(record, num_nonfinite=self.steps.num_nonfinite)

    def _flush(self) -> None:
        try:
            self.steps.write()
        except OSError as exc:
            self._event(f"{self.steps.path.name} cannot be written ({exc.strerror}); its rows wait in memory")
        if points := self.points.take():
            self.spool.send({"op": "metrics", "points": points})
        else:
            self.spool.send_kept()

    def _event(self, text: str) -> None:
        self._take(EventRecord(text, kind="warning"))

    def _require_store(self) -> RunStore:
        if self.spool.store is None:
            raise TrackingError("the recorder", "not started", "start() comes first")
        return self.spool.store


@dataclass
class _Marker:
    """Passes the queue: everything before it is written then, and published where that is asked for."""

    done: threading.Event = field(default_factory=threading.Event)
    is_published: bool = False
    problem: str | None = None


def _clock() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
