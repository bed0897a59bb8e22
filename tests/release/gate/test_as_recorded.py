"""Evidence that somebody changed after it was recorded, in a folder or in MLflow: the gates find each."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from scaleray.launch.session.conditions import digest, training_of
from scaleray.recording.store import RunStore, open_client
from scaleray.recording.study_runs import ParentRun
from scaleray.records.alert_record import Alert
from scaleray.records.experiment import CERTIFICATE_SHA256
from scaleray.records.gates import GateRecord
from scaleray.records.mlflow_operations import EndRun, LogArtifact, SetTags
from scaleray.release.gate.gate import gate as judge
from scaleray.studies.invalidate import invalidate_experiment
from tests import study_examples
from tests.recorded_runs import CONFIG, ENVIRONMENT, a_certificate, a_run, workers_on

ALERT = Alert("loss_spike", "warning", "resolved", 5.0, 9.0, "it rose", recorded_at=6.0)


def checks_of(record: GateRecord) -> dict[str, str]:
    return {check.what: f"{check.answer}: {check.words}" for gate in record.gates for check in gate.checks}


def a_stored_run(uri: str, folder: Path) -> Path:
    """A training with an alert in its folder and in MLflow."""
    store = RunStore.create(uri, experiment="gates", run_name=folder.name, tags={"scaleray.kind": "train"})
    began = {**dataclasses.asdict(ALERT), "state": "firing"}
    record = a_run(folder.name, run_id=store.run_id, tracking_uri=uri, metrics={}, alerts=[began])
    folder.mkdir()
    (folder / "record.json").write_text(record.to_json())
    (folder / "alerts.jsonl").write_text(json.dumps(began) + "\n" + ALERT.to_line())
    store.send(LogArtifact(str(folder / "record.json")))
    store.send(SetTags({"scaleray.alert.loss_spike": "resolved: it rose"}))
    store.send(EndRun("FINISHED", 10))
    return folder


@pytest.fixture(scope="module")
def recorded(empty_database, tmp_path_factory):
    """A run, its study and its certificate, which pass; with the database that has them."""
    root = tmp_path_factory.mktemp("recorded")
    uri = f"sqlite:///{shutil.copy(empty_database, root / 'mlflow.db')}"
    a_stored_run(uri, root / "run")
    study = study_examples.study(modes=("strong",), sizes=(1, 2))
    conditions = dataclasses.replace(
        study.conditions, config_hash=digest(training_of(CONFIG)), environment=ENVIRONMENT,
        topology={"workers": workers_on(ENVIRONMENT)[:1]},
    )  # fmt: skip
    parent = ParentRun.open(uri, "studies", kind="scaling-study", name="study", config=study.config)
    for curve in study.curves:
        for at in curve.points:
            parent.log_point(at.point)
    known = parent.identify(dataclasses.replace(study, name="study", conditions=conditions))
    (root / "study").mkdir()
    (root / "study/record.json").write_text(known.to_json())
    assert parent.finish(known, files=[root / "study/record.json"]) is None
    store = RunStore.create(uri, experiment="gates", run_name="verify", tags={"scaleray.kind": "verify"})
    text = a_certificate(run_id=store.run_id, tracking_uri=uri).to_json()
    (root / "verify").mkdir()
    (root / "verify/certificate.json").write_text(text)
    store.send(LogArtifact(str(root / "verify/certificate.json")))
    store.send(SetTags({CERTIFICATE_SHA256: hashlib.sha256(text.encode()).hexdigest()}))
    return root


@pytest.fixture
def evidence(recorded, tmp_path, monkeypatch):
    """A copy of the folders, and the URI of the database in use, which has them and is as before after the test."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{recorded}/mlflow.db")
    folders = Path(shutil.copytree(recorded, tmp_path / "evidence"))
    yield folders, f"sqlite:///{recorded}/mlflow.db"
    shutil.copy(folders / "mlflow.db", recorded / "mlflow.db")


def asked(root, *gates):
    return judge(str(root / "run"), study=str(root / "study"), certificates=[str(root / "verify")], gates=gates)


def changed(file, change):
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def test_evidence_as_it_was_recorded_passes(evidence):
    root, _ = evidence
    found = asked(root, "scaling", "equality", "operations")
    assert found.answer == "pass", found.lines()
    assert checks_of(asked(root, "fingerprint"))["records equal MLflow's copies"].startswith("pass")


def test_a_study_alone_passes_as_it_was_recorded_and_fails_where_it_was_changed(evidence):
    root, _ = evidence
    study, policy = root / "study", {"equality": {"max_bound": 1e-6}}
    whole = {"certificates": [str(root / "verify")], "policy": policy}
    known = json.loads((study / "record.json").read_text())
    assert checks_of(judge(str(study), gates=["scaling"], policy=policy)) == {
        "efficiency of 2 workers (strong) above 0.7": checks_of(asked(root, "scaling"))[
            "efficiency of 2 workers (strong) above 0.7"
        ],
        "the study and its points equal MLflow's copies": "pass: study",
        "code is committed": "pass: commit 0123456789ab",
    }
    by_id = judge(known["run_id"], gates=["scaling"], uri=evidence[1])
    assert by_id.answer == "pass", by_id.lines()
    assert "none of 1 certificates matches" in " ".join(judge(str(study), gates=["equality"], **whole).lines())
    changed(study / "record.json", lambda values: values.update(config=CONFIG))
    found = judge(str(study), **whole)
    assert {gate.gate: gate.answer for gate in found.gates} == {"equality": "pass", "scaling": "fail"}, found.lines()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda values: values.update(alerts=[]), "alerts"),
        (lambda values: values["alerts"][0].update(severity="info"), "alerts.0.severity"),
        (lambda values: values.update(nonfinite_steps=0, marks=["emulated"]), "marks"),
        (lambda values: values["derived"].update(learning_rate=9), "derived.learning_rate"),
    ],
)
def test_a_record_with_a_key_changed_added_or_emptied_fails(evidence, change, key):
    root, _ = evidence
    changed(root / "run/record.json", change)
    words = checks_of(asked(root, "fingerprint"))["records equal MLflow's copies"]
    assert words.startswith("fail") and key in words


