"""The recorder against a real SQLite store, and against one that goes away."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import multiprocessing
import re
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
import study_examples
from gloo_pool import PRELOADED
from mlflow import MlflowClient

from scaleray.common import live_metrics as live
from scaleray.errors import TrackingError
from scaleray.live.steps_file import step_rows
from scaleray.recording import store
from scaleray.recording.recorder import Recorder
from scaleray.recording.replay import replay
from scaleray.recording.spool import Spool
from scaleray.records.mlflow_operations import SetTags
from scaleray.records.published import LinksMeasured, RankSample
from scaleray.records.run_description import RunDescription
from scaleray.records.run_record import (
    CheckpointRecord,
    EvaluationRecord,
    EventRecord,
    Heartbeat,
    StepRecord,
    SystemRecord,
)
from scaleray.records.worker_requests import ControlRequest


def describe(uri, tmp_path, **more):
    values = {
        "tracking_uri": uri,
        "experiment": "tests",
        "run_name": "run",
        "work_dir": str(tmp_path / "run"),
        "every_steps": 1,
        "params": {"batch.global_size": 8},
        "tags": {"scaleray.kind": "train"},
        "files": {"config.yaml": "a: 1\n"},
    }
    return RunDescription(**{**values, **more})


def step(number, loss=1.0, **more):
    values = {
        "step": number,
        "loss": loss,
        "count": 8.0,
        "num_samples": 8,
        "learning_rate": 0.1,
        "grad_norm": None,
        "step_time_s": 0.5,
        "input_wait_s": 0.1,
        "epoch": number / 10,
    }
    return StepRecord(**{**values, **more})


def times(uri, run_id, key):
    """Wall clock in s of each point of a metric, in the order of the steps."""
    from mlflow import MlflowClient

    found = sorted(MlflowClient(uri).get_metric_history(run_id, key), key=lambda m: m.step)
    return [m.timestamp / 1000 for m in found]


def history(uri, run_id, key):
    from mlflow import MlflowClient

    return [(m.step, m.value) for m in sorted(MlflowClient(uri).get_metric_history(run_id, key), key=lambda m: m.step)]


def test_steps_arrive_with_derived_rates(uri, tmp_path):
    recorder = Recorder(describe(uri, tmp_path, every_steps=2))
    run_id = recorder.start().run_id
    recorder.log([step(n, loss=1 / n) for n in range(1, 6)])
    recorder.finish("FINISHED", metrics={}, tags={}, files={})
    assert history(uri, run_id, "train/loss") == [(1, 1.0), (2, 0.5), (4, 0.25), (5, 0.2)]  # the last one has a point
    assert history(uri, run_id, "perf/samples_per_s") == [(1, 16.0), (2, 16.0), (4, 16.0), (5, 16.0)]
    assert history(uri, run_id, "perf/input_wait_share")[-1] == (5, pytest.approx(0.2))
    assert (tmp_path / "run" / "steps.csv").read_text().count("\n") == 6  # every step, and the header


def test_every_point_carries_the_time_at_which_it_was_recorded_not_that_of_its_arrival(uri, tmp_path):
    from mlflow import MlflowClient

    recorder = Recorder(describe(uri, tmp_path))
    run_id = recorder.start().run_id
    at = [1.7e9 + 60 * n for n in range(4)]
    recorder.log(  # all in one message, as they come after a start or a pause of the recorder
        [
            *(step(n, recorded_at=at[n]) for n in (1, 2, 3)),
            EvaluationRecord(3, {"val/loss": 0.5}, 0.1, recorded_at=at[3] + 5),
            SystemRecord("node", 3, {"cpu_utilization_percentage": 9.0}, recorded_at=at[3] + 6),
            CheckpointRecord(3, "path", 1, 1, 0.1, 0.1, recorded_at=at[3] + 7),
            EventRecord("slow input", recorded_at=at[2]),
        ]
    )
    recorder.finish("FINISHED", metrics={}, tags={}, files={})
    assert times(uri, run_id, "train/loss") == times(uri, run_id, "perf/samples_per_s") == at[1:]
    assert times(uri, run_id, "val/loss") == [at[3] + 5]
    assert times(uri, run_id, "system/node/cpu_utilization_percentage") == [at[3] + 6]
    assert times(uri, run_id, "checkpoint/stall_s") == [at[3] + 7]
    with open(tmp_path / "run" / "steps.csv", newline="") as file:
        assert [float(row["recorded_at"]) for row in csv.DictReader(file)] == at[1:]
    event = MlflowClient(uri).get_run(run_id).data.tags["scaleray.event.001"]
    assert event == f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at[2]))} | slow input"


def test_points_that_waited_in_a_file_keep_their_times_when_they_are_sent_later(uri, tmp_path, monkeypatch):
    broken = Broken(monkeypatch)
    recorder = Recorder(describe(uri, tmp_path))
    run_id = recorder.start().run_id
    recorder.drain()
    broken.is_away.set()
    recorder.log([step(1, recorded_at=1.7e9), step(2, recorded_at=1.7e9 + 60)])
    unsent = recorder.finish("FINISHED", metrics={}, tags={}, files={})
    broken.is_away.clear()
    replay(unsent, uri=uri)
    assert times(uri, run_id, "train/loss") == [1.7e9, 1.7e9 + 60]


@pytest.mark.parametrize("num_columns", [11, 12])
def test_a_file_of_steps_from_before_rows_had_a_time_or_several_losses_goes_on(uri, tmp_path, num_columns):
    recorder = Recorder(describe(uri, tmp_path))
    recorder.start()
    recorder.log([step(1), step(2)])
    before = killed(recorder)
    path = tmp_path / "run" / "steps.csv"
    path.write_text("".join(",".join(line.split(",")[:num_columns]) + "\n" for line in path.read_text().splitlines()))
    again = Recorder(describe(uri, tmp_path, continues=before))
    again.start()
    again.log([step(3, recorded_at=1.7e9, losses={"generator": 0.5, "discriminator": 1.5})])
    again.finish("FINISHED", metrics={}, tags={}, files={})
    text = path.read_text()
    assert [(row["step"], bool(row["recorded_at"]), row["losses"]) for row in csv.DictReader(io.StringIO(text))] == [
        ("1", num_columns == 12, ""),
        ("2", num_columns == 12, ""),
        ("3", True, "generator=0.5;discriminator=1.5"),
    ]
    assert step_rows(text)[2]["loss_discriminator"] == 1.5 and len(step_rows(text)) == 3


def test_every_evaluation_is_recorded_and_after_a_resume_those_before_it_too(uri, tmp_path):
    recorder = Recorder(describe(uri, tmp_path))
    recorder.start()
    recorder.log(
        [step(1), EvaluationRecord(1, {"val/loss": 0.9}, 0.1), step(2), EvaluationRecord(2, {"val/loss": 0.5}, 0.1)]
    )
    assert recorder.drain().evaluations == {"val/loss": [(1, 0.9), (2, 0.5)]}
    again = Recorder(describe(uri, tmp_path, continues=killed(recorder)))
    again.start()
    again.log(
        [step(2), EvaluationRecord(2, {"val/loss": 0.4}, 0.1), step(3), EvaluationRecord(3, {"val/loss": 0.3}, 0.1)]
    )
    assert again.drain().evaluations == {"val/loss": [(1, 0.9), (2, 0.4), (3, 0.3)]}


def test_evaluations_before_a_resume_are_those_of_the_former_record(uri, tmp_path):
    recorder = Recorder(describe(uri, tmp_path))
    identity = recorder.start()
    recorder.log([EvaluationRecord(number, {"val/loss": 1 / number}, 0.1) for number in (1, 2, 3)])
    recorder.drain()
    former = study_examples.run_record(steps=2, evaluations={"val/loss": [[1, 0.8], [2, None]]})
    (tmp_path / "run/record.json").write_text(former.to_json())
    MlflowClient(uri).log_metric(identity.run_id, "val/loss", 0.01, step=0)
    again = Recorder(describe(uri, tmp_path, continues=killed(recorder)))
    again.start()
    again.log([EvaluationRecord(4, {"val/loss": 0.25}, 0.1)])
    found = again.drain().evaluations["val/loss"]
    assert [*found[:1], *found[2:]] == [(1, 0.8), (3, 1 / 3), (4, 0.25)] and math.isnan(found[1][1])


def test_steps_repeated_after_a_restart_are_kept_once(uri, tmp_path):
    recorder = Recorder(describe(uri, tmp_path))
    run_id = recorder.start().run_id
    recorder.log([step(n) for n in (1, 2, 3)])
    recorder.log([step(n) for n in (1, 2, 3, 4)])
    recorder.finish("FINISHED", metrics={}, tags={}, files={})
    assert [s for s, _ in history(uri, run_id, "train/loss")] == [1, 2, 3, 4]


def test_infinity_is_stored_as_nan(uri, tmp_path):
    recorder = Recorder(describe(uri, tmp_path))
    run_id = recorder.start().run_id
    recorder.log([step(1, loss=math.inf, is_finite=False)])
    recorder.finish("FAILED", metrics={}, tags={}, files={})
    ((_, value),) = history(uri, run_id, "train/loss")
    assert math.isnan(value)
    assert history(uri, run_id, "train/nonfinite_steps") == [(1, 1.0)]


class Broken:
    """A store that refuses while `is_away` is set, in place of the real one's `send`."""

    def __init__(self, monkeypatch):
        self.is_away = threading.Event()
        real = store.RunStore.send

        def send(self_store, operation):
            if self.is_away.is_set():
                raise ConnectionError("the server is away")
            real(self_store, operation)

        monkeypatch.setattr(store.RunStore, "send", send)
        monkeypatch.setattr("scaleray.recording.outbox.FIRST_S", 0.0)
        monkeypatch.setattr("scaleray.recording.outbox.MOST_S", 0.0)


