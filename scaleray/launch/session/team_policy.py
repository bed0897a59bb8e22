"""What a team asks of every training, study, sweep, plan and profile before it starts: a YAML file with two levels.

    invariants:            # never to be broken
      purpose: required
      uncommitted: false
      global_batch: <= 8192
    constraints:           # may be broken with a reason, which is recorded
      gpus: <= 64
      rule: [linear, sqrt]

A field is one of the registry's or a key of the config; what it must be is `required`, a value, a list of values, or
whatever `registry list --where` takes after a field.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scaleray.config.loading import known_keys
from scaleray.errors import ConfigError, first_line
from scaleray.parsing import BoundedLoader, near_words
from scaleray.records.experiment import REQUIRED
from scaleray.records.where import Condition

KEY = "tracking.policy"
LEVELS = ("invariants", "constraints")
OWN_FIELDS = (*REQUIRED, "gpus", "model", "strategy", "uncommitted")
"""Fields of a policy beside the keys of the config."""
SIGNS = ("<", ">", "=", "!=", "in ", "is ")
HINTS = {
    "owner": "say who answers for it: --tracking.owner NAME",
    "purpose": "say what it is for: --tracking.purpose 'WORDS'",
    "cost": "say what a worker costs: --study.price-per-worker-hour PRICE",
    "uncommitted": "commit the changes, so that the code can be found again",
    "code": "run it in a git checkout, or set GIT_COMMIT to the commit",
    "data_hash": "train on rows whose content can be hashed",
}
"""What to do about a field that is not as it must be."""


@dataclass(frozen=True)
class Rule:
    """What a field must be. where: file and line. allowed: in words, as the file has it."""

    field: str
    allowed: str
    condition: Condition
    where: str
    may_break: bool

    def refusal(self, found: Any) -> ConfigError:
        """The error for a value that is not allowed."""
        hint = HINTS.get(self.field, f"give another --{self.field.replace('_', '-')}" if "." in self.field else "")
        if self.may_break:
            why = "say why it must be so, which is recorded: --tracking.policy-reason 'WORDS'"
            hint = f"{hint}; or {why}" if hint else why
        level = "a constraint" if self.may_break else "an invariant"
        wanted = f"{level} of the team's policy requires it"
        if self.allowed != "required":
            wanted = f"it must be {self.allowed} by {level} of the team's policy"
        return ConfigError(f"{self.where} {self.field}", found, wanted, hint)


@dataclass(frozen=True)
class TeamPolicy:
    """The rules of a policy file. name: of the file with the beginning of its SHA-256, for the record."""

    name: str
    rules: tuple[Rule, ...]

    def check(self, values: Mapping[str, Any], *, reason: str | None) -> list[str]:
        """The constraints that these values break, each in words with the reason; rules of fields that are not among
        the values are left for later. Raises ConfigError for one that may not be broken, or without a reason."""
        broken = []
        for rule in self.rules:
            if not set(rule.condition.fields) <= values.keys():
                continue
            found = values[rule.field]
            try:
                holds = rule.condition.holds(values)
            except ValueError:  # a word where a number is asked for
                holds = False
            if holds:
                continue
            if not rule.may_break or not reason:
                raise rule.refusal(found)
            broken.append(f"{rule.field} is {found}, not {rule.allowed} ({rule.where}): {reason}")
        return broken


def read_team_policy(path: str | Path) -> TeamPolicy:
    """The policy in a file. Raises ConfigError with file and line for whatever is no policy."""
    place = Path(path).expanduser()
    try:
        text = place.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            KEY, str(path), "there is no such file", "name the team's YAML file, or leave it out"
        ) from None
    except (OSError, ValueError) as exc:
        raise ConfigError(KEY, str(path), f"it cannot be read: {first_line(exc)}") from exc
    loader = None
    try:
        loader = BoundedLoader(text)
        node = loader.get_single_node()
        rules = _rules(loader, node, str(path))
    except (ValueError, RecursionError, yaml.YAMLError) as exc:
        mark = getattr(exc, "problem_mark", None)
        at = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(exc, "problem", None) or first_line(exc)
        raise ConfigError(f"{KEY} {at}", "not readable as YAML", str(problem)) from exc
    finally:
        if loader is not None:
            loader.dispose()
    return TeamPolicy(f"{place.name} sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}", tuple(rules))


def _rules(loader: BoundedLoader, node: yaml.Node | None, name: str) -> list[Rule]:
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{KEY} {name}", "no mapping", f"it holds sections: {', '.join(LEVELS)}")
    found: list[Rule] = []
    for key, section in node.value:
        where, level = f"{name}:{key.start_mark.line + 1}", str(key.value)
        if level not in LEVELS:
            near = near_words(level, LEVELS)
            hint = f"did you mean {near[0]}?" if near else f"sections are {', '.join(LEVELS)}"
            raise ConfigError(f"{where} {level}", "an unknown section", "only known sections are allowed", hint)
        if not isinstance(section, yaml.MappingNode):
            raise ConfigError(f"{where} {level}", "no mapping", "it holds fields with what they must be")
        found += [
            _rule(field, loader.construct_object(value, deep=True), name, may_break=level == "constraints")
            for field, value in section.value
        ]
    return found


def _rule(key: yaml.Node, value: Any, name: str, *, may_break: bool) -> Rule:
    where, field = f"{name}:{key.start_mark.line + 1}", str(key.value)
    known = [*OWN_FIELDS, *known_keys()]
    words = _in_words(value)
    try:
        condition = Condition.parse(f"{field} {words}")
    except ValueError as exc:
        allowed = f"what a field must be is required, a value, a list, or such as '<= 64': {exc}"
        raise ConfigError(f"{where} {field}", value, allowed) from exc
    for one in (field, *condition.fields):
        if one not in known:
            near = near_words(one, known)
            hint = f"did you mean {near[0]}?" if near else f"fields are {', '.join(OWN_FIELDS)}, and keys of the config"
            raise ConfigError(f"{where} {one}", "an unknown field", "a team's policy knows no such one", hint)
    allowed = f"one of {', '.join(map(str, value))}" if isinstance(value, list) else str(value)
    allowed = allowed.lower() if isinstance(value, bool) else allowed
    return Rule(field, allowed, condition, where, may_break)


def _in_words(value: Any) -> str:
    """What comes after the field in a condition."""
    if isinstance(value, str) and value.startswith(SIGNS):
        return value
    if value == "required":
        return "is known"
    if isinstance(value, list):
        return f"in [{', '.join(map(_quoted, value))}]"
    return f"== {_quoted(value)}"


def _quoted(value: Any) -> str:
    if isinstance(value, (bool, int, float)):
        return str(value).lower()
    sign = "'" if '"' in str(value) else '"'
    return f"{sign}{value}{sign}"
