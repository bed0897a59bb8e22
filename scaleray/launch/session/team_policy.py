"""A team's policy for every training, study, sweep, plan and profile before it starts: a YAML file with two levels.

    invariants:            # must always hold
      purpose: required
      uncommitted: false
      global_batch: {max: 8192}
    constraints:           # may be violated for a recorded reason
      gpus: {min: 2, max: 64}
      rule: {in: [linear, sqrt]}

A field is a field of the registry or a key of the config. A rule requires a known value (`required`), a certain value,
one of a list, or one within bounds.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scaleray.common.parsing import BoundedLoader, NotYaml, near_words, yaml_nodes
from scaleray.config.loading import known_keys
from scaleray.errors import ConfigError, first_line
from scaleray.records.experiment import REQUIRED

KEY = "tracking.policy"
LEVELS = ("invariants", "constraints")
OWN_FIELDS = (*REQUIRED, "gpus", "model", "strategy", "uncommitted")
"""Fields of a policy besides the keys of the config."""
BOUNDS = ("min", "max", "in")
HINTS = {
    "owner": "name the responsible person: --tracking.owner NAME",
    "purpose": "state its purpose: --tracking.purpose 'WORDS'",
    "cost": "give the price of a worker: --study.price-per-worker-hour PRICE",
    "uncommitted": "commit the changes, so that the code can be found again",
    "code": "run it in a git checkout, or set GIT_COMMIT to the commit",
    "data_hash": "use training data whose content can be hashed",
}
"""Advice for each field that violates a policy."""


@dataclass(frozen=True)
class Rule:
    """Allowed values of a field. least, most: bounds. one_of: allowed values; None allows any known one. where: file
    and line."""

    field: str
    where: str
    may_break: bool
    least: float | None = None
    most: float | None = None
    one_of: tuple[Any, ...] | None = None

    @property
    def allowed(self) -> str:
        """Allowed values as text; empty for any."""
        found = [
            *([f"at least {self.least:g}"] if self.least is not None else []),
            *([f"at most {self.most:g}"] if self.most is not None else []),
        ]
        if self.one_of is not None:
            words = [str(one).lower() if isinstance(one, bool) else str(one) for one in self.one_of]
            found.append(words[0] if len(words) == 1 else f"one of {', '.join(words)}")
        return " and ".join(found)

    def holds(self, found: Any) -> bool:
        """Whether a value is known and allowed."""
        if found is None or (self.one_of is not None and not any(_equal(found, one) for one in self.one_of)):
            return False
        if self.least is None and self.most is None:
            return True
        number = _number(found)
        return (
            number is not None
            and (self.least is None or number >= self.least)
            and (self.most is None or number <= self.most)
        )

    def refusal(self, found: Any) -> ConfigError:
        """Error for a value that is not allowed."""
        hint = HINTS.get(self.field, f"give another --{self.field.replace('_', '-')}" if "." in self.field else "")
        if self.may_break:
            why = "give the reason, which is recorded: --tracking.policy-reason 'WORDS'"
            hint = f"{hint}; or {why}" if hint else why
        level = "a constraint" if self.may_break else "an invariant"
        wanted = f"{level} of the team's policy requires it"
        if self.allowed:
            wanted = f"{level} of the team's policy requires {self.allowed}"
        return ConfigError(f"{self.where} {self.field}", found, wanted, hint)


@dataclass(frozen=True)
class TeamPolicy:
    """The rules of a policy file. name: the file's name and the beginning of its SHA-256, for the record."""

    name: str
    rules: tuple[Rule, ...]

    def check(self, values: Mapping[str, Any], *, reason: str | None) -> list[str]:
        """Constraints that these values violate, each as text with the reason. Rules for absent fields are checked
        later. Raises ConfigError for a violated invariant, or if the reason is missing."""
        broken = []
        for rule in self.rules:
            if rule.field not in values or rule.holds(found := values[rule.field]):
                continue
            if not rule.may_break or not reason:
                raise rule.refusal(found)
            broken.append(f"{rule.field} is {found}, not {rule.allowed or 'known'} ({rule.where}): {reason}")
        return broken


def read_team_policy(path: str | Path) -> TeamPolicy:
    """Read a policy file. Raises ConfigError with file and line if it is invalid."""
    place = Path(path).expanduser()
    try:
        text = place.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(KEY, str(path), "it does not exist", "name the team's YAML file, or leave it out") from None
    except (OSError, ValueError) as exc:
        raise ConfigError(KEY, str(path), f"it cannot be read: {first_line(exc)}") from exc
    try:
        with yaml_nodes(text) as (loader, node):
            rules = _rules(loader, node, str(path))
    except ValueError as exc:
        at = f"{path}:{exc.line}" if isinstance(exc, NotYaml) and exc.line else str(path)
        problem = exc.problem if isinstance(exc, NotYaml) else first_line(exc)
        raise ConfigError(f"{KEY} {at}", "not readable as YAML", problem) from exc
    return TeamPolicy(f"{place.name} sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}", tuple(rules))


def _rules(loader: BoundedLoader, node: yaml.Node | None, name: str) -> list[Rule]:
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{KEY} {name}", "not a mapping", f"it must have the sections {', '.join(LEVELS)}")
    found: list[Rule] = []
    for key, section in node.value:
        where, level = f"{name}:{key.start_mark.line + 1}", str(key.value)
        if level not in LEVELS:
            near = near_words(level, LEVELS)
            hint = f"did you mean {near[0]}?" if near else f"sections are {', '.join(LEVELS)}"
            raise ConfigError.problem(f"{where} {level}", "is an unknown section", hint)
        if not isinstance(section, yaml.MappingNode):
            raise ConfigError(f"{where} {level}", "not a mapping", "it must map fields to rules")
        found += [
            _rule(field, loader.construct_object(value, deep=True), name, may_break=level == "constraints")
            for field, value in section.value
        ]
    return found


def _rule(key: yaml.Node, value: Any, name: str, *, may_break: bool) -> Rule:
    where, field = f"{name}:{key.start_mark.line + 1}", str(key.value)
    known = [*OWN_FIELDS, *known_keys()]
    if field not in known:
        near = near_words(field, known)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(OWN_FIELDS)}, or a key of the config"
        raise ConfigError.problem(f"{where} {field}", "is an unknown field", hint)
    bounds = value if isinstance(value, dict) else {} if value == "required" else {"in": value}
    if "in" in bounds and not isinstance(bounds["in"], list):
        bounds = {**bounds, "in": [bounds["in"]]}
    if not _are_bounds(bounds) or (not bounds and value != "required"):
        allowed = "a rule is `required`, a value, a list, or bounds such as {min: 2, max: 64}"
        raise ConfigError(f"{where} {field}", value, allowed)
    one_of = tuple(bounds["in"]) if "in" in bounds else None
    return Rule(field, where, may_break, bounds.get("min"), bounds.get("max"), one_of)


def _are_bounds(bounds: Mapping[Any, Any]) -> bool:
    """Whether these bounds are valid: known names with numbers."""
    numbers = [bounds[name] for name in ("min", "max") if name in bounds]
    values = bounds.get("in", ["any"])
    return (
        set(bounds) <= {*BOUNDS}
        and all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in numbers)
        and bool(values)
        and all(isinstance(one, (str, int, float)) and not str(one).startswith(("<", ">", "=", "!")) for one in values)
    )


def _equal(found: Any, wanted: Any) -> bool:
    if isinstance(found, bool) or isinstance(wanted, bool):
        return str(found).lower() == str(wanted).lower()
    return str(found) == wanted if isinstance(wanted, str) else _number(found) == wanted


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