def test_what_the_server_missed_is_written_when_it_returns(uri, tmp_path, monkeypatch):
    broken = Broken(monkeypatch)
    recorder = Recorder(describe(uri, tmp_path))
    recorder.spool._retry_s = 0.0
    run_id = recorder.start().run_id
    recorder.log([step(1)])
    recorder.drain()
    broken.is_away.set()
    recorder.log([step(2), step(3)])
    assert recorder.drain().unsent_file is not None
    assert [s for s, _ in history(uri, run_id, "train/loss")] == [1]
    broken.is_away.clear()
    recorder.log([step(4)])
    recording = recorder.drain()
    assert recorder.finish("FINISHED", metrics={}, tags={}, files={}) is None
    assert [s for s, _ in history(uri, run_id, "train/loss")] == [1, 2, 3, 4]
    assert any("accepts no more data" in e for e in recording.events)
    assert any("MLflow is back" in e for e in recording.events)


def test_logging_does_not_wait_for_a_server_that_hangs(uri, tmp_path, monkeypatch):
    hang, asked = threading.Event(), threading.Event()

    def send(self_store, operation):
        asked.set()
        hang.wait(timeout=30)

    recorder = Recorder(describe(uri, tmp_path))
    monkeypatch.setattr(store.RunStore, "send", send)
    recorder.start()
    assert asked.wait(timeout=10)
    recorder.log([step(n) for n in range(1, 1000)])  # returns although the writer is stuck
    assert not hang.is_set()
    hang.set()
    assert recorder.drain().last_step == 999
    recorder.finish("FINISHED", metrics={}, tags={}, files={})


