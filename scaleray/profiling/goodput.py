"""Goodput: share of a run's time, over all attempts, spent in steps that count, and a breakdown of the rest.

Updated by live/state/run_state.py with every step, evaluation and checkpoint. The classes follow Google's
ml-goodput-measurement where the data allows; unlike there, a step is productive for its actual duration, not for that
of an ideal step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from scaleray.records.profile_record import Goodput

PRODUCTIVE, START, RESTART, REPEATED = "productive", "start", "restart", "repeated"
INPUT, CHECKPOINT, EVALUATION, OTHER = "input", "checkpoint", "evaluation", "other"
CLASSES = (PRODUCTIVE, START, RESTART, REPEATED, INPUT, CHECKPOINT, EVALUATION, OTHER)
"""Classes of a run's time. start: time until the first step, and its excess over the next step. restart: the same for
each further attempt, from the last event of the previous one. repeated: steps that were taken before. input: part of
steps spent waiting for rows. checkpoint: part spent waiting for a checkpoint. other: the rest, such as the end of the
run."""
NEWER = ("longest_without_checkpoint_s",)
"""Keys missing in states of older versions."""


@dataclass
class GoodputLedger:
    """Seconds by class up to a given time; `add_...` take events in order. Times are in seconds since 1970."""

    started_at: float
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    attempts: int = 0
    repeated_steps: int = 0
    last_step: int = 0
    """Newest step ever taken."""
    at: float = 0.0
    """Time of the last recorded event, in seconds since 1970."""
    longest_without_checkpoint_s: float = 0.0
    """Longest training time of any attempt that no checkpoint covered."""
    # of this attempt
    _begun_at: float = 0.0
    _first: tuple[float, str] | None = None  # seconds of its first step, and its class
    _previous_step: int | None = None
    _is_first_of_two: bool = False
    _held_at: float = 0.0  # start of the work that no checkpoint holds

    def begin(self, at: float) -> None:
        """Begin an attempt: the run's first one, or its continuation from a checkpoint. The time since the last event
        of the previous attempt is part of the restart.
        """
        self.attempts += 1
        self._begun_at = self.at if self.attempts > 1 else self.started_at
        self._previous_step, self._first, self._is_first_of_two = None, None, True
        self.at = max(self.at, at) if self.attempts == 1 else self.at

    def add_step(self, step: int, *, step_s: float, waited_s: float, at: float) -> None:
        """Record the end of a step. step_s: includes `waited_s` for input, and the wait for a checkpoint."""
        if step == self._previous_step:
            return  # a repeated message
        if self._previous_step is not None and step != self._previous_step + 1:
            self.begin(at)  # workers were lost, and others continue
        if self._previous_step is None and self.attempts == 0:
            self.begin(at)
        if self._previous_step is None:
            self._held_at = at - step_s
        self._hold(at)
        is_repeated = step <= self.last_step
        self.repeated_steps += is_repeated
        kind, begun = REPEATED if is_repeated else PRODUCTIVE, START if self.attempts == 1 else RESTART
        self._previous_step, self.last_step = step, max(step, self.last_step)
        if self._is_first_of_two:
            self._is_first_of_two, self._first = False, (step_s, kind)
            self.seconds[begun] += max(0.0, at - self._begun_at)
        else:
            if self._first is not None:  # the first step's excess over this one stays in the start
                first_s = min(self._first[0], step_s)
                self.seconds[begun] -= first_s
                self.seconds[self._first[1]] += first_s
                self._first = None
            waited_s = min(waited_s, step_s)
            self.seconds[kind] += step_s - waited_s
            self.seconds[REPEATED if is_repeated else INPUT] += waited_s
        self.at = max(self.at, at)

    def add_evaluation(self, duration_s: float, *, at: float) -> None:
        """Record the end of an evaluation between two steps."""
        self.seconds[EVALUATION] += duration_s
        self.at = max(self.at, at)

    def add_checkpoint(self, step: int, stall_s: float, *, at: float, took_s: float = 0.0) -> None:
        """Record that a checkpoint of `step`, which stalled the training, is complete. The next step, whose time
        includes the stall, may have ended already. took_s: seconds since it began, when its state was taken."""
        if self._previous_step is not None:
            self._hold(at)
            self._held_at = at - took_s
        self.seconds[CHECKPOINT] += stall_s
        if step < self.last_step:
            self.seconds[PRODUCTIVE] -= min(stall_s, self.seconds[PRODUCTIVE])
        self.at = max(self.at, at)

    def _hold(self, at: float) -> None:
        """Count the work so far that no checkpoint covers."""
        self.longest_without_checkpoint_s = max(self.longest_without_checkpoint_s, at - self._held_at)

    def goodput(self, now: float) -> Goodput:
        """Return the breakdown of the whole time so far. Unexplained time is `other`; if the classes exceed the total,
        because clocks disagree, productive time is reduced."""
        elapsed_s = max(0.0, now - self.started_at)
        seconds = {name: max(0.0, value) for name, value in self.seconds.items()}
        rest = elapsed_s - sum(seconds.values())
        for name in (PRODUCTIVE, REPEATED, START, RESTART, INPUT, CHECKPOINT, EVALUATION):
            if rest < 0:
                taken = min(seconds[name], -rest)
                seconds[name] -= taken
                rest += taken
        # exactly the rest, so that the classes sum to the total
        seconds[OTHER] = max(0.0, elapsed_s - sum(value for name, value in seconds.items() if name != OTHER))
        longest = self.longest_without_checkpoint_s or None
        return Goodput(elapsed_s, seconds, max(1, self.attempts), self.repeated_steps, longest)

    def state(self) -> dict[str, Any]:
        """Return the state from which the next attempt continues, as JSON."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}

    @classmethod
    def of(cls, state: Mapping[str, Any] | None, *, started_at: float) -> GoodputLedger:
        """Return the ledger of a resumed run; without a readable state it starts with this attempt."""
        try:
            assert state is not None
            known = {name: state[name] for name in cls(0.0).state() if name in state or name not in NEWER}
            ledger = cls(**known)
            ledger.seconds = {name: float(known["seconds"][name]) for name in CLASSES}
            return ledger
        except (AssertionError, KeyError, TypeError, ValueError):
            return cls(started_at)
