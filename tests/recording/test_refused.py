"""What MLflow refuses is renamed, or set aside with its reason; everything else arrives, and the run has its end."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
from mlflow import MlflowClient
from receiver import receiving
from test_recorder import describe, step

from scaleray.errors import StorageError, TrackingError
from scaleray.recording.outbox import Outbox
from scaleray.recording.recorder import Recorder
from scaleray.recording.replay import replay
from scaleray.recording.spool import REFUSED
from scaleray.recording.store import RunStore
from scaleray.records.accepted_names import acceptable_name, acceptable_text
from scaleray.records.mlflow_operations import LogArtifact, LogMetrics, SetTags
from scaleray.records.run_record import EvaluationRecord, EventRecord

NAMES = [
    "val/recall@10", 'val/"quoted"', "val/<tag>", "val/line\nbreak", "val/\N{GRINNING FACE}", "val/..", "..", "", "/val",
    "val//loss", "val/", "v" * 300, "val/" + "\udcff", "val/recall@5|top",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_mlflow_would_refuse_becomes_one_that_it_takes(name):
    from mlflow.utils.validation import _validate_metric_name

    made = acceptable_name(name)
    _validate_metric_name(made)
    assert 0 < len(made) <= 250 and acceptable_name(made) == made


@pytest.mark.parametrize("name", ["val/loss", "train/loss_of.x", "system/gpu 0: used-GiB"])
def test_other_names_stay_as_they_are(name):
    assert acceptable_name(name) == name


def test_metrics_of_any_name_arrive_with_all_others_and_the_end(uri, tmp_path):
    recorder = Recorder(describe(uri, tmp_path))
    run_id = recorder.start().run_id
    metrics = {name: float(number) for number, name in enumerate(NAMES)}
    recorder.log(
        [step(1), EvaluationRecord(1, {**metrics, "val/recall_10": 99.0}, 0.1), EventRecord("bad \udcff byte")]
    )
    assert recorder.finish("FAILED", metrics={}, tags={"scaleray.verdict": "bad \udcff"}, files={}) is None
    run = MlflowClient(uri).get_run(run_id)
    assert run.info.status == "FAILED" and run.data.metrics["train/loss"] == 1.0
    assert {*metrics.values(), 99.0} <= {*run.data.metrics.values()}
    assert run.data.metrics["val/recall_10"] == 0.0 and run.data.metrics["val/recall_10_2"] == 99.0
    assert acceptable_text("bad \udcff") == run.data.tags["scaleray.verdict"]
    events = [text for key, text in run.data.tags.items() if key.startswith("scaleray.event.")]
    assert sum("MLflow rejects the metric name 'val/recall@10'" in text for text in events) == 1


def test_what_is_refused_all_the_same_is_set_aside_with_its_reason(uri, tmp_path, monkeypatch):
    recorder = Recorder(describe(uri, tmp_path))
    run_id = recorder.start().run_id
    send = RunStore.send

    def picky(store, operation):
        if isinstance(operation, LogMetrics) and any(name == "bad" for name, *_ in operation.points):
            raise ValueError("no point of bad")
        if isinstance(operation, SetTags) and "worse" in operation.values:
            raise TypeError("no tag worse")
        send(store, operation)

    monkeypatch.setattr(RunStore, "send", picky)
    recorder.log([step(1), EvaluationRecord(1, {"bad": 1.0, "val/loss": 2.0}, 0.1)])
    recorder.log_files([str(tmp_path / "gone.csv")])
    unsent = recorder.finish("FINISHED", metrics={}, tags={"worse": "x", "better": "y"}, files={"record.json": "{}"})
    assert unsent is None
    run = MlflowClient(uri).get_run(run_id)
    assert run.info.status == "FINISHED" and run.data.tags["better"] == "y"
    assert (run.data.metrics["train/loss"], run.data.metrics["val/loss"]) == (1.0, 2.0)
    head, *refused = (json.loads(line) for line in (tmp_path / "run" / REFUSED).read_text().splitlines())
    assert head["run_id"] == run_id
    assert [line["op"] for line in refused] == ["metrics", "artifact", "tags"]


def test_an_answer_that_is_no_json_is_no_refusal_and_everything_arrives():
    arrived, bodies = [], iter([""])

    class Proxied:
        def send(self, operation):
            json.loads(next(bodies, "{}"))  # as MLflow's client reads most answers
            arrived.append(operation)

    outbox = Outbox(Proxied(), leaves_out_refused=True)
    outbox.send("first")
    assert outbox.num_kept == 1 and arrived == []
    outbox.retry_now()
    outbox.send("second")
    assert outbox.num_kept == 0 and arrived == ["first", "second"]


def test_an_answer_without_a_body_is_none():
    with receiving() as proxy:
        outbox = Outbox(RunStore(proxy.url(""), "a" * 32, "0"), leaves_out_refused=True)
        outbox.send(LogMetrics([("train/loss", 1.0, 1_700_000_000_000, 1)]))
        outbox.retry_now()
        outbox.send(SetTags({"scaleray.verdict": "done"}))
    assert outbox.num_kept == 2 and {path.rsplit("/", 1)[-1] for path in proxy.paths} == {"log-batch"}
    assert "answered with nothing" in outbox.failure


def test_a_file_that_a_server_took_and_lost_is_sent_again(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 0")
    uploads, there = [], []

    class Client:
        def log_artifact(self, run_id, path, folder):
            uploads.append(path)
            there.extend([SimpleNamespace(path="run/config.yaml")] if len(uploads) > 1 else [])

        def get_run(self, run_id):
            return SimpleNamespace(info=SimpleNamespace(artifact_uri="mlflow-artifacts:/0/a"))

        def list_artifacts(self, run_id, folder):
            return there

    store = RunStore("http://127.0.0.1:1", "a" * 32, "0")
    store.client = Client()
    outbox = Outbox(store, leaves_out_refused=True)
    outbox.send(LogArtifact(str(tmp_path / "config.yaml"), "run"))
    assert outbox.num_kept == 1 and "did not store it" in outbox.failure
    outbox.retry_now()
    assert outbox.send_kept() and len(uploads) == 2


def test_replay_sends_what_is_taken_and_keeps_the_rest(uri, tmp_path):
    recorder = Recorder(describe(uri, tmp_path))
    identity = recorder.start()
    recorder.finish("FINISHED", metrics={}, tags={}, files={"record.json": "{}"})
    moved = tmp_path / "moved"
    os.rename(tmp_path / "run", moved)
    head = {"tracking_uri": uri, "run_id": identity.run_id, "experiment_id": identity.experiment_id}
    lines = [
        head,
        {"op": "artifact", "path": str(tmp_path / "run" / "record.json"), "folder": "again"},
        {"op": "artifact", "path": str(tmp_path / "\x1b[2J\x07gone.csv")},
        {"op": "metrics", "points": [["late", 3.0, 1000, 7]]},
    ]
    (moved / "unsent.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(TrackingError, match=r"rejected 1 value of .*: the file [^\x1b\x07]*gone\.csv"):
        replay(moved / "unsent.jsonl", uri=uri)
    client = MlflowClient(uri)
    assert client.get_run(identity.run_id).data.metrics["late"] == 3.0
    assert [f.path for f in client.list_artifacts(identity.run_id, "again")] == ["again/record.json"]
    assert (moved / "unsent.jsonl.refused").exists() and not (moved / "unsent.jsonl").exists()


def test_a_record_that_cannot_be_written_is_an_error_and_the_run_has_its_end(uri, tmp_path):
    recorder = Recorder(describe(uri, tmp_path))
    run_id = recorder.start().run_id
    (tmp_path / "run" / "record.json").mkdir()  # nothing can take its place
    with pytest.raises(StorageError, match="Cannot write the run's record"):
        recorder.finish(
            "FINISHED", metrics={}, tags={"a": "b"}, files={"record.json": "{}", "environment.yaml": "c: d"}
        )
    run = MlflowClient(uri).get_run(run_id)
    assert (run.info.status, run.data.tags["a"]) == ("FINISHED", "b")
    assert (tmp_path / "run" / "environment.yaml").read_text() == "c: d"
    assert not list((tmp_path / "run").glob("*.part"))
