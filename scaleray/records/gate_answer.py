"""The three answers of a gate, and how the answers of its checks make one.

Missing evidence is `inconclusive`, which never counts as passed: a gate without a single check is inconclusive too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from scaleray.common.printed import printable

Answer = Literal["pass", "fail", "inconclusive"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check of a gate: the question, the answer as a word and as a sentence, and the numbers behind it."""

    what: str
    answer: Answer
    words: str
    numbers: dict[str, float] = field(default_factory=dict)
    power: float | None = None
    """Probability that the check passes with as many runs where nothing is worse. None for a check without noise."""
    runs_needed: int | None = None
    """Runs of each side, or of `needed_of`, with which that probability reaches `POWER`. None for a check without
    noise, if the noise is unknown, or if no number suffices."""
    needed_of: str = "runs of each side"
    remedy: str = ""
    """Command or key to continue with, if the check did not pass. `-c FILE` means the run's config, `RUN` the run, and
    `--seed N` the next seed, until the gate knows them.
    """

    def __post_init__(self) -> None:
        for name in ("what", "words", "remedy"):  # a line each: a record's text must not look like another check
            object.__setattr__(self, name, printable(getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """Answer of one gate. command: repeats the gate on the same evidence."""

    gate: str
    answer: Answer
    checks: list[Check]
    command: str = ""


def together(answers: Iterable[Answer]) -> Answer:
    """Combine answers: `fail` if one fails, else `inconclusive` if one is or there is none."""
    found = list(answers)
    if "fail" in found:
        return "fail"
    return "inconclusive" if not found or "inconclusive" in found else "pass"


def gate_of(gate: str, checks: Sequence[Check]) -> GateResult:
    """The gate's answer from its checks."""
    return GateResult(gate=gate, answer=together(check.answer for check in checks), checks=list(checks))
