"""All rules, in one table."""

from __future__ import annotations

from scaleray.live.rules import course, gpu_rules, learning_rules, speed_rules, upkeep_rules
from scaleray.live.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    *course.RULES,
    *speed_rules.RULES,
    *learning_rules.RULES,
    *upkeep_rules.RULES,
    *gpu_rules.RULES,
)
BY_NAME = {rule.name: rule for rule in RULES}