def test_alerts_that_were_deleted_from_the_file_fail_by_the_record_and_by_mlflow(evidence):
    root, _ = evidence
    (root / "run/alerts.jsonl").write_text("")
    found = checks_of(asked(root, "fingerprint", "operations"))
    assert "alert loss_spike" in found["records equal MLflow's copies"]
    assert found["no alert that is critical"] == ("fail: alerts.jsonl lacks alerts of the record: loss_spike of run")


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["curves"][0]["points"][1]["efficiency"].update(low=0.99),
        lambda values: values["curves"][0]["points"][1]["point"].update(marks=[]) or values.update(marks=["x"]),
        lambda values: values["curves"][0]["points"][1]["point"]["turns"].append([0.01] * 30),
    ],
)
def test_a_study_that_was_changed_in_its_folder_fails(evidence, change):
    root, _ = evidence
    changed(root / "study/record.json", change)
    found = asked(root, "scaling")
    assert found.answer == "fail" and checks_of(found)["the study and its points equal MLflow's copies"].startswith(
        "fail"
    )


def test_a_point_that_was_changed_deleted_or_declared_invalid_in_mlflow_fails_and_so_does_its_study(evidence):
    root, uri = evidence
    client = open_client(uri)
    study = json.loads((root / "study/record.json").read_text())
    point = study["curves"][0]["points"][1]["point"]["run_id"]

    def words():
        found = asked(root, "scaling")
        assert found.answer == "fail"
        return checks_of(found)["the study and its points equal MLflow's copies"]

    client.delete_run(point)
    assert "it was deleted" in words()
    client.restore_run(point)
    invalidate_experiment(point, "a neighbour ran", uri=uri)
    assert "it is invalid there: a neighbour ran" in words()
    client.delete_tag(point, "scaleray.invalid")
    assert asked(root, "scaling").answer == "pass"
    invalidate_experiment(study["run_id"], "the fan was off", uri=uri)
    assert "it is invalid there: the fan was off" in words()


def test_a_number_of_a_point_that_somebody_logged_anew_breaks_its_seal(evidence):
    root, uri = evidence
    study = json.loads((root / "study/record.json").read_text())
    point, client = study["curves"][0]["points"][1]["point"]["run_id"], open_client(uri)
    name = next(name for name in client.get_run(point).data.metrics if "samples_per_s" in name)
    client.log_metric(point, name, 1e9, timestamp=2 * 10**12)
    words = checks_of(asked(root, "scaling"))["the study and its points equal MLflow's copies"]
    assert "its params or metrics are not those that were measured" in words


def test_a_certificate_that_somebody_edited_fails(evidence):
    root, _ = evidence
    changed(root / "verify/certificate.json", lambda values: values.update(verdict="the same training", bound=1e-12))
    found = asked(root, "equality")
    assert found.answer == "fail"
    assert "its content is not what was recorded" in checks_of(found)["the certificate equals MLflow's copy"]


def test_evidence_that_mlflow_has_no_copy_of_is_inconclusive(evidence, empty_database, monkeypatch):
    root, uri = evidence
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{empty_database}")
    found = asked(root, "scaling", "equality")
    assert found.answer == "inconclusive", found.lines()
    at_home = judge(str(root / "run"), study=str(root / "study"), certificates=[str(root / "verify")],
                    gates=["scaling"], uri=uri)  # fmt: skip
    assert checks_of(at_home)["the study and its points equal MLflow's copies"] == "pass: study"


def test_a_store_that_a_changed_record_names_proves_nothing(evidence, tmp_path):
    """Write access to the folders is enough to name a forged store in them, which says the same."""
    root, _ = evidence
    database = shutil.copy(root / "mlflow.db", tmp_path / "forged.db")
    for file, lie in {"run/record.json": {"nonfinite_steps": 0}, "study/record.json": {"folder": "better"},
                      "verify/certificate.json": {"bound": 0.0}}.items():  # fmt: skip
        values = {**json.loads((root / file).read_text()), **lie, "tracking_uri": f"sqlite:///{database}"}
        (root / file).write_text(json.dumps(values))
        run_id, folder = values["run_id"], tmp_path / Path(file).parent
        folder.mkdir()
        shutil.copy(root / file, folder)
        with sqlite3.connect(database) as connection:
            connection.execute("update runs set artifact_uri = ? where run_uuid = ?", (str(folder), run_id))
        if file.startswith("verify"):
            sha256 = hashlib.sha256((root / file).read_bytes()).hexdigest()
            open_client(f"sqlite:///{database}").set_tag(run_id, CERTIFICATE_SHA256, sha256)
    found = checks_of(asked(root, "fingerprint", "scaling", "equality"))
    for what in (
        "records equal MLflow's copies",
        "the study and its points equal MLflow's copies",
        "the certificate equals MLflow's copy",
    ):
        assert found[what].startswith("fail"), what
