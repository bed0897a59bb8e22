"""Results of gates and their checks, and the rule that combines them.

Missing evidence makes a check `inconclusive`, which never counts as passed; nor does a gate without checks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from scaleray.common.printed import printable

Answer = Literal["pass", "fail", "inconclusive"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check of a gate: the question, the result as a word and as a sentence, and the numbers behind it."""

    what: str
    answer: Answer
    words: str
    numbers: dict[str, float] = field(default_factory=dict)
    power: float | None = None
    """Probability that the check passes with this many runs if nothing is worse; None for a check without noise."""
    runs_needed: int | None = None
    """Number of runs per side, or of `needed_of`, at which that probability reaches `POWER`. None for a check without
    noise, if the noise is unknown, or if no number suffices."""
    needed_of: str = "runs of each side"
    remedy: str = ""
    """Command or key with which to continue if the check did not pass. `-c FILE` stands for the run's config, `RUN` for
    the run, and `--seed N` for the next seed; the gate fills them in once known."""

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
    """Combine results: `fail` if any is `fail`, else `inconclusive` if any is or there are none, else `pass`."""
    found = list(answers)
    if "fail" in found:
        return "fail"
    return "inconclusive" if not found or "inconclusive" in found else "pass"


def gate_of(gate: str, checks: Sequence[Check]) -> GateResult:
    """Return the gate's result, derived from its checks."""
    return GateResult(gate=gate, answer=together(check.answer for check in checks), checks=list(checks))