def test_replay_sends_the_file_of_a_server_that_stayed_away_once(uri, tmp_path, monkeypatch):
    broken = Broken(monkeypatch)
    recorder = Recorder(describe(uri, tmp_path))
    run_id = recorder.start().run_id
    recorder.log([step(1)])
    recorder.drain()
    broken.is_away.set()
    recorder.log([step(2), EvaluationRecord(2, {"val/loss": 0.5}, 0.1)])
    unsent = recorder.finish(
        "FINISHED", metrics={"point/world_size": 1.0}, tags={"scaleray.verdict": "done"}, files={"record.json": "{}"}
    )
    assert unsent is not None
    copy = tmp_path / "copy.jsonl"
    shutil.copy(unsent, copy)
    broken.is_away.clear()
    assert replay(unsent, uri=uri) > 0
    replay(copy, uri=uri)  # as after a crash between sending and removing: nothing doubles
    assert history(uri, run_id, "train/loss") == [(1, 1.0), (2, 1.0)]
    assert history(uri, run_id, "val/loss") == [(2, 0.5)]
    from mlflow import MlflowClient

    run = MlflowClient(uri).get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["scaleray.verdict"] == "done"
    assert not (tmp_path / "run" / "unsent.jsonl").exists()


def test_a_file_sends_nothing_to_a_server_that_it_names_itself_and_no_file_from_elsewhere(uri, tmp_path):
    recorder = Recorder(describe(uri, tmp_path))
    run = recorder.start()
    recorder.finish("FINISHED", metrics={}, tags={}, files={})
    (tmp_path / "secret.txt").write_text("a file of the reader's")
    head = {"tracking_uri": uri, "run_id": run.run_id, "experiment_id": run.experiment_id}
    folder = tmp_path / "from-elsewhere"
    folder.mkdir()
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "own.txt").write_text("own")
    paths = [
        str(tmp_path / "secret.txt"),
        str(folder / "../secret.txt"),
        str(folder / "link.txt"),
        str(folder / "own.txt"),
    ]
    lines = [head, *({"op": "artifact", "path": path} for path in paths)]
    (folder / "unsent.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(TrackingError, match="so nothing is sent to it unless you name it"):
        replay(folder / "unsent.jsonl")
    with pytest.raises(TrackingError, match=r"rejected 3 values .*secret\.txt: it is not in"):
        replay(folder / "unsent.jsonl", uri=uri)
    from mlflow import MlflowClient

    names = {file.path for file in MlflowClient(uri).list_artifacts(run.run_id)}
    assert "own.txt" in names and not {"secret.txt", "link.txt"} & names


def test_a_file_that_is_not_ours_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"op": "metrics"}\n')
    with pytest.raises(TrackingError, match="not written by scaleray"):
        replay(tmp_path / "x.jsonl")
    with pytest.raises(TrackingError, match="does not exist"):
        replay(tmp_path / "y.jsonl")


