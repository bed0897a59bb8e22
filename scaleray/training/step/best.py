"""The best evaluation of a run so far, and how many have not been better since: whether patience is at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from scaleray.config import RunConfig


class Best:
    """Watches a metric of the evaluations: `stop.watch`, or else `checkpoint.best`. With neither it does nothing.

    value, step: of the best so far, and after which step it was. num_since: evaluations since then.
    """

    def __init__(self, config: RunConfig) -> None:
        watched = config.stop.watch or config.checkpoint.best
        self.metric, _, direction = (watched or "").partition(" ")
        self.sign = 1.0 if direction == "max" else -1.0
        self.key = "stop.watch" if config.stop.watch else "checkpoint.best"
        self.patience = config.stop.patience
        self.value, self.step, self.num_since = math.nan, -1, 0

    def take(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take note of the evaluation after `step`. One that lacks the metric, or has NaN, is no better."""
        if not self.metric:
            return
        value = metrics.get(self.metric, math.nan)
        if self.sign * value > self.sign * self.value or (math.isnan(self.value) and not math.isnan(value)):
            self.value, self.step, self.num_since = value, step, 0
        else:
            self.num_since += 1

    def verdict(self) -> str | None:
        """Why the training ends, if patience is at its end."""
        if self.patience is None or self.num_since < self.patience:
            return None
        was = f"{self.value:g} after step {self.step}" if self.step >= 0 else "not measured"
        return f"no better {self.metric} in {self.num_since} evaluations: the best was {was}"

    def values(self) -> dict[str, Any]:
        """The best evaluation, for the record; empty before there is one."""
        return {"metric": self.metric, "value": self.value, "step": self.step} if self.step >= 0 else {}

    def state(self) -> dict[str, Any] | None:
        """State for a checkpoint."""
        if not self.metric:
            return None
        value = None if math.isnan(self.value) else self.value
        return {"metric": self.metric, "value": value, "step": self.step, "num_since": self.num_since}

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Continue from `state`, unless another metric is watched now."""
        if state and state["metric"] == self.metric:
            self.value = math.nan if state["value"] is None else state["value"]
            self.step, self.num_since = state["step"], state["num_since"]
