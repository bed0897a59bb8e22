"""Conditions that all measurements on one curve must share: config, code, environment, topology."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import scaleray
from scaleray.common.fingerprint import environment
from scaleray.config import RunConfig
from scaleray.config.decides import is_beside_training
from scaleray.errors import ConfigError, DataError
from scaleray.records.json_record import jsonable, leaves
from scaleray.records.study_record import Conditions
from scaleray.workload import user_modules

OF_THE_GROUP = ("workers", "on_resize", "resize_interval_s", "max_failures", "launch_timeout_s", "collective_timeout_s")
"""Keys of `scale` for the number of workers and the reaction to a failed one."""
MOST_DIFFERENCES = 8
Configs = tuple[Mapping[str, Any], Mapping[str, Any]]


def conditions_of(config: RunConfig, workload: Any, topology: Mapping[str, Any]) -> Conditions:
    """Conditions of a measurement made here and now. topology: nodes, and the way in which workers start.

    The commit is that of the working directory, as for a training, since a config may be outside of the checkout."""
    facts = environment()
    git = facts.pop("git", {})
    return Conditions(
        config_hash=digest(training_of(config.to_dict())),
        code_hash=digest(
            {"scaleray": scaleray.__version__, "commit": git.get("commit"), "sources": _sources(workload)}
        ),
        environment_hash=digest(facts),
        topology_hash=digest(topology),
        environment={**facts, "git": git},
        topology=dict(topology),
    )


def training_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The nested config without settings that have no effect on the training, and without the number of workers."""
    values = {section: value for section, value in config.items() if not is_beside_training(section)}
    values["scale"] = {key: value for key, value in values.get("scale", {}).items() if key not in OF_THE_GROUP}
    return values


def digest(value: Any) -> str:
    """SHA-256 (16 hex digits) of a value as JSON."""
    return hashlib.sha256(json.dumps(jsonable(value), sort_keys=True).encode()).hexdigest()[:16]


def key_of(conditions: Conditions) -> str:
    """Hash of all four parts: config, code, environment and topology."""
    return digest([getattr(conditions, f"{name}_hash") for name in ("config", "code", "environment", "topology")])


def differences(here: Conditions, there: Conditions, *, configs: Configs | None = None) -> list[str]:
    """Differences between two conditions, one per line; empty if points of both may share a curve. configs: both
    configs, nested, to show the differing keys."""
    found = []
    if here.config_hash != there.config_hash:
        mine, theirs = (training_of(config) for config in configs or ({}, {}))
        found += _by_fact("config", mine, theirs) or [f"config: {here.config_hash} here, {there.config_hash} there"]
    if here.code_hash != there.code_hash:
        code = [f"{one.code_hash}{_commit(one)}" for one in (here, there)]
        found.append(f"code: {code[0]} here, {code[1]} there")
    for name in ("environment", "topology"):
        if getattr(here, f"{name}_hash") != getattr(there, f"{name}_hash"):
            facts = _by_fact(name, getattr(here, name), getattr(there, name))
            found += facts or [f"{name}: hashes differ, although all known facts are equal"]
    return found


def _by_fact(name: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    mine, theirs = (dict(leaves(jsonable(facts))) for facts in (here, there))
    keys = [k for k in sorted({*mine, *theirs}) if mine.get(k) != theirs.get(k) and not k.startswith("git.")]
    return [f"{name}: {k} is {mine.get(k, 'missing')} here, {theirs.get(k, 'missing')} there" for k in keys]


def _commit(conditions: Conditions) -> str:
    commit = (conditions.environment.get("git") or {}).get("commit")
    return f" (commit {str(commit)[:12]})" if commit else ""


def check_same(here: Conditions, there: Conditions, *, whose: str, configs: Configs | None = None) -> None:
    """Refuse to combine points on one curve that were measured under different conditions: raise ConfigError with the
    differences.
    """
    found = differences(here, there, configs=configs)
    if found:
        more = [f"... and {len(found) - MOST_DIFFERENCES} more"] if len(found) > MOST_DIFFERENCES else []
        raise ConfigError.problem(
            f"the curve of {whose}",
            "was measured under different conditions: "
            "points of one curve need the same config, code, environment and topology",
            "\n  ".join(
                [*found[:MOST_DIFFERENCES], *more, "measure all points here, or compare both: scaleray compare"]
            ),
        )


def _sources(workload: Any) -> dict[str, str]:
    """Hashes of the source files of the workload and of scaleray."""
    package = Path(scaleray.__file__).parent
    files = {f"scaleray/{path.relative_to(package)}": path for path in sorted(package.rglob("*.py"))}
    for module in user_modules(workload):
        if path := getattr(module, "__file__", None):
            files[module.__name__] = Path(path)
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in files.items()}


def check_same_data(was: str | None, now: str | None, *, what: str, advice: str) -> None:
    """Raise DataError if both hashes (SHA-256 of the training data) are known and differ.

    what: `run`, `study` or `sweep`, whichever was interrupted. advice: what to do next."""
    if was and now and was != now:
        raise DataError.problem(
            "the training data",
            f"has changed: its SHA-256 is {now[:16]}..., and the interrupted {what} read {was[:16]}",
            advice,
        )
