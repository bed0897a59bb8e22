"""Live state of a run: gathered from its messages, and written to live.json every two seconds.

The file alone is enough for a page: `steps.csv` of a long run is too large to be read again and again.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import time as wall_clock
from typing import Any

from scaleray.filesystems import write_whole
from scaleray.records.live import FILE, RUNNING, STARTING, LiveState, RankNow, late_s
from scaleray.records.phases import Phase
from scaleray.records.profile import Goodput
from scaleray.records.run import CheckpointRecord, EvaluationRecord, EventRecord, Heartbeat, StepRecord, WorkerMessage
from scaleray.tracking.alerts_file import alerts_in
from scaleray.tracking.recording import RunIdentity
from scaleray.tracking.run_description import RunDescription

WRITE_EVERY_S = 2.0
WINDOW_S = 10.0
"""Seconds of steps that a rate is the mean of."""
MOST_POINTS = 200
"""Points of the loss curve: more than a terminal has columns."""
MOST_EVENTS = 20


class Curve:
    """Loss over the run in at most MOST_POINTS points, each the mean of some steps in a row."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float | None]] = []
        self.width, self._sum, self._count = 1, 0.0, 0

    def add(self, step: int, loss: float) -> None:
        """Add the next step."""
        self._sum += loss
        self._count += 1
        if self._count >= self.width:
            mean = self._sum / self._count
            self.points.append((step, mean if math.isfinite(mean) else None))
            self._sum, self._count = 0.0, 0
        if len(self.points) >= MOST_POINTS:
            self._halve()

    def _halve(self) -> None:
        """Put two points together, each at the step of the later one."""
        pairs = zip(self.points[::2], self.points[1::2], strict=True)
        self.points = [(b[0], None if a[1] is None or b[1] is None else (a[1] + b[1]) / 2) for a, b in pairs]
        self.width *= 2


class Window:
    """Rates of the last WINDOW_S seconds of steps."""

    def __init__(self, tokens_per_sample: int | None) -> None:
        self._tokens = tokens_per_sample
        self._steps: deque[StepRecord] = deque()
        self._step_s = self._waited_s = 0.0
        self._samples = 0
        self.best: float | None = None

    def add(self, record: StepRecord) -> None:
        """Add the next step, and leave out those of more than a window ago."""
        self._count(record, 1)
        self._steps.append(record)
        while len(self._steps) > 1 and self._step_s - self._steps[0].step_time_s >= WINDOW_S:
            self._count(self._steps.popleft(), -1)
        if self._step_s >= WINDOW_S and (rate := self.rates().get("samples_per_s")):
            self.best = max(self.best or 0.0, rate)

    def _count(self, record: StepRecord, sign: int) -> None:
        self._step_s += sign * record.step_time_s
        self._waited_s += sign * record.input_wait_s
        self._samples += sign * record.num_samples

    def rates(self) -> dict[str, Any]:
        """Means by their names in a LiveState."""
        if not self._steps or self._step_s <= 0:
            return {}
        rate = self._samples / self._step_s
        return {
            "step_time_s": self._step_s / len(self._steps),
            "samples_per_s": rate,
            "input_wait_share": max(0.0, self._waited_s) / self._step_s,
            **({"tokens_per_s": rate * self._tokens} if self._tokens else {}),
        }


