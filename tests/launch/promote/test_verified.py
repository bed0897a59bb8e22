"""What `promote --verify` finds, one of each kind, on every commit; test_promote.py has the others."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest

from scaleray.launch.promote.check import check_promoted
from scaleray.launch.promote.promote import promote
from scaleray.tracking.registry.models import ModelRegistry, Named
from tests.launch.promote.conftest import POLICY

ANY_CODE = {**POLICY, "fingerprint": {"allow_uncommitted": True, "may_differ": ["code.diff_sha256"]}}
"""A policy for a checkout that somebody works in while the tests run."""


@pytest.fixture(scope="module")
def promoted(four_runs, tmp_path_factory):
    """The id of a promoted run, the folder of its version, and the URI of its database."""
    database = tmp_path_factory.mktemp("verified") / "mlflow.db"
    shutil.copy(four_runs[0].tracking_uri.removeprefix("sqlite:///"), database)
    folders, uri = [record.run_dir for record in four_runs], f"sqlite:///{database}"
    found = promote(folders[:2], "champion", against=folders[2:], policy=ANY_CODE, uri=uri)
    assert found.answer == "pass", found.not_passed
    return found.run_id, Path(ModelRegistry(uri).find(Named("corners", number=1)).source), uri


def failing(uri):
    record = check_promoted("corners@champion", uri=uri)
    return {check.what: check.words for check in record.gates[0].checks if check.answer != "pass"}


@contextlib.contextmanager
def written(file, content):
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(before)


def test_one_changed_byte_is_found(promoted):
    _, source, uri = promoted
    file = next((source / "data/packed/weights").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    with written(file, bytes(content)):
        assert failing(uri) == {
            "every file is the one that was promoted": f"data/packed/weights/{file.name} was changed"
        }


def test_an_alias_that_was_moved_by_hand_is_found(promoted):
    run_id, source, uri = promoted
    client = ModelRegistry(uri).client
    made = client.create_model_version("corners", str(source), run_id=run_id)
    client.set_registered_model_alias("corners", "champion", made.version)
    try:
        found = failing(uri)
    finally:
        client.set_registered_model_alias("corners", "champion", "1")
    assert found["the alias names what was promoted"] == "it names version 2; version 1 was promoted last"
    assert found["every file is the one that was promoted"] == "the version was not made by scaleray promote"


def test_a_deleted_run_and_a_record_that_was_changed_in_mlflow_are_found(promoted, four_runs):
    run_id, source, uri = promoted
    record = source.parents[1] / "record.json"
    values = json.loads(record.read_text())
    values["metrics"]["val/accuracy"] = 0.999
    client = ModelRegistry(uri).client
    client.delete_run(run_id)
    try:
        with written(record, json.dumps(values).encode()):
            found = failing(uri)
    finally:
        client.restore_run(run_id)
    assert "was deleted" in found["the run that it comes from"]
    assert "records as MLflow has them: pass then, fail now" in found["the gates answer the same of the kept evidence"]
    assert failing(uri) == {}