def test_events_are_kept_once_and_shown(uri, tmp_path):
    recorder = Recorder(describe(uri, tmp_path))
    recorder.start()
    recorder.log([EventRecord("slow input"), EventRecord("slow input")])
    assert recorder.drain().events == ["slow input"]
    position, shown = recorder.poll(0)
    assert [m.text for m in shown] == ["slow input"]
    assert recorder.poll(position) == (position, [])
    recorder.finish("FINISHED", metrics={}, tags={}, files={})


def test_a_server_that_is_not_there_is_named_at_the_start():
    with pytest.raises(TrackingError, match="does not answer"):
        store.check_reachable("http://127.0.0.1:9", timeout_s=1)


def test_an_unwritable_database_is_named_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrackingError, match="cannot be written"):
        store.check_reachable(f"sqlite:///{tmp_path / 'file' / 'mlflow.db'}")


def test_a_folder_store_is_refused_with_what_to_use(tmp_path):
    with pytest.raises(TrackingError, match="sqlite:///FILE"):
        store.resolve_uri(str(tmp_path))


def test_sqlite_paths_become_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert store.resolve_uri("sqlite:///runs.db") == f"sqlite:///{tmp_path / 'runs.db'}"


@pytest.mark.parametrize(("kind", "is_refused"), [("nfs4", True), ("fuse.juicefs", True), ("ext4", False)])
def test_no_database_is_made_by_default_in_a_home_that_machines_share(kind, is_refused, monkeypatch, tmp_path):
    mounts = [SimpleNamespace(mountpoint=place, fstype=of) for place, of in [("/", "ext4"), (str(tmp_path), kind)]]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: mounts)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("SCALERAY_TRACKING__URI", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TrackingError, match=f"{kind}.*SQLite") if is_refused else contextlib.nullcontext():
        assert store.resolve_uri(None) == f"sqlite:///{tmp_path}/home/scaleray/mlflow.db"
    assert store.resolve_uri(f"sqlite:///{tmp_path}/named.db")


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://me:<secret>@db:5432/mlflow",
        "postgresql://db/mlflow?user=me&Password=<secret>&sslmode=require",
        *(f"postgresql://me:<se{sign}cret>@host/db" for sign in "/#?[@:"),
        "postgresql://me:<12/secret>@host/db",
        "postgresql://me@corp:<secret>@host/db?sslpassword=<secret>",
        "mssql+pyodbc:///?odbc_connect=<Driver%3DX%3BPWD%3Dsecret>",
        "mysql://host/db?user=a;passwd=<secret>",
        "postgresql://host:<5432/db?password=se@cret>&user=me",
        *(f"https://host:80/x?{key}=<secret>" for key in ("pwd", "token", "access_token", "AWS_SECRET", "api-key")),
        "https://<secret>@host/a@b",
        "https://<secret>:<>@host",
        "http://me:<pa/secret>@host",
        "http://server:5000",
        "http://server:5000/#/experiments/1/runs/2?workflowType=machine_learning",
        "postgresql://me@db/mlflow",
    ],
)
def test_secrets_of_addresses_are_neither_shown_nor_stored(address, monkeypatch):
    """The parts in <> are secret."""
    given, hidden = re.sub("[<>]", "", address), re.sub("<.*?>", "***", address)
    assert store.without_password(given) == store.without_password(hidden) == hidden
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
    assert store.resolve_uri(hidden) == given


