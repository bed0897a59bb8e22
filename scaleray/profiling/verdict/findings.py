"""Parts of a verdict: the limits that there are, the finding for each, and the advice."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from scaleray.records.text.units import seconds


class Limit(StrEnum):
    """Causes of lost time in a training, under the names of a verdict."""

    INPUT = "input"
    COPY = "copy to device"
    COMPUTE = "compute"
    """Nothing else: the steps are the model's own work."""
    COMMUNICATION = "exposed communication"
    HOST = "launch/host"
    """Python between and around the passes: callbacks, logging, pauses of the garbage collector, waiting for the device
    where nothing needed it."""
    STRAGGLER = "straggler"
    """Workers that the others wait for."""
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    MEMORY = "memory pressure"
    """The allocator gives memory back and asks again, as what is free is too little or in pieces."""
    INCOMPLETE = "incomplete"
    """The measurements do not suffice for a verdict."""


@dataclass(frozen=True)
class Advice:
    """Advice. keys: of the config; commands: to run."""

    text: str
    keys: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One thing that time is lost to.

    share: of the elapsed time that goes when it goes, between low and high in 9 of 10 resamples of the steps; None:
    seen, at an unknown cost. gain: how many times as fast the training would be without it, at most. likelihood: share
    of the resamples in which it is large enough to be reported.
    """

    limit: Limit
    share: float | None
    low: float = 0.0
    high: float = 1.0
    gain: float | None = None
    likelihood: float = 1.0
    evidence: str = ""
    cause: str = ""
    """Particular cause, such as `garbage collection`, if it is known."""
    ranks: tuple[int, ...] = ()
    """Stragglers, the slowest first, or the ranks that wait for their rows where others do not."""
    phase: str | None = None
    """Phase in which a straggler falls behind."""
    bucket: int | None = None
    """Gradient bucket, from 0 in the order of a backward pass, before which a straggler falls behind, or which is the
    last to be waited for."""
    layers: str = ""
    """Layers of the bucket."""
    advice: Advice = Advice("")


@dataclass(frozen=True)
class Verdict:
    """Limit of a training: one primary finding, others in the order of their shares, and a sentence."""

    primary: Finding
    others: tuple[Finding, ...]
    sentence: str
    confidence: str
    """How sure the primary finding is: `sure`, `likely` or `unsure`, see CONFIDENT."""
    steps: int
    """Number of steps that the verdict rests on, without the first ones of the run."""
    step_s: float
    """Mean time of a step, with its part of evaluations and checkpoints."""
    shares: dict[str, float] = field(default_factory=dict)
    """Shares of the time by limit, which add up to 1."""
    notes: tuple[str, ...] = ()
    """Questions that could not be answered, and why."""

    @property
    def limit(self) -> Limit:
        """The primary limit."""
        return self.primary.limit

    def lines(self) -> list[str]:
        """The verdict for a terminal: the sentence, then its evidence."""
        words = [self.sentence]
        if self.primary.evidence:
            words.append(f"why: {self.primary.evidence}")
        if self.steps:
            words.append(f"{self.confidence}: by {self.steps} steps of {seconds(self.step_s)}")
        return [*words, *(f"also: {_in_short(one)}" for one in self.others), *(f"not told: {n}" for n in self.notes)]


def _in_short(finding: Finding) -> str:
    share = "" if finding.share is None else f" {finding.share:.0%}"
    gain = "" if finding.gain is None else f", at most {finding.gain:.2f}x without it"
    advice = f"; next: {finding.advice.text}" if finding.advice.text else ""
    link = finding.cause if finding.limit is Limit.COMMUNICATION else ""  # of others the evidence has it
    why = "; ".join(filter(None, [finding.evidence, link]))
    return f"{finding.limit}{share}{gain}{': ' + why if why else ''}{advice}"
