"""What `promote --verify` finds, one of each kind, on every commit; test_promote.py has the others."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from scaleray.errors import TrackingError
from scaleray.models.registry import ModelRegistry, Named
from scaleray.records.statement import STATEMENT, file_digest
from scaleray.release.promote.promote import promote
from scaleray.release.promote.verify_promoted import check_promoted
from tests.release.promote.conftest import POLICY

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
            "every file is unchanged since the promotion": f"data/packed/weights/{file.name} was changed"
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
    assert found["the alias names the promoted version"] == "it names version 2; version 1 was promoted last"
    assert found["every file is unchanged since the promotion"] == "the version was not created by scaleray promote"


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
    assert "was deleted" in found["its source run exists"]
    assert (
        "records equal MLflow's copies: pass at the promotion, fail now"
        in found["the gates give the same answers to the stored evidence"]
    )
    assert failing(uri) == {}


@pytest.fixture
def mlflow_at(promoted, monkeypatch):
    """MLflow's own client of the database of that version."""
    import mlflow.pyfunc

    before = mlflow.get_tracking_uri(), mlflow.get_registry_uri()
    mlflow.set_tracking_uri(promoted[2])
    mlflow.set_registry_uri(promoted[2])
    yield mlflow.pyfunc
    mlflow.set_tracking_uri(before[0])
    mlflow.set_registry_uri(before[1])


ROWS = {"x": np.eye(4, dtype=np.float32)}


def test_mlflow_serves_what_was_promoted_and_leaves_it_as_it_is(promoted, mlflow_at, caplog):
    assert len(mlflow_at.load_model("models:/corners@champion").predict(ROWS)["corner"]) == 4
    assert not [m for m in caplog.messages if "not compared" in m]
    assert failing(promoted[2]) == {}, "MLflow notes the version's name in a folder that is local"


def test_mlflow_serves_no_model_that_was_changed(promoted, mlflow_at):
    _, source, _ = promoted
    for name in ("data/packed/code/corners.py", "data/packed/run.json", "requirements.txt"):
        file = source / name
        with written(file, file.read_bytes() + b"\n"):
            for place in ("models:/corners@champion", str(source)):
                with pytest.raises(TrackingError, match=f"{file.name} was changed"):
                    mlflow_at.load_model(place)
    (source / "data/packed/code/more.py").write_text("")
    with pytest.raises(TrackingError, match=r"more\.py was added"):
        mlflow_at.load_model(str(source))
    (source / "data/packed/code/more.py").unlink()


def test_a_statement_that_was_rewritten_with_a_file_is_not_that_of_the_registry(promoted, mlflow_at):
    _, source, _ = promoted
    code, statement = source / "data/packed/code/corners.py", source / STATEMENT
    values = json.loads(statement.read_text())
    with written(code, code.read_bytes() + b"\n"):
        for one in values["subject"]:
            one["digest"]["sha256"] = file_digest(source / one["name"])
        rewritten, refused = json.dumps(values).encode(), "does not belong to the version"
        with written(statement, rewritten), pytest.raises(TrackingError, match=refused):
            mlflow_at.load_model("models:/corners@champion")
