"""Which alerts begin and end in one run, look after look."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from scaleray.config.alerts import AlertLimits
from scaleray.live.rules import course, gpu_rules, learning_rules, speed_rules, upkeep_rules
from scaleray.live.rules.rule import Found, Rule
from scaleray.live.rules.series_history import Seen
from scaleray.records.alert_record import Alert

RULES: tuple[Rule, ...] = (
    *course.RULES,
    *speed_rules.RULES,
    *learning_rules.RULES,
    *upkeep_rules.RULES,
    *gpu_rules.RULES,
)
BY_NAME = {rule.name: rule for rule in RULES}


KEEP_S = 60.0
"""Seconds without it after which an alert is over: one that comes and goes is raised once."""


@dataclass
class _State:
    """State of one rule: since when it holds, when it last did, and the alert it raised."""

    since: float | None = None
    held_at: float = 0.0
    alert: Alert | None = None


class Judge:
    """Looks at a run with all rules that need no other run. guarded: calls a rule's predicate, whose slip must not keep
    the others from being judged."""

    def __init__(
        self,
        limits: AlertLimits,
        *,
        without: Iterable[str] = (),
        guarded: Callable[[Rule, Callable[[], Found | None]], Found | None] = lambda rule, look: look(),
    ) -> None:
        self.limits, self._guarded = limits, guarded
        left_out = set(without)
        self.rules = [rule for rule in RULES if rule.predicate is not None and rule.name not in left_out]
        self._states = {rule.name: _State() for rule in self.rules}

    @property
    def firing(self) -> list[Alert]:
        """Alerts that are not over."""
        return [state.alert for state in self._states.values() if state.alert is not None]

    def look(self, seen: Seen) -> list[Alert]:
        """The alerts that begin or end at this look."""
        changed = [self._look(rule, seen) for rule in self.rules]
        return [alert for alert in changed if alert is not None]

    def _look(self, rule: Rule, seen: Seen) -> Alert | None:
        predicate, state = rule.predicate, self._states[rule.name]
        assert predicate is not None
        found = self._guarded(rule, lambda: predicate(seen, self.limits))
        if found is None:
            state.since = None
            return self._end(state, seen.now)
        state.held_at = seen.now
        if state.since is None:
            state.since = seen.now
        if state.alert is not None or seen.now - state.since < rule.lasts_s:
            return None
        state.alert = Alert(
            rule.name, rule.severity, "firing", state.since, found.value, rule.in_words(found), recorded_at=seen.now
        )
        return state.alert

    @staticmethod
    def _end(state: _State, now: float) -> Alert | None:
        if state.alert is None or now - state.held_at < KEEP_S:
            return None
        ended, state.alert = replace(state.alert, state="resolved", recorded_at=now), None
        return ended
