"""State of a run, built from its messages. `live.json`, the metrics page, alerts, goodput, the terminal and notebooks
all read this state, so that they always agree.
"""

import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from scaleray.live.rules.series_history import SeriesHistory
from scaleray.live.state.rank_series import ComparedRanks
from scaleray.profiling.goodput import GoodputLedger
from scaleray.records.judged_metric import judged_metric
from scaleray.records.live_state import RUNNING, STARTING, LiveState, RankNow
from scaleray.records.profile_record import Goodput
from scaleray.records.published import CountedFlops, LinksMeasured, RankSample
from scaleray.records.run_record import (
    CheckpointRecord,
    EvaluationRecord,
    EventRecord,
    LoggedMetrics,
    StepRecord,
    SystemRecord,
    WorkerMessage,
    WorkerSummary,
)
from scaleray.records.start import steady_time

WINDOW_S, MOST_STEPS = 30.0, 1000
"""Largest window of a mean rate, in seconds and in steps."""
MOST_POINTS = 200
"""Maximum number of points of the loss curve: more than a terminal has columns."""
MOST_EVENTS = 20
OF_A_STEP = ("step", "epoch", "loss", "learning_rate", "grad_norm", "loss_scale")
"""Values of the last step that a LiveState contains."""


class Curve:
    """Loss curve of the run in at most MOST_POINTS points, each the mean of consecutive steps."""

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
        """Merge pairs of points; each result has the step of its later point."""
        pairs = zip(self.points[::2], self.points[1::2], strict=True)
        self.points = [(b[0], None if a[1] is None or b[1] is None else (a[1] + b[1]) / 2) for a, b in pairs]
        self.width *= 2


class Window:
    """Mean rates over the last steps."""

    def __init__(self, tokens_per_sample: int | None = None) -> None:
        self._tokens = tokens_per_sample
        self._steps: deque[StepRecord] = deque()
        self._step_s = self._waited_s = 0.0
        self._samples = 0
        self.best: float | None = None
        """Highest rate in samples per second over a full window."""

    def add(self, record: StepRecord) -> None:
        """Add the next step, and remove steps that are too old."""
        steps = self._steps
        self._count(record, 1)
        steps.append(record)
        is_full = False
        while len(steps) > 1 and (len(steps) > MOST_STEPS or record.recorded_at - steps[0].recorded_at > WINDOW_S):
            self._count(steps.popleft(), -1)
            is_full = True
        if is_full and (rate := self.rates().get("samples_per_s")):
            self.best = max(self.best or 0.0, rate)

    def clear(self) -> None:
        """Start from scratch, as workers were lost."""
        self._steps.clear()
        self._step_s, self._waited_s, self._samples = 0.0, 0.0, 0

    def _count(self, record: StepRecord, sign: int) -> None:
        self._step_s += sign * record.step_time_s
        self._waited_s += sign * record.input_wait_s
        self._samples += sign * record.num_samples

    def rates(self) -> dict[str, float]:
        """Means, by name in a LiveState; empty before the first step."""
        if not self._steps or self._step_s <= 0:
            return {}
        rate = self._samples / self._step_s
        return {
            "step_time_s": self._step_s / len(self._steps),
            "samples_per_s": rate,
            "input_wait_share": max(0.0, self._waited_s) / self._step_s,
            **({"tokens_per_s": rate * self._tokens} if self._tokens else {}),
        }


