"""A factor on the learning rates of a training, which its callbacks may change while it runs."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import torch


class RateScale:
    """Factor on every rate of an optimizer, in addition to its schedule. The optimizer's groups have it only within
    steps, so it does not affect the schedule.

    factor: of the next step. due: requested factors, with their first step. code: number computed from all requests of
    this process."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.due: list[tuple[int, float]] = []
        self.code = 0

    def change(self, factor: float, *, first_step: int) -> None:
        """Multiply all rates by `factor` from step `first_step` on."""
        self.due.append((first_step, factor))
        self.code = zlib.crc32(repr((self.code, first_step, factor)).encode()) % 2**20 + 1

    def signals(self) -> tuple[float, float]:
        """Numbers whose sums over the workers show whether all made the same requests: zeros if none did."""
        return float(self.code), float(self.code * self.code)

    def begin_step(self, number: int) -> None:
        """Apply the factors due in step `number`."""
        for first_step, factor in self.due:
            self.factor *= factor if first_step <= number else 1.0
        self.due = [one for one in self.due if one[0] > number]

    @contextlib.contextmanager
    def in_use(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Context in which the optimizer's groups have the rates of the step."""
        if self.factor == 1.0:
            yield
            return
        groups = [group for group in optimizer.param_groups if "lr" in group]
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * self.factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"factor": self.factor, "due": [list(one) for one in self.due]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.factor, self.due = state["factor"], [(int(step), factor) for step, factor in state["due"]]