class LiveRun:
    """Hears of a run's messages in the recorder's thread, and is asked in others."""

    def __init__(self, description: RunDescription) -> None:
        d = self.description = description
        self._curve, self._window = Curve(), Window(d.tokens_per_sample)
        self._last: StepRecord | None = None
        self._first: tuple[int, float] | None = None
        """Step and wall clock at which this attempt began to count."""
        self._furthest = self._nonfinite = 0
        self._metrics: dict[str, float] = {}
        self._checkpoint: CheckpointRecord | None = None
        self._events: deque[str] = deque(maxlen=MOST_EVENTS)
        self._status = self._verdict = ""
        self.identity: RunIdentity | None = None
        """The run in MLflow, once it exists."""
        self._lock = threading.Lock()
        if d.continues is not None:
            self._take_over(Path(d.work_dir) / FILE)

    def _take_over(self, path: Path) -> None:
        """Continue with the state of the interrupted run, as far as its file is there."""
        with contextlib.suppress(OSError, ValueError):
            before = LiveState.read(path)
            self._curve.points = list(before.curve)
            self._metrics = {name: value for name, value in before.metrics.items() if value is not None}
            self._curve.width = max(1, round(before.curve[-1][0] - before.curve[-2][0])) if len(before.curve) > 1 else 1
            self._furthest, self._nonfinite = int(before.curve[-1][0]) if before.curve else 0, before.nonfinite_steps

    def end(self, status: str, verdict: str = "") -> None:
        """The run has ended so."""
        with self._lock:
            self._status, self._verdict = status, verdict

    def hear(self, message: WorkerMessage) -> None:
        """Take what a page shows, and ignore everything else."""
        with self._lock:
            if isinstance(message, StepRecord):
                self._take_step(message)
            elif isinstance(message, EvaluationRecord):
                self._metrics.update(message.metrics)
            elif isinstance(message, CheckpointRecord):
                self._checkpoint = message
            elif isinstance(message, EventRecord) and message.kind != "info":
                self._events.append(message.text)

    def _take_step(self, record: StepRecord) -> None:
        is_next = self._last is not None and record.step == self._last.step + 1
        if not is_next:  # the first one, or workers were lost and others go on
            self._first = record.step, record.recorded_at
        self._last = record
        self._window.add(record)
        if record.step <= self._furthest:
            return
        self._furthest = record.step
        self._nonfinite += not record.is_finite
        self._curve.add(record.step, record.loss)

    def state(self, beats: Sequence[Heartbeat] = (), *, time: Goodput | None = None, waiting: int = 0) -> LiveState:
        """Current state. beats: the last sign of life of every rank. time: use of the run's time so far. waiting:
        points that MLflow has not taken.
        """
        d = self.description
        ranks = ranks_of(beats)
        with self._lock:
            last, checkpoint = self._last, self._checkpoint
            status = self._status or (STARTING if last is None else RUNNING)
            step = last.step if last is not None else max((rank.step for rank in ranks), default=0)
            return LiveState(
                name=d.run_name,
                status=status,
                verdict=self._verdict,
                run_id=self.identity.run_id if self.identity is not None else "",
                mlflow_link=self.identity.link if self.identity is not None else "",
                run_dir=d.run_path or d.work_dir,
                strategy=d.strategy,
                workers=last.world_size if last is not None else len(ranks),
                started_at=d.started_at,
                seen_at=wall_clock(),
                step=step,
                total_steps=d.total_steps,
                epoch=last.epoch if last is not None else None,
                left_s=self._left_s(),
                loss=last.loss if last is not None else None,
                learning_rate=last.learning_rate if last is not None else None,
                grad_norm=last.grad_norm if last is not None else None,
                loss_scale=last.loss_scale if last is not None else None,
                curve=list(self._curve.points),
                best_samples_per_s=self._window.best,
                expected_samples_per_s=d.published.expected_samples_per_s,
                metrics=dict(self._metrics),
                nonfinite_steps=self._nonfinite,
                attempts=time.attempts if time is not None else 1,
                repeated_steps=time.repeated_steps if time is not None else 0,
                goodput=time.shares().get("productive") if time is not None else None,
                checkpoint_step=checkpoint.step if checkpoint is not None else None,
                checkpoint_at=checkpoint.recorded_at if checkpoint is not None else None,
                phases=mean_phases(beats),
                ranks=ranks,
                alerts=alerts_in(Path(d.work_dir)),
                events=list(self._events),
                waiting_points=waiting,
                **self._window.rates(),
            )

    def _left_s(self) -> float | None:
        total, last = self.description.total_steps, self._last
        if total is None or last is None or self._first is None or last.step <= self._first[0] or self._status:
            return None
        pace_s = (last.recorded_at - self._first[1]) / (last.step - self._first[0])  # evaluations and all
        return max(0.0, (total - last.step) * pace_s)


class LiveFile:
    """Writes a run's state into its local folder, in a thread of its own: MLflow may hold up the recorder's."""

    def __init__(self, folder: Path, state: Callable[[], LiveState]) -> None:
        self._path, self._state = folder / FILE, state
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._write_now_and_then, name="scaleray-live", daemon=True)

        self._before: bytes | None = None

    def start(self) -> None:
        """Write it now, and from now on."""
        with contextlib.suppress(OSError):
            self._before = self._path.read_bytes()
        self.write()
        self._thread.start()

    def put_back(self) -> None:
        """Restore the file as it was before `start`: the run did not continue."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._before is not None:
            with contextlib.suppress(OSError):
                self._path.write_bytes(self._before)

    def end(self) -> None:
        """Write it a last time."""
        self._stop.set()
        self.write()

    def write(self) -> None:
        """Put the newest state in the place of the last one; a disk that is full has no place for it."""
        with self._lock, contextlib.suppress(OSError):
            write_whole(self._path, json.dumps(self._state().to_dict()))

    def _write_now_and_then(self) -> None:
        while not self._stop.wait(WRITE_EVERY_S):
            self.write()


def ranks_of(beats: Sequence[Heartbeat]) -> list[RankNow]:
    """Activity of each rank, and its lateness at collectives."""
    waits = {beat.rank: beat.recent.phases.get(Phase.COMMUNICATION, 0.0) for beat in beats if beat.recent is not None}
    late = dict(zip(waits, late_s(list(waits.values())), strict=True)) if len(waits) > 1 and any(waits.values()) else {}
    return [
        RankNow(
            rank=beat.rank,
            node=beat.node,
            step=beat.step,
            phase=beat.phase,
            since_s=beat.since_s,
            silent_s=beat.silent_s,
            step_time_s=beat.recent.step_s if beat.recent is not None else None,
            late_s=late.get(beat.rank),
            memory=dict(beat.recent.memory) if beat.recent is not None else {},
        )
        for beat in beats
    ]


def mean_phases(beats: Sequence[Heartbeat]) -> dict[str, float]:
    """Seconds of each part of a step, the mean of the ranks."""
    known = [beat.recent.phases for beat in beats if beat.recent is not None]
    names = dict.fromkeys(name for phases in known for name in phases)
    return {name: sum(phases.get(name, 0.0) for phases in known) / len(known) for name in names}
