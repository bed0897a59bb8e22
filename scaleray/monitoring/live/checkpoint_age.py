"""How much training a failure would cost now: the time since the newest checkpoint, and from one to the next."""

from __future__ import annotations

from collections.abc import Sequence

from scaleray.records.phases import Phase
from scaleray.records.published import PublishedFacts
from scaleray.records.run import CheckpointRecord, EvaluationRecord, EventRecord, Heartbeat, StepRecord, WorkerMessage


class CheckpointAge:
    """Hears of steps, checkpoints and evaluations. facts: how often checkpoints are made."""

    def __init__(self, facts: PublishedFacts) -> None:
        self.every_steps, self.every_s = facts.checkpoint_every_steps, facts.checkpoint_every_s
        self.duration_s: float | None = None
        """Seconds that the newest checkpoint took to be written."""
        self._since: float | None = None
        self._last_step_at = 0.0
        self._evaluations: list[tuple[float, float]] = []

    def hear(self, message: WorkerMessage) -> None:
        """Take what moves the age of the newest checkpoint, and ignore everything else."""
        if isinstance(message, StepRecord):
            self._last_step_at = message.recorded_at
            self._since = self._since or message.recorded_at
        elif isinstance(message, EvaluationRecord):
            self._evaluations.append((message.recorded_at, message.duration_s))
        elif isinstance(message, CheckpointRecord):
            self.duration_s = message.duration_s
            self._begin(message.recorded_at - message.duration_s)
        elif isinstance(message, EventRecord) and message.kind == "resumed":
            self._begin(message.recorded_at)  # the checkpoint that it goes on from is all that it has

    def age_s(self, beats: Sequence[Heartbeat], now: float) -> float | None:
        """Seconds of training since the newest checkpoint began; None where none are made.

        They end with the last step, as an evaluation, a hang or a restart adds nothing that could be lost; while the
        first worker waits for a checkpoint they continue. beats: the last signs of life, by rank.
        """
        if (self.every_steps is None and self.every_s is None) or self._since is None:
            return None
        saves = bool(beats) and beats[0].phase == Phase.CHECKPOINT
        until = now if saves else self._last_step_at
        return max(0.0, until - self._since - sum(seconds for _, seconds in self._evaluations))

    def interval_s(self, step_s: float | None) -> float | None:
        """Seconds from one checkpoint to the next, as configured. step_s: time of a step now."""
        if self._since is None:
            return None
        by_steps = self.every_steps * step_s if self.every_steps is not None and step_s is not None else None
        return min((one for one in (self.every_s, by_steps) if one is not None), default=None)

    def _begin(self, at: float) -> None:
        self._since = at
        self._evaluations = [(ended, seconds) for ended, seconds in self._evaluations if ended - seconds >= at]
