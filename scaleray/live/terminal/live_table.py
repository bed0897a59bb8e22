"""Display of a run: one line of fixed columns per interval in a job's log, or a live table on a terminal. Before the
first step, and when a step takes long, it shows the current activity."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scaleray.common.printed import quantity
from scaleray.common.progress import Stage
from scaleray.live.state.run_state import RunState
from scaleray.records import start
from scaleray.records.phases import EVALUATING, Phase, to_text
from scaleray.records.run_record import (
    CheckpointRecord,
    EvaluationRecord,
    EventRecord,
    Heartbeat,
    ModelRecord,
    RunRecord,
    StepRecord,
    WorkerMessage,
)
from scaleray.records.terminal.progress_line import QUIET_S, StageDisplay, duration

LEFT_S = 10.0
"""Lines show the remaining time if more than this many seconds are left."""


class Terminal:
    """Shows messages of one run. Used as a context, whose exit ends the live table.

    interval_s: seconds between two lines."""

    def __init__(self, console: Console, *, interval_s: float) -> None:
        self.console, self.interval_s = console, interval_s
        self.total_steps = 0
        self.stages = StageDisplay(console, above=lambda: self._shown)
        self._shown: Table | None = None
        self._last: StepRecord | None = None
        """Step shown in the table."""
        self._steps: Stage | None = None
        self._status: Stage | None = None
        self._evaluation_s: float | None = None
        self._printed_at = time.monotonic() - interval_s
        self._has_model = False
        self._state = RunState()
        self._new: list[StepRecord] = []
        """Steps since the last line."""
        self._lock = threading.Lock()  # heartbeats of a run in this process come from a thread of their own

    def __enter__(self) -> Terminal:
        self.stages.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stages.__exit__(kind, error, trace)

    def say(self, text: str) -> None:
        """Print one plain line."""
        self.stages.say(text)

    def expect_steps(self, total_steps: int) -> None:
        """Set the number of steps of the whole training."""
        self.total_steps = total_steps

    def show(self, messages: Sequence[WorkerMessage | Heartbeat]) -> None:
        """Show messages that arrived together; steps are shown when the interval is over."""
        with self._lock:
            for message in messages:
                self._take(message)
            if not self._new:
                return
            is_edge = self._new[0].step == 1 or self._new[-1].step == self.total_steps
            if is_edge or time.monotonic() - self._printed_at >= self.interval_s:
                self._print_steps()

    def _take(self, message: WorkerMessage | Heartbeat) -> None:
        if isinstance(message, Heartbeat):
            return self._take_heartbeat(message)
        self._state.take(message)
        if isinstance(message, StepRecord):
            self._new.append(message)
            self._take_progress(message)
        elif isinstance(message, EvaluationRecord):
            self._evaluation_s = message.duration_s
            self._set_status(None)
            if self._last is not None:
                self._shown = self._table(self._last)
            if not self.console.is_terminal:
                values = " | ".join(f"{k} {v:.4g}" for k, v in sorted(message.metrics.items()))
                self.say(f"{_progress(message.step, self.total_steps)} | {values}")
        elif isinstance(message, CheckpointRecord):
            written, total = message.bytes_written / 2**20, message.total_bytes / 2**20
            self.say(
                f"{_progress(message.step, self.total_steps)} | checkpoint | "
                f"{written:.1f} of {total:.1f} MiB written in {message.duration_s:.1f} s, "
                f"training waited {message.stall_s * 1000:.0f} ms"
            )
        elif isinstance(message, EventRecord):
            self.say(f"{message.kind}: {message.text}")
        elif isinstance(message, ModelRecord) and not self._has_model:  # once, although a restart builds it again
            self._has_model = True
            self.say(f"  model: {message.num_parameters:,} parameters on {message.device}")

    def _take_heartbeat(self, beat: Heartbeat) -> None:
        """Show long activities: everything before the first step, evaluations, and steps that take seconds."""
        name, status = to_text(beat.phase, beat.step), self._status
        if status is not None and name == status.name:
            return
        if status is not None and status.name == EVALUATING and beat.phase == Phase.INPUT:
            return  # an evaluation waits for its rows, too
        if beat.step > 0 and beat.phase != Phase.EVALUATION and beat.since_s < QUIET_S:
            return self._set_status(None)
        new = Stage(name)
        new.started_at -= beat.since_s
        if name == EVALUATING and self._evaluation_s is not None:  # it takes as long as the one before
            new.note = f"the previous one took {duration(self._evaluation_s)}"
        self._set_status(new)

    def _set_status(self, status: Stage | None) -> None:
        before, self._status = self._status, status
        if before is not None:
            self.stages.end(before)
        if status is not None:
            self.stages.begin(status)

    def _take_progress(self, record: StepRecord) -> None:
        """Count a step for the progress bar and the remaining time."""
        if self._status is not None and self._status.name != EVALUATING:
            self._set_status(None)
        if self._steps is None:
            self._steps = Stage("training", total=self.total_steps, unit="steps", before=record.step)
            if self.console.is_terminal:
                self.stages.begin(self._steps)
        self._steps.done = record.step
        if record.step == self.total_steps and self.console.is_terminal:
            self.stages.forget(self._steps)

    def _print_steps(self) -> None:
        new, self._new = self._new, []
        self._printed_at = time.monotonic()
        if self.console.is_terminal:
            self._last = new[-1]
            self._shown = self._table(self._last)
        else:
            left_s = self._steps.left_s if self._steps is not None else None
            left = f" | about {duration(left_s)} left" if left_s is not None and left_s >= LEFT_S else ""
            finite = "" if all(step.is_finite for step in new) else " | not finite, skipped"
            self.say(f"{self._line(new[-1])}{finite}{left}")

    def _line(self, last: StepRecord) -> str:
        """One line in fixed columns for the steps since the last line."""
        seconds, rate, wait = self._speed()
        norm = f" | grad {last.grad_norm:8.3g}" if last.grad_norm is not None else ""
        return (
            f"{_progress(last.step, self.total_steps)} | loss {last.loss:8.4f} | lr {last.learning_rate:.2e} | "
            f"{1000 * seconds:7.1f} ms | {_short(rate):>6} samples/s | input {wait:5.1%}{norm}"
        )

    def _table(self, last: StepRecord) -> Table:
        seconds, rate, wait = self._speed()
        table = Table(title=f"step {last.step}/{self.total_steps or '?'}", min_width=48)
        table.add_column("quantity")
        table.add_column("value", justify="right")
        rows: dict[str, Any] = {
            "loss": f"{last.loss:.4f}",
            "learning rate": f"{last.learning_rate:.3g}",
            "epoch": f"{last.epoch:.2f}",
            "step time": f"{1000 * seconds:.1f} ms",
            "throughput": f"{_short(rate)} samples/s",
            "input wait": f"{wait:.1%}",
            **{name: f"{value:.4g}" for name, value in sorted(self._state.evaluated.items())},
        }
        for name, value in rows.items():
            table.add_row(Text(name), value)
        return table

    def _speed(self) -> tuple[float, float, float]:
        """Mean step time in seconds, samples per second, and share of time waiting for input."""
        rates = self._state.window.rates()
        return rates.get("step_time_s", 0.0), rates.get("samples_per_s", 0.0), rates.get("input_wait_share", 0.0)


def final_lines(record: RunRecord) -> list[str]:
    """Verdict, address in MLflow, and path of the record."""
    metrics = "".join(f" | {name} {value:.4g}" for name, value in sorted(record.metrics.items()))
    speed = f" | {_short(record.samples_per_s)} samples/s" if record.samples_per_s else ""
    lines = [f"{record.verdict}: {quantity(record.steps, 'step')}, {record.total_time_s:.0f} s in all{speed}{metrics}"]
    if not record.tracking_uri.startswith("http"):
        uri = shlex.quote(record.tracking_uri)
        lines.append(f"MLflow:  scaleray tracking ui --uri {uri}   then open {record.mlflow_link}")
    else:
        lines.append(f"MLflow:  {record.mlflow_link}")
    lines.append(f"record:  {record.run_dir}/record.json")
    if sum(record.start.values()) > start.LONG_S:
        lines.insert(1, start.to_text(record.start))
    return lines


def _progress(step: int, total_steps: int) -> str:
    width = len(str(total_steps or step))
    return f"step {step:>{width}}/{total_steps or '?'}"


def _short(value: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"
