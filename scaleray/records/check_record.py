"""Record of a check of a workload."""

from dataclasses import dataclass, field
from typing import Any

from scaleray.records.json_record import JsonRecord

GOOD, DOUBTFUL, WRONG = "good", "doubtful", "wrong"


@dataclass(frozen=True)
class Finding:
    """One finding. verdict: good, doubtful (training can still start) or wrong."""

    subject: str
    verdict: str
    text: str


@dataclass(frozen=True)
class ColumnFacts:
    """A column of a micro-batch as passed to the loss. low, high: range over the rows read; None if not numeric."""

    name: str
    shape: str
    dtype: str
    low: float | None
    high: float | None


@dataclass(frozen=True)
class CheckRecord(JsonRecord):
    """Result of `scaleray check`."""

    workload: str
    findings: list[Finding] = field(default_factory=list)
    columns: list[ColumnFacts] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    """Measurements: loss, count, rows by split, parameters, bytes, rows per second."""
    duration_s: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not any(finding.verdict == WRONG for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The result in one line."""
        wrong = [f.subject for f in self.findings if f.verdict == WRONG]
        doubtful = [f.subject for f in self.findings if f.verdict == DOUBTFUL]
        if wrong:
            return f"{len(wrong)} of {len(self.findings)} checks failed: {', '.join(wrong)}"
        more = f"; please review: {', '.join(doubtful)}" if doubtful else ""
        return f"ready to train: {len(self.findings)} checks, none failed{more}"
