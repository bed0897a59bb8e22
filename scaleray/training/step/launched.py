"""A step that was given to the device, and the numbers that come of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from scaleray.errors import WorkloadError
from scaleray.strategies.contract.numbers import Number, Truth, Unread
from scaleray.training.observer import TakenStep


@dataclass
class LaunchedStep:
    """A step that this worker has given to its device: numbers that one which runs ahead does not read. `result` waits
    for them. is_own: whether loss and count are those of this rank's samples alone.
    """

    loss: Number
    count: Number
    grad_norm: Number | None
    is_finite: Truth
    nonfinite: tuple[Number, Number]
    """See `TakenStep.nonfinite_steps` and `nonfinite_in_a_row`."""
    loss_scale: Number | None
    is_own: bool = False

    def begin_copy(self, signals: Sequence[Number]) -> None:
        """Copy the numbers to the host, with signals that the ranks shared; does not wait."""
        numbers = [self.loss, self.count, self.grad_norm, self.is_finite, self.loss_scale, *self.nonfinite, *signals]
        self._numbers = Unread(numbers)

    def wait(self) -> None:
        """Wait until the device has computed the step's numbers."""
        self._numbers.wait()

    def result(self, **facts: Any) -> TakenStep:
        """The step with its result, and with facts that the loop knows. Raises WorkloadError if its count is 0."""
        loss, count, grad_norm, is_finite, loss_scale, nonfinite_steps, in_a_row, *signals = self._numbers.read()
        if not self.is_own and not 0 < count < math.inf:
            raise WorkloadError(
                "loss()", f"a total count of {count:g}", "at least one sample or token must count in every global batch"
            )
        return TakenStep(
            loss=loss,
            count=count,
            grad_norm=grad_norm,
            is_finite=is_finite > 0,
            is_own=self.is_own,
            nonfinite_steps=int(nonfinite_steps),
            nonfinite_in_a_row=int(in_a_row),
            signals=tuple(signals),
            loss_scale=loss_scale,
            **facts,
        )


class Launched(Protocol):
    """A step, of one loss or several, that this worker has given to its device."""

    def wait(self) -> None: ...

    def result(self, **facts: Any) -> TakenStep: ...


class StepsUnderWay:
    """Steps that the device has been given and the host knows nothing of yet, in order; at most `ahead` between two
    steps."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self._steps: deque[tuple[Launched, dict[str, Any]]] = deque()

    def add(self, launched: Launched, **facts: Any) -> None:
        """Add the next step, with the loop's facts of it."""
        self._steps.append((launched, facts))

    def wait_for_room(self) -> None:
        """Wait until the device is no further behind than it may be: steps then take the time that it needs for
        them."""
        if len(self._steps) >= self.ahead > 0:
            self._steps[-self.ahead][0].wait()

    def next_known(self, *, knows_all: bool) -> TakenStep | None:
        """The next step with its result, or None while the host may be ahead of it. knows_all: read what there is."""
        if len(self._steps) <= (0 if knows_all else self.ahead):
            return None
        launched, facts = self._steps.popleft()
        return launched.result(**facts)

    def forget(self) -> None:
        """Forget the steps behind one that has ended the training: they changed nothing."""
        self._steps.clear()
