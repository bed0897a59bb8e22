"""Evaluate the rules for one run: which alerts begin and end at each check."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from scaleray.common.watchers import Guard, Watcher
from scaleray.config.alerts import AlertLimits
from scaleray.live.rules import gpu_rules, learning_rules, progress_rules, speed_rules, upkeep_rules
from scaleray.live.rules.rule import Rule
from scaleray.live.rules.series_history import SeriesHistory
from scaleray.records.alert_record import Alert

RULES: tuple[Rule, ...] = (
    *progress_rules.RULES,
    *speed_rules.RULES,
    *learning_rules.RULES,
    *upkeep_rules.RULES,
    *gpu_rules.RULES,
)
BY_NAME = {rule.name: rule for rule in RULES}


KEEP_S = 60.0
"""Seconds without its condition after which an alert ends, so that a flickering condition raises one alert."""


@dataclass
class _State:
    """State of one rule: when its condition began and last held, and the alert it raised."""

    since: float | None = None
    held_at: float = 0.0
    alert: Alert | None = None

    def ended(self, now: float) -> Alert | None:
        """The alert if it is over, as the condition has not held for long enough; otherwise None."""
        self.since = None
        if self.alert is None or now - self.held_at < KEEP_S:
            return None
        over, self.alert = replace(self.alert, state="resolved", recorded_at=now), None
        return over


class RuleEvaluator:
    """Checks a run with all rules that have a predicate. guard: calls a predicate, so that an error in one does not
    prevent the others."""

    def __init__(self, limits: AlertLimits, guard: Guard, *, without: Iterable[str] = ()) -> None:
        self.limits, self._guard = limits, guard
        left_out = set(without)
        self._states = [
            (rule, rule.predicate, _State())
            for rule in RULES
            if rule.predicate is not None and rule.name not in left_out
        ]

    @property
    def firing(self) -> list[Alert]:
        """Alerts that are currently firing."""
        return [state.alert for _, _, state in self._states if state.alert is not None]

    def check(self, seen: SeriesHistory) -> list[Alert]:
        """Alerts that begin or end at this check."""
        changed: list[Alert | None] = []
        for rule, predicate, state in self._states:
            found = self._guard(Watcher.ALERTS, partial(predicate, seen, self.limits), None, part=rule.name)
            if found is None:
                changed.append(state.ended(seen.now))
                continue
            state.held_at, state.since = seen.now, seen.now if state.since is None else state.since
            if state.alert is None and seen.now - state.since >= rule.lasts_s:
                text = rule.to_text(found)
                state.alert = Alert(
                    rule.name, rule.severity, "firing", state.since, found.value, text, recorded_at=seen.now
                )
                changed.append(state.alert)
        return [alert for alert in changed if alert is not None]
