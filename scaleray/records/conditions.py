"""Conditions of a record as flat keys, differences between records, and the key that repeats share."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaleray.config.decides import Decides, decides
from scaleray.records.json_record import jsonable, leaves
from scaleray.records.run_record import RunRecord
from scaleray.records.study_record import StudyRecord
from scaleray.records.sweep_record import SweepRecord

MISSING = "missing"
SECTIONS = ("config", "derived", "code", "environment", "topology", "data")
NAMES_OF_THE_RUN = ("tracking.run_name",)
"""Config keys whose differences between runs are insignificant."""
MEASURED_OF_DATA = "row_us"
"""Last parts of data keys that hold measurements, which differ between any two runs, rather than conditions."""

Conditions = dict[str, dict[str, Any]]
"""Conditions by section, then by dotted key."""


@dataclass(frozen=True)
class Difference:
    """A key and its value in each record, in order; `missing` if a record lacks it."""

    section: str
    key: str
    values: list[Any]


def conditions(record: RunRecord | StudyRecord | SweepRecord) -> Conditions:
    """Return the conditions of a record, which are all facts that determined its result."""
    found: Conditions = {section: {} for section in SECTIONS}
    found["config"] = {k: v for k, v in leaves(record.config) if k not in NAMES_OF_THE_RUN}
    if isinstance(record, RunRecord):
        found["derived"] = dict(leaves(record.derived))
        found["data"] = _data(record.data)
        environment = record.environment.get("environment", {})
        found["topology"] = _topology(record)
    else:
        environment = record.conditions.environment
        found["topology"] = dict(leaves(record.conditions.topology))
        found["code"]["hash"] = record.conditions.code_hash
    for key, value in leaves(environment):
        found["code" if key.startswith("git.") else "environment"][key] = value
    return found


def differences(of: Sequence[Conditions]) -> list[Difference]:
    """Return every key whose values differ between the records, sorted by section and key."""
    found = []
    for section in SECTIONS:
        for key in sorted(set().union(*(one[section] for one in of))):
            values = [jsonable(one[section].get(key, MISSING)) for one in of]
            if any(value != values[0] for value in values):
                found.append(Difference(section, key, values))
    return found


def repeat_key(record: RunRecord | StudyRecord | SweepRecord) -> str:
    """Key shared by repeats: trainings that differ only in their seed and in settings without effect on result or
    speed, or studies and sweeps under the same conditions."""
    if not isinstance(record, RunRecord):
        hashed = record.conditions
        return " ".join((hashed.config_hash, hashed.code_hash, hashed.environment_hash, hashed.topology_hash))
    known = conditions(record)
    same = [
        _but_the_seed(known["config"]),
        *(known[section] for section in ("code", "environment", "topology", "data")),
    ]
    return json.dumps(jsonable(same), sort_keys=True)


def start_key(config: Mapping[str, Any], workers: int, facts: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """Hash of the facts known at the start of a training, shared by trainings that differ only in the seed. facts:
    environment and topology."""
    nodes = _kinds(facts.get("topology") or [], leave_out=("node",))
    environment = dict(leaves(facts.get("environment") or {}))
    same = [_but_the_seed(dict(leaves(config))), workers, nodes, environment, _data(data)]
    return hashlib.sha256(json.dumps(jsonable(same), sort_keys=True).encode()).hexdigest()


def _but_the_seed(config: Mapping[str, Any]) -> dict[str, Any]:
    left_out = ("seed", *NAMES_OF_THE_RUN)
    return {k: v for k, v in config.items() if k not in left_out and decides(k) is not Decides.NOTHING}


def _data(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in leaves(facts) if k.rpartition(".")[2] != MEASURED_OF_DATA}


def _topology(record: RunRecord) -> dict[str, Any]:
    """Types and numbers of nodes and workers, without addresses."""
    nodes, workers = record.environment.get("topology", []), record.environment.get("workers", [])
    per_node = Counter(str(worker.get("node")) for worker in workers)
    return {
        "workers": record.workers,
        # without Ray, nothing but a node's name is recorded
        "nodes": [kind.removesuffix(" x ") for kind in _kinds(nodes, leave_out=("node",))],
        "kinds of workers": _kinds(workers, leave_out=("node", "rank")),
        "workers on a node": sorted(per_node.values(), reverse=True),
    }


def _kinds(things: Sequence[Mapping[str, Any]], *, leave_out: Sequence[str]) -> list[str]:
    kinds = Counter(
        ", ".join(
            f"{k} {v}" for k, v in sorted(leaves(thing)) if k.partition(".")[0] not in leave_out and v is not None
        )
        for thing in things
    )
    return sorted(f"{number} x {kind}" for kind, number in kinds.items())