class RunState:
    """State of one attempt of a run, and of earlier attempts as far as `continue_from` and the ledger provide it.

    One thread calls `take`; other threads hold `lock` while they read. ledger: accounts for the run's time, None for no
    account. flops_per_sample: planned number, until the workers have counted. history: receives the messages for the
    alert rules.
    """

    def __init__(
        self,
        *,
        tokens_per_sample: int | None = None,
        flops_per_sample: float | None = None,
        ledger: GoodputLedger | None = None,
        history: SeriesHistory | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.ledger, self._history = ledger, history
        self.last: StepRecord | None = None
        """Newest step of this attempt."""
        self.newest_step = 0
        """Largest number of a step of this attempt."""
        self.grad_norm: float | None = None
        self.sent_bytes = 0.0
        self.nonfinite_steps = 0
        self.curve, self.window = Curve(), Window(tokens_per_sample)
        self.evaluated: dict[str, float] = {}
        """Last evaluation of this attempt, by `split/metric`."""
        self._extremes: dict[str, list[float]] = {}
        self.checkpoint: CheckpointRecord | None = None
        self.ranks = ComparedRanks()
        self.links: LinksMeasured | None = None
        self.flops_per_sample = flops_per_sample
        self.summaries: dict[int, WorkerSummary] = {}
        self.values: dict[str, float] = {}
        """Last value of each metric that was evaluated or logged by user code in this attempt."""
        self.resumed_after: dict[float, int] = {}
        """Steps after which training continued, by time, as a message may arrive twice."""
        self.events: deque[str] = deque(maxlen=MOST_EVENTS)
        """Last events of level warning or above."""
        self.status = self.verdict = ""
        """Status of an ended run; empty while it is running."""
        self._evaluated_before: dict[str, float] = {}
        self._previous_step: int | None = None
        """Number of the previous step; None after a restart, as its first step may be a repeat."""
        self._begun: tuple[int, float] | None = None
        """Step and wall-clock time at the beginning of the current series of consecutive steps."""
        self._furthest = 0
        self._held_at: float | None = None
        """Start of the training time that is not covered by a checkpoint."""
        self._evaluations: list[tuple[float, float]] = []

    def continue_from(self, before: LiveState) -> None:
        """Take over the curve and the last evaluation of the interrupted run."""
        curve = before.curve
        self.curve.points = list(curve)
        self.curve.width = max(1, round(curve[-1][0] - curve[-2][0])) if len(curve) > 1 else 1
        self._evaluated_before = {name: value for name, value in before.metrics.items() if value is not None}
        if before.best is not None:
            self._extremes = {before.judged_by: [before.best]}
        self._furthest, self.nonfinite_steps = int(curve[-1][0]) if curve else 0, before.nonfinite_steps

    def take(self, message: WorkerMessage) -> None:
        """Take the next message."""
        with self.lock:
            match message:
                case StepRecord():
                    if self._history is not None:
                        self._history.take(message)
                    self._take_step(message)
                case RankSample():
                    self.ranks.take_sample(message)
                case EvaluationRecord():
                    self._take_evaluation(message)
                case CheckpointRecord():
                    self._take_checkpoint(message)
                case EventRecord():
                    self._take_event(message)
                case SystemRecord() if self._history is not None:
                    self._history.take(message)
                case LoggedMetrics():
                    self.values.update(message.metrics)
                case LinksMeasured():
                    self.links = message
                case CountedFlops():
                    self.flops_per_sample = message.flops_per_sample
                case WorkerSummary():
                    self.summaries[message.rank] = message

    def end(self, status: str, verdict: str = "") -> None:
        """Store the run's final status, named as in MLflow."""
        with self.lock:
            self.status, self.verdict = status, verdict

    def goodput(self) -> Goodput | None:
        """Goodput until now; None before the first step."""
        with self.lock:
            if self.ledger is None or self.last is None:
                return None
            return self.ledger.goodput(steady_time())

    def unsaved_s(self, now: float | None) -> float | None:
        """Seconds of training since the start of the newest checkpoint; None before the run has begun.

        Counted up to the last step, as an evaluation, a hang or a restart adds nothing that could be lost. now: wall
        clock if the first worker waits for a checkpoint, as this time counts."""
        if self._held_at is None:
            return None
        until = now if now is not None else self.last.recorded_at if self.last is not None else 0.0
        return max(0.0, until - self._held_at - sum(seconds for _, seconds in self._evaluations))

    def left_s(self, total_steps: int | None) -> float | None:
        """Estimated seconds left, at the pace of the current consecutive steps and everything between them."""
        last, begun = self.last, self._begun
        if total_steps is None or last is None or begun is None or last.step <= begun[0] or self.status:
            return None
        pace_s = (last.recorded_at - begun[1]) / (last.step - begun[0])
        return max(0.0, (total_steps - last.step) * pace_s)

    def live_state(
        self,
        *,
        name: str,
        total_steps: int | None = None,
        ranks: Sequence[RankNow] = (),
        config: Mapping[str, Any] | None = None,
        **facts: Any,
    ) -> LiveState:
        """State in the form of `live.json`. ranks: activity of the workers. config: the run's config, by section.
        facts: fields that messages lack."""
        with self.lock:
            last, checkpoint, goodput = self.last, self.checkpoint, self.goodput()
            metrics = {**self._evaluated_before, **self.evaluated}
            judged = judged_metric(metrics, config or {})
            known: dict[str, Any] = {
                "status": self.status or (STARTING if last is None else RUNNING),
                "verdict": self.verdict,
                "step": max((rank.step for rank in ranks), default=0),
                "workers": len(ranks),
                "total_steps": total_steps,
                "left_s": self.left_s(total_steps),
                "curve": list(self.curve.points),
                "best_samples_per_s": self.window.best,
                "metrics": metrics,
                "judged_by": judged.name if judged else "",
                "best": judged.best(self._extremes.get(judged.name, [])) if judged else None,
                "nonfinite_steps": self.nonfinite_steps,
                "ranks": list(ranks),
                "events": list(self.events),
                **self.window.rates(),
            }
        if last is not None:
            known |= {"workers": last.world_size, **{name: getattr(last, name) for name in OF_A_STEP}}
        if goodput is not None:
            known |= {"attempts": goodput.attempts, "repeated_steps": goodput.repeated_steps}
            known["goodput"] = goodput.shares().get("productive")
        if checkpoint is not None:
            known |= {"checkpoint_step": checkpoint.step, "checkpoint_at": checkpoint.recorded_at}
        return LiveState(name=name, **known, **facts)

    def _take_step(self, record: StepRecord) -> None:
        if record.step == self._previous_step:
            return  # a message that came twice
        if self.last is None or record.step != self.last.step + 1:  # workers may have been lost without a word
            self._begun = record.step, record.recorded_at
        self.last, self._previous_step = record, record.step
        self.newest_step = max(self.newest_step, record.step)
        self.window.add(record)
        if self.ledger is not None:
            waited_s, at = record.input_wait_s, record.recorded_at
            self.ledger.add_step(record.step, step_s=record.step_time_s, waited_s=waited_s, at=at)
        self.sent_bytes += record.sent_bytes
        if record.grad_norm is not None:
            self.grad_norm = record.grad_norm
        if self._held_at is None:
            self._held_at = record.recorded_at
        if record.step > self._furthest:
            self._furthest = record.step
            self.nonfinite_steps += not record.is_finite
            self.curve.add(record.step, record.loss)

    def _take_evaluation(self, record: EvaluationRecord) -> None:
        self.evaluated.update(record.metrics)
        for name, value in record.metrics.items():
            known = [*self._extremes.get(name, []), *([value] if math.isfinite(value) else [])]
            self._extremes[name] = [min(known), max(known)] if known else []
        self.values.update(record.metrics)
        self._evaluations.append((record.recorded_at, record.duration_s))
        if self.ledger is not None:
            self.ledger.add_evaluation(record.duration_s, at=record.recorded_at)

    def _take_checkpoint(self, record: CheckpointRecord) -> None:
        self.checkpoint = record
        self._hold(record.recorded_at - record.duration_s)
        if self.ledger is not None:
            self.ledger.add_checkpoint(record.step, record.stall_s, at=record.recorded_at, took_s=record.duration_s)

    def _take_event(self, event: EventRecord) -> None:
        if event.kind != "info":
            self.events.append(event.text)
        if event.kind != "resumed":
            return
        self._hold(event.recorded_at)  # the checkpoint from which it continues is all that it has
        self._previous_step = None
        self.window.clear()
        self.ranks.forget()
        self.newest_step = max(self.newest_step, event.step or 0)
        if event.step is not None:
            self.resumed_after[event.recorded_at] = event.step
        if self.ledger is not None and self.last is not None:
            self.ledger.begin(event.recorded_at)  # workers were lost, and others go on

    def _hold(self, at: float) -> None:
        self._held_at = at
        self._evaluations = [(ended, seconds) for ended, seconds in self._evaluations if ended - seconds >= at]
