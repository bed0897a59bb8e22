"""Parts of a verdict: possible limits, findings on them, and advice."""

from dataclasses import dataclass, field
from enum import StrEnum

from scaleray.records.text.units import seconds


class Limit(StrEnum):
    """Causes of lost time in a training, under their names in a verdict."""

    INPUT = "input"
    COPY = "copy to device"
    COMPUTE = "compute"
    """No other limit: the steps consist of the model's own work."""
    COMMUNICATION = "exposed communication"
    HOST = "launch/host"
    """Python between and around the passes: callbacks, logging, garbage collection, unnecessary waits for the
    device."""
    STRAGGLER = "straggler"
    """Workers that the others wait for."""
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    MEMORY = "memory pressure"
    """The allocator releases memory and requests it again, as free memory is scarce or fragmented."""
    INCOMPLETE = "incomplete"
    """The measurements are insufficient for a verdict."""


@dataclass(frozen=True)
class Advice:
    """Advice on a limit. keys: config keys to change. commands: commands to run."""

    text: str
    keys: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A cause of lost time.

    share: part of the elapsed time saved by removing the cause, between low and high in 9 of 10 resamples of the steps;
    None if its cost is unknown. gain: upper bound on the speed-up from removing it. likelihood: share of the resamples
    in which it is large enough to be reported.
    """

    limit: Limit
    share: float | None
    low: float = 0.0
    high: float = 1.0
    gain: float | None = None
    likelihood: float = 1.0
    evidence: str = ""
    cause: str = ""
    """Specific cause, such as `garbage collection`, if known."""
    ranks: tuple[int, ...] = ()
    """Stragglers, slowest first, or ranks that wait for their rows while others do not."""
    phase: str | None = None
    """Phase in which a straggler falls behind."""
    bucket: int | None = None
    """Gradient bucket, numbered from 0 in the order of a backward pass, before which a straggler falls behind, or which
    is the last one waited for."""
    layers: str = ""
    """Layers of the bucket."""
    advice: Advice = Advice("")


@dataclass(frozen=True)
class Verdict:
    """Verdict on a training: a primary finding, other findings ordered by share, and a sentence."""

    primary: Finding
    others: tuple[Finding, ...]
    sentence: str
    confidence: str
    """Confidence in the primary finding: `sure`, `likely` or `unsure`, see CONFIDENT."""
    steps: int
    """Number of steps used, without the first ones of the run."""
    step_s: float
    """Mean time of a step, including its share of evaluations and checkpoints."""
    shares: dict[str, float] = field(default_factory=dict)
    """Shares of the time by limit, which sum to 1."""
    notes: tuple[str, ...] = ()
    """Questions that could not be answered, with reasons."""

    @property
    def limit(self) -> Limit:
        """The primary limit."""
        return self.primary.limit

    def lines(self) -> list[str]:
        """Lines of the verdict for a terminal: the sentence, then its evidence."""
        words = [self.sentence]
        if self.primary.evidence:
            words.append(f"why: {self.primary.evidence}")
        if self.steps:
            mean = f"{seconds(self.step_s)} on average, evaluations and checkpoints included"
            words.append(f"{self.confidence}: based on {self.steps} steps, {mean}")
        return [*words, *(f"also: {_in_short(one)}" for one in self.others), *(f"unknown: {n}" for n in self.notes)]


def _in_short(finding: Finding) -> str:
    share = "" if finding.share is None else f" {finding.share:.0%}"
    gain = "" if finding.gain is None else f", at most {finding.gain:.2f}x without it"
    advice = f"; next: {finding.advice.text}" if finding.advice.text else ""
    link = finding.cause if finding.limit is Limit.COMMUNICATION else ""  # for others the evidence includes it
    why = "; ".join(filter(None, [finding.evidence, link]))
    return f"{finding.limit}{share}{gain}{': ' + why if why else ''}{advice}"