@pytest.mark.parametrize("path", ["s3://bucket/a@b", "s3://bucket/a:1@b", "hdfs://node:8020/me@corp/runs", "/a:b@c"])
def test_addresses_with_an_at_in_their_path_stay(path):
    assert store.without_password(path) == path


def test_secrets_of_an_address_within_an_address_are_hidden():
    given = "s3://bucket/runs?endpoint_override=http://me:secret@host:9000&secret_key=secret"
    assert store.without_password(given) == given.replace("=secret", "=***").replace(":secret", ":***")


def create_run(uri, name):
    store.RunStore.create(uri, experiment="e", run_name=name, tags={})


@pytest.mark.combination
@pytest.mark.timeout(900)
def test_many_processes_may_open_one_new_database_at_once(tmp_path):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    processes = [context.Process(target=create_run, args=(uri, str(number)), daemon=True) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=600)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    assert len(client.search_runs([client.get_experiment_by_name("e").experiment_id])) == 3


def test_the_head_of_an_unsent_file_holds_no_password(uri, tmp_path, monkeypatch):
    broken = Broken(monkeypatch)
    recorder = Recorder(describe(uri, tmp_path))
    recorder.start()
    recorder.drain()
    recorder.spool.store.uri = "postgresql://me:secret@db/mlflow"
    broken.is_away.set()
    recorder.log([step(1)])
    recorder.drain()
    head = json.loads((tmp_path / "run" / "unsent.jsonl").read_text().splitlines()[0])
    assert "secret" not in json.dumps(head)
    recorder.finish("FAILED", metrics={}, tags={}, files={})


