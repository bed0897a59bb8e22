"""By what a run is asked: its folder, its recorder in a cluster, or MLflow."""

import contextlib
import dataclasses
import json

import pytest
from live_states import describe, live_state, step

from scaleray.errors import ClusterError, TrackingError
from scaleray.launch.watch import find
from scaleray.launch.watch.find import RecorderGone
from scaleray.recording.recorder import Recorder


@pytest.fixture
def found(tmp_path, monkeypatch, uri):
    """`find_watched` with runs and an MLflow of the test's own."""
    monkeypatch.setenv("SCALERAY_CHECKPOINT__STORAGE_PATH", str(tmp_path / "runs"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with contextlib.ExitStack() as stack:
        yield lambda run: find.find_watched(str(run), stack, uri=uri)


class Cluster:
    """Recorders of a cluster that answer what the test wants."""

    def __init__(self, monkeypatch, *states):
        self.states, self.asked, self.is_gone = list(states), 0, False
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        monkeypatch.setattr(find, "cluster_runs", lambda: contextlib.nullcontext(self.runs))

    def runs(self):
        return [(state, lambda state=state: self.ask(state)) for state in self.states]

    def ask(self, state):
        self.asked += 1
        if self.is_gone:
            raise RecorderGone("gone")
        return state


def put(folder, state):
    folder.mkdir(parents=True)
    (folder / "live.json").write_text(state.to_json())


def recorded(uri, tmp_path, *, status="FINISHED", name="run", **more):
    """A run in MLflow whose folder is not on this machine."""
    recorder = Recorder(describe(uri, tmp_path / name, run_name="run", params={"derived.total_steps": 9}, **more))
    identity = recorder.start()
    recorder.log([step(n, loss=1 / n) for n in range(1, 4)])
    recorder.drain()
    if status is not None:
        recorder.finish(status, metrics={}, tags={"scaleray.verdict": "done"}, files={})
    return identity.run_id


def test_a_run_that_lives_here_is_asked_by_its_folder_whatever_clusters_there_are(found, tmp_path, monkeypatch):
    cluster = Cluster(monkeypatch, live_state(name="mine", step=1))
    put(tmp_path / "runs" / "mine", live_state(name="mine", step=99))
    assert found("mine").look().step == 99 and found("mine").where == f"folder {tmp_path / 'runs' / 'mine'}"
    assert cluster.asked == 0


def test_a_run_of_the_cluster_is_found_by_its_name_and_by_its_id(found, monkeypatch):
    Cluster(monkeypatch, live_state(name="other", run_id="1"), live_state(name="mine", run_id="2", step=7))
    assert found("mine").look().step == found("2").look().step == 7
    assert found("mine").where == "cluster 10.0.0.1:6379"


def test_two_runs_of_one_name_in_a_cluster_are_told_apart_by_their_ids(found, monkeypatch):
    Cluster(monkeypatch, live_state(name="mine", run_id="1"), live_state(name="mine", run_id="2"))
    with pytest.raises(TrackingError, match=r"2 runs of the cluster have this name: 1 .*, 2 .*\n  give an id"):
        found("mine")
    assert found("2").look().run_id == "2"


def test_a_run_whose_recorder_is_gone_ends_as_its_folder_or_mlflow_says(found, tmp_path, monkeypatch, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    run_id = recorded(uri, tmp_path, status="FAILED")
    folder = tmp_path / "elsewhere"
    here = live_state(name="here", run_id="0", run_dir=str(folder))
    cluster = Cluster(monkeypatch, live_state(name="mine", run_id=run_id), here)
    mine, other = found("mine"), found("here")
    assert mine.look().status == "RUNNING"
    cluster.is_gone = True
    assert (mine.look().status, mine.look().verdict) == ("FAILED", "done")
    put(folder, dataclasses.replace(here, status="KILLED"))
    assert other.look().status == "KILLED"


def test_a_cluster_that_is_away_is_said_unless_the_run_is_found_otherwise(found, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ClusterError, match="no Ray cluster answers there"):
        found("mine")
    put(tmp_path / "runs" / "mine", live_state(name="mine", status="FINISHED"))
    assert found("mine").look().status == "FINISHED"


def test_mlflow_is_asked_for_a_run_that_is_nowhere_else(found, tmp_path, uri):
    run_id = recorded(uri, tmp_path)
    state = found(run_id).look()
    assert (state.name, state.status, state.step, state.total_steps, state.verdict) == ("run", "FINISHED", 3, 9, "done")
    assert [point[1] for point in state.curve] == pytest.approx([1, 1 / 2, 1 / 3]) and found(
        "run"
    ).least_s == find.MLFLOW_EVERY_S


def test_alerts_of_a_run_are_read_from_its_tags_where_mlflow_alone_is_asked(found, tmp_path, uri):
    told = {"scaleray.alert.straggler": "firing: rank 1 is late: 30 ms", "scaleray.alert.hang": "resolved: over"}
    run_id = recorded(uri, tmp_path, tags={"scaleray.kind": "train", **told, "scaleray.alert.odd": "?"})
    state = found(run_id).look()
    assert [(one.name, one.state) for one in state.alerts] == [("hang", "resolved"), ("straggler", "firing")]
    assert state.firing[0].summary == "rank 1 is late: 30 ms" and state.firing[0].severity in ("warning", "critical")


def test_of_several_runs_of_one_name_in_mlflow_the_one_that_runs_is_taken_and_the_others_named(found, tmp_path, uri):
    running = recorded(uri, tmp_path, status=None, name="a")
    ended = recorded(uri, tmp_path, name="b")
    state = found("run").look()
    assert state.run_id == running and state.status == "RUNNING" and ended in state.notes[-1]


def test_a_run_of_mlflow_whose_folder_is_here_is_asked_by_its_folder(found, tmp_path, uri):
    folder = tmp_path / "a" / "run"
    run_id = recorded(uri, tmp_path, name="a", tags={"scaleray.kind": "train", "scaleray.run_dir": str(folder)})
    assert found(run_id).where == f"folder {folder}" and found(run_id).look().status == "FINISHED"


class Bucket:
    """A run's folder that is elsewhere."""

    root = "s3://bucket/run"

    def __init__(self):
        self.files = {}

    def read(self, name):
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name].encode()


def test_a_run_in_a_bucket_is_shown_by_mlflow_until_its_files_are_there(found, tmp_path, uri, monkeypatch):
    run_id, bucket = recorded(uri, tmp_path, status=None), Bucket()
    monkeypatch.setattr(find, "locations_of", lambda run: [bucket])
    with pytest.raises(TrackingError, match="holds no run of this version"):
        found(bucket.root)
    bucket.files["run.json"] = json.dumps({"run_id": run_id, "tracking_uri": uri})
    assert found(bucket.root).look().status == "RUNNING"
    bucket.files["live.json"] = live_state(status="FINISHED").to_json()
    assert found(bucket.root).look().status == "FINISHED"


def test_all_runs_are_those_of_this_machine_and_of_the_cluster_each_once(tmp_path, monkeypatch, found):
    put(tmp_path / "runs" / "mine", live_state(name="mine", run_id="1"))
    Cluster(monkeypatch, live_state(name="mine", run_id="1", step=5), live_state(name="there", run_id="2"))
    with contextlib.ExitStack() as stack:
        look = find.watched_runs(stack)
        assert [state.name for state in look()] == ["mine", "there"]
