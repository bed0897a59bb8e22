"""The JSON schemas of config and records hold for what is written, and for nothing else."""

import json
from pathlib import Path

import jsonschema
import pytest
import study_examples
import yaml

from scaleray.config import known_keys, load_config
from scaleray.records.json_record import NewerRecord
from scaleray.records.schemas import SCHEMAS

ROOT = Path(__file__).parents[2]
RECORDS = {"study": study_examples.study, "sweep": study_examples.sweep, "run": study_examples.run_record}
BASE = {
    "workload": {"name": "work.py:Mine"}, "batch": {"global_size": 8}, "optimizer": {"learning_rate": 0.1}, "stop": {"after": "3 epochs"},
}  # fmt: skip


def problems(kind, value):
    """What the schema says of a value, and of nothing else than JSON."""
    validator = jsonschema.Draft202012Validator(SCHEMAS[kind]())
    return [error.message for error in validator.iter_errors(json.loads(json.dumps(value)))]


@pytest.mark.parametrize("kind", SCHEMAS)
def test_each_is_a_schema(kind):
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[kind]())


@pytest.mark.parametrize("name", ["digits", "language_model", "emulated"])
def test_the_configs_of_jobs_satisfy_it_and_name_it(name):
    path = ROOT / "jobs" / f"{name}.yaml"
    assert problems("config", load_config(path, environ={}).to_dict()) == []
    first = path.read_text().splitlines()[0]
    assert (path.parent / first.partition("$schema=")[2]).exists()


@pytest.mark.parametrize(
    "more",
    [
        {"scale": {"workers": {"min": 1, "max": 4}}}, {"scale": {"workers": "1..4"}}, {"scale": None}, {"stop": {"after": "1 epoch", "at": "val/loss <= 1e-3"}},
        {"noise_scale": {"measure": "auto"}}, {"optimizer": {"learning_rate": 1, "betas": [0.9, 0.99]}}, {"seed": 3}, {"workload": {"name": "a.py:B", "args": {"x": [1]}}},
    ],
)  # fmt: skip
def test_what_may_stand_in_a_file_satisfies_it(more):
    assert problems("config", BASE | more) == []


@pytest.mark.parametrize(
    "more",
    [
        {"batch": {}}, {"batch": {"global_size": 0}}, {"batch": {"global_sise": 8}}, {"precision": {"dtype": "int8"}}, {"stop": {"after": 3}},
        {"stop": {"after": "3 weeks"}}, {"stop": {"after": "1 epoch", "at": "accuracy"}}, {"optimizer": {"learning_rate": 0}}, {"scale": {"workers": {"min": 1}}}, {"speed": 3},
        {"optimizer": {"learning_rate": 1, "betas": [0.9]}}, {"workload": None},
    ],
)  # fmt: skip
def test_what_is_refused_does_not_satisfy_it(more):
    assert problems("config", BASE | more) != []


def test_every_key_of_the_config_says_what_it_means():
    schema = SCHEMAS["config"]()
    for key, field in known_keys().items():
        section, _, name = key.rpartition(".")
        described = schema["properties"][section or name]
        if section:
            there = described.get("$ref") or described["anyOf"][0]["$ref"]
            described = schema["$defs"][there.rpartition("/")[2]]["properties"][name]
        assert described.get("description", "") == " ".join((field.description or "").split()), key


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_as_it_is_written_satisfies_its_schema(kind):
    record = RECORDS[kind]()
    assert problems(kind, json.loads(record.to_json())) == []
    assert json.loads(record.to_json())["schema_version"] == 1


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_without_a_key_or_with_text_for_a_number_does_not(kind):
    record = json.loads(RECORDS[kind]().to_json())
    assert problems(kind, {key: value for key, value in record.items() if key != "name"}) != []
    assert problems(kind, record | {"schema_version": "one"}) != []


def test_numbers_that_are_not_finite_are_null_and_allowed():
    record = json.loads(RECORDS["run"]().to_json()) | {"total_time_s": None, "final_loss": None}
    assert problems("run", record) == []


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_of_a_newer_version_is_refused_by_it(kind):
    """Its keys may mean something else: it was read, and unknown keys were dropped in silence."""
    record = RECORDS[kind]()
    text = json.dumps(json.loads(record.to_json()) | {"schema_version": 7})
    with pytest.raises(
        NewerRecord, match="schema_version is 7, and this version of scaleray reads only up to 1: use a newer one"
    ):
        type(record).from_json(text)


def test_a_record_of_this_version_with_more_keys_is_read():
    record = study_examples.run_record()
    text = json.dumps(json.loads(record.to_json()) | {"of_the_future": [1]})
    assert type(record).from_json(text) == record


def test_an_older_record_without_a_version_is_read():
    record = study_examples.run_record()
    values = json.loads(record.to_json())
    del values["schema_version"]
    assert type(record).from_json(json.dumps(values)) == record


def test_the_schema_holds_for_a_file_as_an_editor_reads_it():
    text = yaml.safe_load(
        "batch: {global_size: 32}\noptimizer: {learning_rate: 0.001}\nstop: {after: 2 epochs}\nworkload: {name: 'a.py:B'}\n"
    )
    assert problems("config", text) == []
