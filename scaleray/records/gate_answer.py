"""Results of a gate and of its checks, and how they are combined.

Missing evidence is `inconclusive`, which never counts as passed; nor does a gate without checks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from scaleray.common.printed import printable

Answer = Literal["pass", "fail", "inconclusive"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check of a gate: the question, the result as a word and as a sentence, and the underlying numbers."""

    what: str
    answer: Answer
    words: str
    numbers: dict[str, float] = field(default_factory=dict)
    power: float | None = None
    """Probability that the check passes with this many runs if nothing is worse. None for a check without noise."""
    runs_needed: int | None = None
    """Runs per side, or of `needed_of`, with which that probability reaches `POWER`. None for a check without noise, if
    the noise is unknown, or if no number suffices."""
    needed_of: str = "runs of each side"
    remedy: str = ""
    """Command or key to continue with, if the check did not pass. `-c FILE` is the run's config, `RUN` the run, and
    `--seed N` the next seed; the gate replaces them once known."""

    def __post_init__(self) -> None:
        for name in ("what", "words", "remedy"):  # one line each: a record's text must not look like another check
            object.__setattr__(self, name, printable(getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """Result of one gate. command: repeats the gate on the same evidence."""

    gate: str
    answer: Answer
    checks: list[Check]
    command: str = ""


def together(answers: Iterable[Answer]) -> Answer:
    """Combine results: `fail` if any fails, otherwise `inconclusive` if any is or there are none."""
    found = list(answers)
    if "fail" in found:
        return "fail"
    return "inconclusive" if not found or "inconclusive" in found else "pass"


def gate_of(gate: str, checks: Sequence[Check]) -> GateResult:
    """Return the gate's result, from its checks."""
    return GateResult(gate=gate, answer=together(check.answer for check in checks), checks=list(checks))