def killed(recorder):
    """What `run.json` says of a run whose process is gone without a word."""
    recorder.drain()
    return json.loads((recorder.work_dir / "run.json").read_text())


def rows(tmp_path):
    return [int(line.split(",")[0]) for line in (tmp_path / "run" / "steps.csv").read_text().splitlines()[1:]]


def test_a_continued_run_has_every_point_once_although_mlflow_was_away(uri, tmp_path, monkeypatch):
    recorder = Recorder(describe(uri, tmp_path))
    run_id = recorder.start().run_id
    recorder.log([step(1), step(2)])
    recorder.drain()
    with monkeypatch.context() as away:
        away.setattr(store.RunStore, "send", lambda self, operation: 1 / 0)
        recorder.log([step(3), step(4)])
        before = killed(recorder)
    again = Recorder(describe(uri, tmp_path, continues=before))
    assert again.start().run_id == run_id
    again.log([step(n) for n in (3, 4, 5)])  # from the checkpoint of step 2
    assert again.finish("FINISHED", metrics={}, tags={}, files={}) is None
    assert [s for s, _ in history(uri, run_id, "train/loss")] == [1, 2, 3, 4, 5]
    assert rows(tmp_path) == [1, 2, 3, 4, 5]


def test_points_that_only_steps_csv_has_reach_mlflow_when_their_steps_are_repeated(uri, tmp_path):
    recorder = Recorder(describe(uri, tmp_path))
    run_id = recorder.start().run_id
    recorder.log([step(1), step(2)])
    before = killed(recorder)
    with open(tmp_path / "run" / "steps.csv", "a") as file:  # killed between the file and MLflow
        file.write((tmp_path / "run" / "steps.csv").read_text().splitlines()[-1].replace("2,", "3,", 1) + "\n")
        file.write("4,0.5")
    again = Recorder(describe(uri, tmp_path, continues=before))
    again.start()
    again.log([step(n) for n in (2, 3, 4)])
    again.finish("FINISHED", metrics={}, tags={}, files={})
    assert [s for s, _ in history(uri, run_id, "train/loss")] == [1, 2, 3, 4]
    assert rows(tmp_path) == [1, 2, 3, 4]


def test_a_run_that_goes_on_with_another_config_says_what_changed(uri, tmp_path):
    from mlflow import MlflowClient

    recorder = Recorder(describe(uri, tmp_path))
    run_id = recorder.start().run_id
    recorder.log([step(1)])
    before = killed(recorder)
    for number, change in enumerate(["seed: 0 -> 1", "seed: 1 -> 2"], start=1):
        again = Recorder(
            describe(uri, tmp_path, continues=before, changes=[change], files={"config.yaml": f"seed: {number}\n"})
        )
        again.start()
        again.log([step(number + 1)])
        again.finish("FINISHED", metrics={}, tags={}, files={})
    client = MlflowClient(uri)
    run = client.get_run(run_id)
    assert [run.data.tags[f"scaleray.changed.{n:03d}"] for n in (1, 2)] == ["seed: 0 -> 1", "seed: 1 -> 2"]
    names = {file.path for file in client.list_artifacts(run_id)}
    assert names >= {"config-1.yaml", "config-2.yaml"}


def test_steps_wait_for_room_on_a_full_disk_and_no_checkpoint_may_rely_on_them_before(uri, tmp_path):
    recorder = Recorder(describe(uri, tmp_path))
    recorder.start()
    recorder.log([step(1)])
    assert recorder.durable()["run_id"]
    path = tmp_path / "run" / "steps.csv"
    path.rename(tmp_path / "elsewhere")
    path.mkdir()
    recorder.log([step(2)])
    with pytest.raises(TrackingError, match=r"steps.csv cannot be written"):
        recorder.durable()
    path.rmdir()
    (tmp_path / "elsewhere").rename(path)
    recorder.log([step(3)])
    recorder.durable()
    assert rows(tmp_path) == [1, 2, 3]
    assert any("its rows wait in memory" in event for event in recorder.drain().events)
    recorder.finish("FINISHED", metrics={}, tags={}, files={})


