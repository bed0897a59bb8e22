"""Training that waits after every evaluation for a decision: continue, stop, or save its state and wait again.

Early stopping and population-based training need this. The loop runs in a thread of rank 0's process, and unchanged on
other ranks. All ranks receive the decision before any of them takes another step, so stopping interrupts no collective.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.retention import Retention
from scaleray.checkpoints.saver import Saver
from scaleray.errors import RunFailedError
from scaleray.records.run_record import EvaluationRecord, EventRecord, StepRecord, WorkerMessage, WorkerSummary
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.state.checkpointing import Checkpointing
from scaleray.training.state.training_state import TrainState

COURSE = "course"
"""Key, among a checkpoint's facts, of the samples and seconds before it."""


@dataclass(frozen=True)
class Decision:
    """Decision after an evaluation: continue, stop or, if `save_to` is set, save the state in that folder and wait
    again."""

    is_stop: bool = False
    save_to: str | None = None


@dataclass
class TrainingHistory:
    """History of a training up to its last step.

    The seconds cover only steps, not evaluations and waits."""

    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    step_times: list[tuple[int, float]] = field(default_factory=list)
    """(samples, seconds) of each step in this process."""
    more: dict[str, float] = field(default_factory=dict)
    """Last value of each measurement that strategies and other parts add to a step."""

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second in steady state: without the first 20 % of the steps, at least 10 and at most half of
        them.

        None for fewer than 2 steps."""
        count = len(self.step_times)
        steady = self.step_times[min(max(10, count // 5), count // 2) :]
        total_s = sum(seconds for _, seconds in steady)
        return sum(samples for samples, _ in steady) / total_s if count >= 2 and total_s > 0 else None

    def values(self) -> dict[str, float]:
        """Part of a checkpoint."""
        return {"samples": self.samples, "seconds": self.seconds}


class AskingCheckpointing(Checkpointing):
    """Checkpoints that are saved on request after evaluations, in place of the config's own. start_from: a folder
    passed earlier as `save_to`, or None to start at the first step. ask: called on rank 0 with the number of steps
    after each evaluation but the last; may block. on_resumed: called with the facts of the checkpoint."""

    def __init__(
        self,
        job: TrainJob,
        place: RankContext,
        *,
        start_from: str | None,
        emit: Callable[[Any], None],
        ask: Callable[[int], Decision],
        facts: Callable[[], Mapping[str, Any]] = dict,
        on_resumed: Callable[[Mapping[str, Any]], None] = lambda facts: None,
    ) -> None:
        super().__init__(job, place, Catalog.of_run(start_from) if start_from else Catalog([]), emit=emit)
        self.start_from, self.ask, self.get_facts, self.on_resumed = start_from, ask, facts, on_resumed
        self.paused_s = 0.0

    def find(self) -> int:
        """Return the step to start from. Raises RunFailedError if the checkpoint cannot be used. Collective."""
        step = super().find() if self.start_from else 0
        if self.start_from and self.resumed_from is None:
            raise RunFailedError(f"the state saved at {self.start_from} cannot be read")
        return step

    def begin(self, state: TrainState) -> None:
        """Restore the state to start from, if any. Collective."""
        super().begin(state)
        if self.resumed_from is not None:
            self.on_resumed(self.resumed_from.facts)

    def signals(self) -> tuple[float, ...]:
        """A single number, since the loop shares signals only if there are any."""
        return (0.0,)

    def asks_for_links(self, signals: Sequence[float]) -> bool:
        """False: trials receive no such requests, and their signals do not carry them."""
        return False

    def after_step(self, step: int, signals: tuple[float, ...]) -> bool:
        """Whether the training should stop here. Collective."""
        every = self.job.recipe.evaluate_every_steps
        if every is None or step % every or step >= self.job.recipe.total_steps:
            return False
        started = time.perf_counter()
        try:
            while True:
                decision: Decision = self._agreed(lambda: self.ask(step))
                if decision.save_to is None:
                    return decision.is_stop
                self._save_to(decision.save_to, step)
        finally:
            self.paused_s += time.perf_counter() - started

    def finish(self, step: int) -> None:
        """Do nothing, since no state is saved at the end."""

    def _save_to(self, folder: str, step: int) -> None:
        self.saver = Saver(
            Catalog.of_run(folder),
            self.group,
            world_size=self.place.world_size,
            strategy=self.job.recipe.strategy,
            is_asynchronous=False,
            full_every=1,
            retention=Retention(1),
            emit=self.emit,
        )
        self.facts = {"config": self.job.config.to_dict(), **self.get_facts()}
        self.save(step)
        self.saver.wait()
        if self.saver.last_saved != step:
            raise RunFailedError(f"the state could not be saved to {folder}")


@dataclass(frozen=True)
class Paused:
    """Event: the training waits after an evaluation."""

    step: int


@dataclass(frozen=True)
class Ended:
    """Event: the training has ended, with a summary or with an error, which is LeftEarly after a stop."""

    summary: WorkerSummary | None = None
    error: BaseException | None = None


Train = Callable[[Callable[[WorkerMessage], None], Callable[..., AskingCheckpointing]], WorkerSummary]
"""Function that runs the loop on rank 0. It takes `emit` and a function that makes its checkpointing."""


class StepwiseTraining:
    """Controls rank 0's training from outside: `advance` to the next evaluation, `save`, `stop`. Not thread-safe.

    train: runs the loop; called in a thread with `emit` and with a function of (job, place) that makes its
    checkpointing. pauses: False trains to the end without waiting. start_from: a folder from `save`."""

    def __init__(self, train: Train, *, pauses: bool = True, start_from: str | None = None) -> None:
        self.course = TrainingHistory()
        self.events: list[str] = []
        self._train, self._pauses, self._start_from = train, pauses, start_from
        self._decisions: queue.Queue[Decision] = queue.Queue()
        self._happened: queue.Queue[Paused | Ended] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="scaleray-training", daemon=True)
        self._checkpointing: AskingCheckpointing | None = None
        self._seen_pauses_s = 0.0
        self.curve: list[tuple[int, float, dict[str, float], float]] = []
        self.ended: Ended | None = None
        self._is_given_up = False

    def advance(self, timeout_s: float | None = None) -> Paused | Ended:
        """Train up to the next evaluation or the end. Raises queue.Empty after `timeout_s`; then call `wait`."""
        if self.ended is not None:
            return self.ended
        if not self._thread.is_alive() and self._thread.ident is None:
            self._thread.start()
        else:
            self._decisions.put(Decision())
        return self.wait(timeout_s)

    def wait(self, timeout_s: float | None = None) -> Paused | Ended:
        """Wait for the next event without making a new request to the training."""
        if self.ended is not None:
            return self.ended
        happened = self._happened.get(timeout=timeout_s)
        if isinstance(happened, Ended):
            self.ended = happened
            if not self._is_given_up:
                self._thread.join()
        return happened

    def give_up(self, error: BaseException) -> None:
        """Raise this error in the waiting thread, because the training hangs. Called from another thread."""
        self._is_given_up = True
        self._happened.put(Ended(error=error))

    def save(self, folder: str) -> None:
        """Save the state while the training waits. Raises the error if that fails."""
        self._decisions.put(Decision(save_to=folder))
        happened = self.wait()
        if isinstance(happened, Ended):
            raise happened.error or RunFailedError("the training ended while its state was saved")

    def stop(self, timeout_s: float = 30.0) -> bool:
        """End a training that is waiting or has not begun. Returns False if it did not end in time."""
        if self._thread.ident is None or self.ended is not None:
            return True
        self._decisions.put(Decision(is_stop=True))
        deadline = time.monotonic() + timeout_s
        while self.ended is None:
            try:
                self.wait(max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return False
        return True

    def _run(self) -> None:
        try:
            ended = Ended(self._train(self._emit, self._make_checkpointing))
        except BaseException as exc:  # the one that waits must hear of it, whatever it is
            ended = Ended(error=exc)
        self._happened.put(ended)

    def _make_checkpointing(self, job: TrainJob, place: RankContext) -> AskingCheckpointing:
        self._checkpointing = AskingCheckpointing(
            job,
            place,
            start_from=self._start_from,
            emit=self._emit,
            ask=self._ask,
            facts=lambda: {COURSE: self.course.values()},
            on_resumed=self._resume,
        )
        return self._checkpointing

    def _ask(self, step: int) -> Decision:
        if not self._pauses:
            return Decision()
        self._happened.put(Paused(step))
        return self._decisions.get()

    def _resume(self, facts: Mapping[str, Any]) -> None:
        before = facts.get(COURSE, {})
        self.course.samples, self.course.seconds = int(before.get("samples", 0)), float(before.get("seconds", 0.0))

    def _emit(self, message: WorkerMessage) -> None:
        course = self.course
        if isinstance(message, StepRecord):
            paused_s = self._checkpointing.paused_s if self._checkpointing else 0.0
            # the clock of the loop runs on while it waits
            step_s = max(0.0, message.step_time_s - (paused_s - self._seen_pauses_s))
            self._seen_pauses_s = paused_s
            course.step, course.more = message.step, {**course.more, **message.more}
            course.samples += message.num_samples
            course.seconds += step_s
            course.step_times.append((message.num_samples, step_s))
        elif isinstance(message, EvaluationRecord):
            course.step, course.metrics = message.step, dict(message.metrics)
            self.curve.append((course.samples, course.seconds, dict(message.metrics), message.recorded_at))
        elif isinstance(message, EventRecord) and message.kind == "warning":
            self.events.append(message.text)
