"""The task of SkyPilot: its schema, versions, and slips of the pen."""

from __future__ import annotations

import copy
import json

import jsonschema
import pytest
import yaml
from cluster_files import CLUSTER, SCHEMAS, places

from scaleray.clusters.manifests import file_versions

TASK = yaml.safe_load((CLUSTER / "skypilot" / "train.yaml").read_text())
SCHEMA = json.loads((SCHEMAS / "skypilot.json").read_text())


def is_valid(task) -> bool:
    validators = {name: jsonschema.validators.validator_for(schema)(schema) for name, schema in SCHEMA.items()}
    return validators["task"].is_valid(task) and validators["resources"].is_valid(task.get("resources", {}))


def test_the_task_keeps_skypilots_schema():
    jsonschema.validate(TASK, SCHEMA["task"])
    jsonschema.validate(TASK["resources"], SCHEMA["resources"])


def test_versions_and_the_token_are_those_of_the_other_files():
    assert (
        f"ray[data,default,train,tune]=={file_versions.RAY}" in TASK["setup"]
        and f"torch=={file_versions.TORCH}" in TASK["setup"]
    )
    assert f"--python {file_versions.PYTHON} " in TASK["setup"] and file_versions.DRIVER in TASK["setup"]
    assert "RAY_AUTH_MODE=token" in TASK["run"] and TASK["secrets"] == {"RAY_AUTH_TOKEN": None}
    assert ":6380" not in TASK["run"]  # SkyPilot's own Ray


@pytest.mark.parametrize(
    "edit",
    [
        {"num_nodes": "two"}, {"num_node": 2}, {"resources": {**TASK["resources"], "accelerator": "H100:8"}}, {"run": ["a", "list"]},
        {"resources": {**TASK["resources"], "use_spot": "yes"}}, {"envs": ["BUCKET"]}, {"setup": 5}, {"resources": "H100:8"},
    ],
    ids=str,
)  # fmt: skip
def test_planted_faults_are_found(edit):
    assert not is_valid({**TASK, **edit})


def test_misspelt_keys_are_found():
    tried, missed = 0, []
    for path in places(TASK):
        if path[0] in ("envs", "secrets", "file_mounts") and len(path) > 1:
            continue  # any name is good there
        changed = copy.deepcopy(TASK)
        node = changed
        for part in path[:-1]:
            node = node[part]
        node[f"{path[-1]}x"] = node.pop(path[-1])
        tried += 1
        if is_valid(changed):
            missed.append(path)
    assert tried >= 10 and len(missed) <= 0.05 * tried, missed
