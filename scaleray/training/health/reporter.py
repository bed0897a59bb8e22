"""Reports of a worker during training: lines for the user, a record of each step, and the utilisation of its node. It
makes no decisions."""

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from scaleray.common.installed import newer_than_tested
from scaleray.common.watchers import Guard, Watcher
from scaleray.config.idle_settings import idle_settings
from scaleray.config.recipe.lr_rules import MOVED_BY_RULES
from scaleray.records.run_record import DerivedRecord, Emit, EventRecord, ModelRecord, StepRecord, SystemRecord
from scaleray.strategies.contract.parallel import Metrics, known
from scaleray.training.health.system_metrics import SystemMetrics
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.rank_context import RankContext
from scaleray.workload import brings_optimizer, brings_schedule, own_method

SHORTEST_SAMPLING_S = 5.0


class Reporter:
    """Sends reports through `emit`: those about this worker from every rank, those common to all workers from rank 0
    only. step: returns the number of the last step. figures: returns other measurements of that step, by metric name.
    guard: calls code that only observes, so that its errors cannot end the training."""

    def __init__(
        self,
        job: TrainJob,
        place: RankContext,
        emit: Emit,
        *,
        step: Callable[[], int],
        figures: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self.job, self.config, self.place, self._step, self._others_figures = job, job.config, place, step, figures
        self.guard = Guard(lambda text: emit(EventRecord(text, kind="warning", step=step() or None)))
        self.emit = self.guard.wrapped(Watcher.MESSAGES, emit)
        self._is_first = place.rank == 0
        self._num_notes = 0
        self._sent_bytes = 0.0
        self._kept: deque[Metrics] = deque()
        is_sampled = self.config.tracking.system_metrics and place.local_rank == 0
        self._system = (
            self.guard(Watcher.SYSTEM_METRICS, lambda: SystemMetrics(self.guard), None) if is_sampled else None
        )
        self._sampled_at = time.monotonic()

    def say(self, text: str, *, is_warning: bool = False, step: int | None = None) -> None:
        """Log one line, on rank 0."""
        if self._is_first:
            self.emit(EventRecord(text, kind="warning" if is_warning else "info", step=step))

    def begin(self, setup: Setup) -> None:
        """Report before the first step: notes, values in use, and settings without effect."""
        self._setup = setup
        self.notes()
        if self._is_first:
            self.emit(ModelRecord(setup.num_parameters, str(self.place.device)))
            self._say_values_in_use()
            strategy = self.job.recipe.strategy
            idle = self.guard(Watcher.NOTES, lambda: idle_settings(self.config, strategy), [], part="settings")
            newer = newer_than_tested()
            for note in [*idle, *newer, *(setup.compilation.notes if setup.compilation is not None else [])]:
                self.say(note)
            for text in self.job.data_warnings():
                self.say(text, is_warning=True)

    def after_launch(self) -> float:
        """Count the bytes sent by this rank in a step, and store its other measurements, whose values may be known
        later."""
        before = self._sent_bytes
        self._sent_bytes = self.guard(Watcher.FIGURES, self._setup.parallel.bytes_sent, before, part="bytes sent")
        if self._is_first:
            self._kept.append(self._figures())
        return self._sent_bytes - before

    def after_step(self, taken: StepRecord) -> None:
        """Report a step together with its notes and samples."""
        if self._is_first:
            numbers, strategy = self._kept.popleft(), self.job.recipe.strategy
            taken.more.update(self.guard(Watcher.FIGURES, lambda: known(numbers), {}, part=strategy))
            self.emit(taken)
        self.notes()
        self._sample_system()

    def notes(self) -> None:
        """Report the strategy's notes since the last call."""
        new = self._setup.parallel.notes[self._num_notes :]
        self._num_notes += len(new)
        for note in new:
            self.say(note, step=self._step() or None)

    def forget_bytes(self) -> None:
        """Exclude bytes sent until now from the next record."""
        self._sent_bytes = self._setup.parallel.bytes_sent()

    def _say_values_in_use(self) -> None:
        """Log the values of a workload's own optimizer or schedule that differ from the derived ones."""
        in_use = self._setup.in_use
        if brings_optimizer(self.job.workload) or brings_schedule(self.job.workload):
            derived = {name: getattr(self.job.recipe, name) for name in MOVED_BY_RULES}
            self.emit(DerivedRecord({**derived, **in_use.values}))
        for text in in_use.warnings:
            self.say(text, is_warning=True)

    def _figures(self) -> Metrics:
        """Measurements of the last step by the strategy, by pruning and by other parts."""
        look, pruning = partial(self.guard, Watcher.FIGURES), self._setup.pruning
        return {
            **look(self._setup.parallel.metrics, {}, part=self.job.recipe.strategy),
            **(look(pruning.metrics, {}, part="pruning") if pruning else {}),
            **self._others_figures(),
            **look(own_method(self.job.workload, "step_metrics") or dict, {}, part="step_metrics()"),
        }

    def _sample_system(self) -> None:
        interval_s = max(SHORTEST_SAMPLING_S, self.config.tracking.interval_s)
        if self._system is None or time.monotonic() - self._sampled_at < interval_s:
            return
        self._sampled_at = time.monotonic()
        if found := self.guard(Watcher.SYSTEM_METRICS, self._system.sample, {}):
            self.emit(SystemRecord(self.place.node, self._step(), found))
