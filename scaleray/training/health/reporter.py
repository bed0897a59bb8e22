"""What a worker tells while it trains: lines for the user, a record of each step, its node's utilisation.

Decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

from scaleray.config.idle_settings import idle_settings
from scaleray.records.run import DerivedRecord, Emit, EventRecord, StepRecord, SystemRecord
from scaleray.scaling.recipe.lr_rules import MOVED_BY_RULES
from scaleray.scaling.recipe.values import Recipe
from scaleray.training.health.system_metrics import SystemMetrics
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.place import Place
from scaleray.watchers import Guard, Watcher
from scaleray.workload import brings_optimizer

SHORTEST_SAMPLING_S = 5.0


class Reporter:
    """Tells through `emit` what happens on this worker, and what all workers have in common on rank 0 alone.

    step: gives the number of the last step. guard: calls whatever only watches, so that it cannot end the training.
    """

    def __init__(self, job: TrainJob, place: Place, emit: Emit, step: Callable[[], int]) -> None:
        self.config, self.workload, self.place, self._step = job.config, job.workload, place, step
        self.guard = Guard(lambda text: emit(EventRecord(text, kind="warning", step=step() or None)))
        self.emit = self.guard.wrapped(Watcher.MESSAGES, emit)
        self._is_first = place.rank == 0
        self._num_notes = 0
        self._sent_bytes = 0.0
        is_sampled = self.config.tracking.system_metrics and place.local_rank == 0
        self._system = (
            self.guard(Watcher.SYSTEM_METRICS, lambda: SystemMetrics(self.guard), None) if is_sampled else None
        )
        self._sampled_at = time.monotonic()

    def say(self, text: str, *, is_warning: bool = False, step: int | None = None) -> None:
        """Say one line, on rank 0."""
        if self._is_first:
            self.emit(EventRecord(text, kind="warning" if is_warning else "info", step=step))

    def begin(self, setup: Setup, recipe: Recipe, warnings: Iterable[str]) -> None:
        """Say what is to be known before the first step: notes, values in use, settings without effect.

        warnings: more of these.
        """
        self.notes(setup)
        if self._is_first:
            self._values_in_use(setup, recipe)
            idle = self.guard(Watcher.NOTES, lambda: idle_settings(self.config, recipe.strategy), [], part="settings")
            for note in [*idle, *(setup.compilation.notes if setup.compilation is not None else [])]:
                self.say(note)
            for text in warnings:
                self.say(text, is_warning=True)

    def _values_in_use(self, setup: Setup, recipe: Recipe) -> None:
        """What became of the derived values in an optimizer of the workload's own."""
        if brings_optimizer(self.workload):
            derived = {name: getattr(recipe, name) for name in MOVED_BY_RULES}
            self.emit(DerivedRecord({**derived, **setup.in_use.values}))
        for text in setup.in_use.warnings:
            self.say(text, is_warning=True)

    def notes(self, setup: Setup) -> None:
        """What the strategy has noted since the last time."""
        new = setup.parallel.notes[self._num_notes :]
        self._num_notes += len(new)
        for note in new:
            self.say(note, step=self._step() or None)

    def forget_bytes(self, setup: Setup) -> None:
        """Leave out of the next record what has been sent until now."""
        self._sent_bytes = setup.parallel.bytes_sent()

    def step(self, setup: Setup, record: Callable[[float], StepRecord]) -> None:
        """Take note of a step. record: makes its record from the bytes that it sent; asked on rank 0 only."""
        sent_bytes = self.guard(Watcher.FIGURES, setup.parallel.bytes_sent, self._sent_bytes, part="bytes sent")
        if self._is_first:
            self.emit(record(sent_bytes - self._sent_bytes))
        self._sent_bytes = sent_bytes
        self.notes(setup)
        self._sample_system()

    def figures(self, setup: Setup, strategy: str) -> dict[str, float]:
        """What strategy and pruning measured in the last step."""
        look = partial(self.guard, Watcher.FIGURES)
        return {
            **look(setup.parallel.metrics, {}, part=strategy),
            **(look(setup.pruning.metrics, {}, part="pruning") if setup.pruning else {}),
        }

    def _sample_system(self) -> None:
        interval_s = max(SHORTEST_SAMPLING_S, self.config.tracking.interval_s)
        if self._system is None or time.monotonic() - self._sampled_at < interval_s:
            return
        self._sampled_at = time.monotonic()
        if found := self.guard(Watcher.SYSTEM_METRICS, self._system.sample, {}):
            self.emit(SystemRecord(self.place.node, self._step(), found))
