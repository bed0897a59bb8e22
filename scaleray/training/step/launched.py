"""A step that was given to the device, and the numbers that come of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from scaleray.errors import WorkloadError
from scaleray.strategies.contract.numbers import Number, Truth, Unread
from scaleray.training.observer import StepResult, TakenStep


@dataclass(frozen=True)
class Figures:
    """Numbers of a step, of which one that runs ahead reads none."""

    loss: Number
    count: Number
    grad_norm: Number | None
    is_finite: Truth
    nonfinite: tuple[Number, Number] = (0, 0)
    """See `StepResult.nonfinite_steps` and `nonfinite_in_a_row`."""
    loss_scale: Number | None = None


class LaunchedStep:
    """A step that this worker has given to its device. `result` waits for it. is_own: whether loss and count are those
    of this rank's samples alone. signals: values that the ranks shared.
    """

    def __init__(self, figures: Figures, signals: Sequence[Number], *, is_own: bool) -> None:
        self._is_own = is_own
        f = figures
        self._numbers = Unread([f.loss, f.count, f.grad_norm, f.is_finite, f.loss_scale, *f.nonfinite, *signals])
        self._result: StepResult | None = None

    def wait(self) -> None:
        """Wait until the device has computed the step's numbers."""
        self._numbers.wait()

    def result(self) -> StepResult:
        """Result of the step. Raises WorkloadError if its count is 0."""
        if self._result is None:
            self._result = self._read()
        return self._result

    def _read(self) -> StepResult:
        loss, count, grad_norm, is_finite, loss_scale, nonfinite_steps, in_a_row, *signals = self._numbers.read()
        if not self._is_own and not 0 < count < math.inf:
            raise WorkloadError(
                "loss()", f"a total count of {count:g}", "at least one sample or token must count in every global batch"
            )
        return StepResult(
            loss=loss,
            count=count,
            grad_norm=grad_norm,
            is_finite=is_finite > 0,
            is_own=self._is_own,
            nonfinite_steps=int(nonfinite_steps),
            nonfinite_in_a_row=int(in_a_row),
            signals=tuple(signals),
            loss_scale=loss_scale,
        )


class Launched(Protocol):
    """A step, of one loss or several, that this worker has given to its device."""

    def wait(self) -> None: ...

    def result(self) -> StepResult: ...


class StepsUnderWay:
    """Steps that the device has been given and the host knows nothing of yet, in order; at most `ahead` between two
    steps."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self._steps: deque[tuple[Launched, Callable[[StepResult], TakenStep]]] = deque()

    def add(self, launched: Launched, made: Callable[[StepResult], TakenStep]) -> None:
        """Add the next step. made: gives what the training tells of it, once its result is known."""
        self._steps.append((launched, made))

    def wait_for_room(self) -> None:
        """Wait until the device is no further behind than it may be: steps then take the time that it needs for
        them."""
        if len(self._steps) >= self.ahead > 0:
            self._steps[-self.ahead][0].wait()

    def next_known(self, *, knows_all: bool) -> TakenStep | None:
        """The next step with its result, or None while the host may be ahead of it. knows_all: read what there is."""
        if len(self._steps) <= (0 if knows_all else self.ahead):
            return None
        launched, made = self._steps.popleft()
        return made(launched.result())

    def forget(self) -> None:
        """Forget the steps behind one that has ended the training: they changed nothing."""
        self._steps.clear()