def test_the_end_tries_once_more_whenever_the_next_time_would_have_been(uri, tmp_path, monkeypatch):
    recorder = Recorder(describe(uri, tmp_path))
    run_id = recorder.start().run_id
    with monkeypatch.context() as away:
        away.setattr(store.RunStore, "send", lambda self, operation: 1 / 0)
        recorder.log([step(1)])
        recorder.drain()
        recorder.spool._retry_at = math.inf
    assert recorder.finish("FINISHED", metrics={"point/world_size": 2.0}, tags={}, files={}) is None
    assert [s for s, _ in history(uri, run_id, "train/loss")] == [1]


def test_a_worker_of_an_earlier_larger_group_is_not_missed(uri, tmp_path):
    recorder = Recorder(describe(uri, tmp_path))
    for rank, size in ((0, 3), (1, 3), (2, 3), (0, 2), (1, 2)):
        recorder.beat(Heartbeat(rank, "node", 1, 5, "loss", 0.0, world_size=size))
    assert [beat.rank for beat in recorder.heartbeats()] == [0, 1]


def test_what_alerts_ask_of_links_reaches_the_first_worker_and_what_it_measures_is_published(uri, tmp_path):
    recorder = Recorder(describe(uri, tmp_path))
    recorder.alerts.measure_links()
    wishes = [recorder.beat(Heartbeat(rank, "node", 1, 1, "forward", 0.1, world_size=2)) for rank in (1, 0)]
    assert wishes == [ControlRequest.NOTHING, ControlRequest.LINKS]
    recorder.start()
    recorder.log([LinksMeasured(2, "1", "0", 4e6, 8e7)])
    recorder.durable()
    found = {one.metric: one for one in recorder.publishing.own_series()}
    assert found[live.SLOWEST_LINK].value == pytest.approx(0.05)
    assert recorder.poll(0)[1][:-1] == [], "figures for charts are no lines of a terminal"
    recorder.finish("FINISHED", metrics={}, tags={}, files={})


def test_tries_come_further_and_further_apart_while_mlflow_is_away(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("scaleray.recording.outbox.time", SimpleNamespace(monotonic=lambda: now[0]))
    tried = []

    class Away:
        uri, run_id, experiment_id = "sqlite:///x", "r", "e"

        def send(self, operation):
            tried.append(now[0])
            raise ConnectionError

    spool = Spool(tmp_path / "unsent.jsonl", say=lambda text: None, where=lambda: "step 1")
    spool.store = Away()
    spool.send(SetTags({"a": "b"}))
    while now[0] < 100 + 2 + 4 + 8 + 16 + 30 + 30:
        now[0] += 1
        spool.send_kept()
    assert tried == [100, 102, 106, 114, 130, 160, 190]


def test_a_rank_without_a_sign_of_life_is_published_no_more_unless_it_is_done(uri, tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("scaleray.live.signs_of_life.time", SimpleNamespace(monotonic=lambda: now[0]))
    recorder = Recorder(describe(uri, tmp_path))
    for rank, phase in enumerate(("forward", "forward", "end", "forward")):
        recorder.beat(Heartbeat(rank, "a", 1, 5, phase, 0.0, world_size=4))
        recorder.state.take(RankSample(rank=rank, node="a", world_size=4, step=5, step_at=1.0, step_time_s=0.1))
    now[0] += 30
    recorder.beat(Heartbeat(0, "a", 1, 6, "forward", 0.0, world_size=4))
    assert recorder.silent_ranks(ended={3}) == {1}
    assert {one.labels.get("rank") for one in recorder.publishing.series()} - {None} == {
        "0",
        "2",
    }  # rank 3 has no summary
