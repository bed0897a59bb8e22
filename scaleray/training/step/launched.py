"""Step that has been launched on the device, and the numbers that result from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from scaleray.errors import WorkloadError
from scaleray.records.run_record import StepRecord
from scaleray.strategies.contract.numbers import Number, Truth, Unread

UNKNOWN = {"step": 0, "num_samples": 0, "learning_rate": 0.0, "step_time_s": 0.0, "input_wait_s": 0.0, "epoch": 0.0}
"""Facts of a step that is taken without the loop."""


@dataclass
class LaunchedStep:
    """Step that this worker has launched on its device, whose numbers are not read while the host runs ahead. `result`
    waits for them. is_own: whether loss and count cover only this rank's samples."""

    loss: Number
    count: Number
    grad_norm: Number | None
    is_finite: Truth
    nonfinite: tuple[Number, Number]
    """See `StepRecord.nonfinite_steps` and `nonfinite_in_a_row`."""
    loss_scale: Number | None
    is_own: bool = False

    def begin_copy(self, signals: Sequence[Number]) -> None:
        """Start to copy the numbers, and the signals shared by the ranks, to the host, without waiting."""
        numbers = [self.loss, self.count, self.grad_norm, self.is_finite, self.loss_scale, *self.nonfinite, *signals]
        self._numbers = Unread(numbers)

    def wait(self) -> None:
        """Wait until the device has computed the step's numbers."""
        self._numbers.wait()

    def result(self, **facts: Any) -> StepRecord:
        """Record of the step: its result and the loop's facts. Raises WorkloadError if its count is 0."""
        loss, count, grad_norm, is_finite, loss_scale, nonfinite_steps, in_a_row, *signals = self._numbers.read()
        if not self.is_own and not 0 < count < math.inf:
            raise WorkloadError(
                "loss()", f"a total count of {count:g}", "at least one sample or token must count in every global batch"
            )
        return StepRecord(
            loss=loss,
            count=count,
            grad_norm=grad_norm,
            is_finite=is_finite > 0,
            is_own=self.is_own,
            nonfinite_steps=int(nonfinite_steps),
            nonfinite_in_a_row=int(in_a_row),
            signals=tuple(signals),
            loss_scale=loss_scale,
            **(facts or UNKNOWN),
        )


class Launched(Protocol):
    """Step with one or several losses that this worker has launched on its device."""

    def wait(self) -> None: ...

    def result(self, **facts: Any) -> StepRecord: ...
