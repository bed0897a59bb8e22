"""Interface for observing a training; there is no other.

An observer reads and reports; with or without it, the weights are bit-identical. All decisions about the training
(its target, its checkpoints, the shares of its workers) are made in the loop itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from scaleray.records.run_record import StepRecord

if TYPE_CHECKING:
    from scaleray.training.setup.model_setup import Setup


class Observer:
    """Observes a training from its set-up to its end. A subclass overrides the methods that it needs; all ranks have
    the same observers, in the same order."""

    def begin(self, setup: Setup) -> None:
        """Receive the training once it is set up, before anything is restored or trained."""

    def during_step(self, number: int) -> contextlib.AbstractContextManager[None] | None:
        """Context in which step `number`, counted from 1, computes its gradients and updates the weights; None if the
        observer needs none."""
        return None

    def after_launch(self) -> None:
        """Measure a step that has been launched, in addition to its result, which may be known only later."""

    def after_step(self, taken: StepRecord) -> None:
        """Receive a step whose result is known. All steps arrive, in order. On a device that computes asynchronously
        the training may be a few steps ahead. Raises an error if the training must not continue."""

    def close(self) -> None:
        """Restore the model to its previous state. Called at the end, also after errors."""


class Observers(Observer):
    """Several observers that act as one, called in order."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers
        # most watch one moment of a step, and a call of those that do not is as dear as theirs
        self._during_step = _watching(observers, "during_step")
        self._after_launch = _watching(observers, "after_launch")
        self._after_step = _watching(observers, "after_step")

    def begin(self, setup: Setup) -> None:
        for each in self.observers:
            each.begin(setup)

    @contextlib.contextmanager
    def during_step(self, number: int) -> Iterator[None]:
        with contextlib.ExitStack() as watched:
            for each in self._during_step:
                if (context := each.during_step(number)) is not None:
                    watched.enter_context(context)
            yield

    def after_launch(self) -> None:
        for each in self._after_launch:
            each.after_launch()

    def after_step(self, taken: StepRecord) -> None:
        for each in self._after_step:
            each.after_step(taken)

    def close(self) -> None:
        for each in self.observers:
            each.close()


def _watching(observers: Sequence[Observer], moment: str) -> tuple[Observer, ...]:
    """Observers that override this method."""
    idle = getattr(Observer, moment)
    return tuple(each for each in observers if getattr(getattr(each, moment), "__func__", None) is not idle)
