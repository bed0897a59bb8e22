"""All rules, in one table."""

from __future__ import annotations

from scaleray.monitoring.rules import course, gpus, learning, speed, upkeep
from scaleray.monitoring.rules.rule import Rule

RULES: tuple[Rule, ...] = (*course.RULES, *speed.RULES, *learning.RULES, *upkeep.RULES, *gpus.RULES)
BY_NAME = {rule.name: rule for rule in RULES}
