"""How much of a run's time was steps that count, over all its attempts, and what became of the rest.

Filled by live/state/run_state.py with every step, evaluation and checkpoint. The classes are those of Google's
ml-goodput-measurement, as far as they are known here; unlike there a step is productive for as long as it took, not for
as long as an ideal one would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from scaleray.records.profile_record import Goodput

PRODUCTIVE, START, RESTART, REPEATED = "productive", "start", "restart", "repeated"
INPUT, CHECKPOINT, EVALUATION, OTHER = "input", "checkpoint", "evaluation", "other"
CLASSES = (PRODUCTIVE, START, RESTART, REPEATED, INPUT, CHECKPOINT, EVALUATION, OTHER)
"""Where the time of a run goes. start: to the first step, and what that took longer than the next. restart: the same
for each further attempt, from the last sign of the one before. repeated: steps that had been taken before. input: steps
that waited for rows. checkpoint: steps that waited for one. other: the rest, such as the end of the run."""
NEWER = ("longest_without_checkpoint_s",)
"""Keys that states of older versions lack."""


@dataclass
class GoodputLedger:
    """Seconds by class up to a moment; `add_...` take what happens, in order. Wall clocks are seconds since 1970."""

    started_at: float
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    attempts: int = 0
    repeated_steps: int = 0
    last_step: int = 0
    """Newest step that was ever taken."""
    at: float = 0.0
    """Time of the last event that the ledger has heard of, in seconds since 1970."""
    longest_without_checkpoint_s: float = 0.0
    """Longest time of training, in any attempt, whose work no checkpoint held yet."""
    # of this attempt
    _begun_at: float = 0.0
    _first: tuple[float, str] | None = None  # seconds of its first step, and their class
    _previous_step: int | None = None
    _is_first_of_two: bool = False
    _held_at: float = 0.0  # when the work began that no checkpoint holds

    def begin(self, at: float) -> None:
        """Begin another attempt: the run itself, or its continuation after a checkpoint. The time since the last sign
        of the attempt before is part of the restart.
        """
        self.attempts += 1
        self._begun_at = self.at if self.attempts > 1 else self.started_at
        self._previous_step, self._first, self._is_first_of_two = None, None, True
        self.at = max(self.at, at) if self.attempts == 1 else self.at

    def add_step(self, step: int, *, step_s: float, waited_s: float, at: float) -> None:
        """A step has ended. step_s: with `waited_s` for input, and what it waited for a checkpoint."""
        if step == self._previous_step:
            return  # a message that came twice
        if self._previous_step is not None and step != self._previous_step + 1:
            self.begin(at)  # workers were lost, and others go on
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
            if self._first is not None:  # what the first step took longer than this one stays in the start
                first_s = min(self._first[0], step_s)
                self.seconds[begun] -= first_s
                self.seconds[self._first[1]] += first_s
                self._first = None
            waited_s = min(waited_s, step_s)
            self.seconds[kind] += step_s - waited_s
            self.seconds[REPEATED if is_repeated else INPUT] += waited_s
        self.at = max(self.at, at)

    def add_evaluation(self, duration_s: float, *, at: float) -> None:
        """An evaluation between two steps has ended."""
        self.seconds[EVALUATION] += duration_s
        self.at = max(self.at, at)

    def add_checkpoint(self, step: int, stall_s: float, *, at: float, took_s: float = 0.0) -> None:
        """A checkpoint of `step`, for which the training stood still, is complete: by then the next step may be, which
        had that in its time. took_s: seconds from its beginning, whose state it holds."""
        if self._previous_step is not None:
            self._hold(at)
            self._held_at = at - took_s
        self.seconds[CHECKPOINT] += stall_s
        if step < self.last_step:
            self.seconds[PRODUCTIVE] -= min(stall_s, self.seconds[PRODUCTIVE])
        self.at = max(self.at, at)

    def _hold(self, at: float) -> None:
        """Count the work until now that no checkpoint holds."""
        self.longest_without_checkpoint_s = max(self.longest_without_checkpoint_s, at - self._held_at)

    def goodput(self, now: float) -> Goodput:
        """The whole time until now. What no class explains is `other`; where clocks disagree, so that the classes have
        more than there was, the productive steps give way."""
        elapsed_s = max(0.0, now - self.started_at)
        seconds = {name: max(0.0, value) for name, value in self.seconds.items()}
        rest = elapsed_s - sum(seconds.values())
        for name in (PRODUCTIVE, REPEATED, START, RESTART, INPUT, CHECKPOINT, EVALUATION):
            if rest < 0:
                taken = min(seconds[name], -rest)
                seconds[name] -= taken
                rest += taken
        # exactly the rest, so that the classes sum to the whole
        seconds[OTHER] = max(0.0, elapsed_s - sum(value for name, value in seconds.items() if name != OTHER))
        longest = self.longest_without_checkpoint_s or None
        return Goodput(elapsed_s, seconds, max(1, self.attempts), self.repeated_steps, longest)

    def state(self) -> dict[str, Any]:
        """State from which the next attempt continues, as JSON."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}

    @classmethod
    def of(cls, state: Mapping[str, Any] | None, *, started_at: float) -> GoodputLedger:
        """The ledger of a run that continues; without a readable state it begins with this attempt."""
        try:
            assert state is not None
            known = {name: state[name] for name in cls(0.0).state() if name in state or name not in NEWER}
            ledger = cls(**known)
            ledger.seconds = {name: float(known["seconds"][name]) for name in CLASSES}
            return ledger
        except (AssertionError, KeyError, TypeError, ValueError):
            return cls(started_at)
