"""Definition of an alert rule: its condition, the cost of ignoring it, and the remedy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from scaleray.config.alerts import AlertLimits, Severity
from scaleray.live.rules.series_history import SeriesHistory
from scaleray.records.text import units

Unit = Literal["seconds", "share", "bytes", "number", "count"]
IN_PROMETHEUS: dict[Unit, str] = {
    "seconds": "{{ $value | humanizeDuration }}",
    "share": "{{ $value | humanizePercentage }}",
    "bytes": "{{ $value | humanize1024 }}B",
    "number": '{{ $value | printf "%.3g" }}',
    "count": '{{ $value | printf "%.0f" }}',
}
IN_WORDS: dict[Unit, Callable[[float], str]] = {
    "seconds": units.seconds,
    "share": lambda value: f"{value:.3g} %" if (value := 100 * value) < 1e3 else f"{value:.0f} %",
    "bytes": units.memory,
    "number": lambda value: f"{value:.3g}",
    "count": lambda value: f"{value:.0f}",
}
OF_RANK = "rank {{ $labels.rank }} on {{ $labels.node }}"
OF_LINK = "rank {{ $labels.source }} to rank {{ $labels.to }}"
OF_GPU = "GPU {{ $labels.gpu }} of {{ $labels.instance }}"


@dataclass(frozen=True)
class Match:
    """Result of a predicate. of: the affected rank or device, if any."""

    value: float
    of: str = ""


Query = Callable[[AlertLimits], str]
Predicate = Callable[[SeriesHistory, AlertLimits], Match | None]


@dataclass(frozen=True)
class Rule:
    """One alert rule. query: PromQL that has a value while the condition holds. predicate: the same check within a run;
    None if it needs facts that the run lacks."""

    name: str
    severity: Severity
    summary: str
    """Text of the alert; {value} is replaced by the value, {of} by the rank or device."""
    unit: Unit
    costs: str
    """Cost of ignoring the alert."""
    advice: str
    """Remedy."""
    panel: tuple[str, str]
    """Dashboard and title of the panel that shows the condition."""
    query: Query
    predicate: Predicate | None = None
    for_s: float = 0.0
    """Seconds that the condition must last before Prometheus raises the alert."""
    steps_in_a_row: bool = False
    """Whether the run itself counts steps instead of these seconds."""
    of: str = ""
    """Template for the name of the rank or device, from the labels of its series."""

    @property
    def alertname(self) -> str:
        """Alert name in Prometheus, such as ScalerayNoProgress."""
        return "Scaleray" + "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def lasts_s(self) -> float:
        """Seconds that the condition must last before the run itself raises the alert."""
        return 0.0 if self.steps_in_a_row else self.for_s

    def to_text(self, found: Match) -> str:
        """Summary with the measured value."""
        return self.summary.format(value=IN_WORDS[self.unit](found.value), of=found.of)

    def in_prometheus(self) -> str:
        """Summary as a Prometheus template."""
        return self.summary.format(value=IN_PROMETHEUS[self.unit], of=self.of)
