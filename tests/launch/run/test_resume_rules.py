"""Which run `--resume` takes, and what it refuses, without starting any."""

from __future__ import annotations

import contextlib
import errno
import json

import pytest

from scaleray import train
from scaleray.config import load_config
from scaleray.errors import CheckpointError, ConfigError, StorageError
from scaleray.launch.run import resume
from scaleray.launch.run.resume import check_changes, config_of, find
from scaleray.launch.session.run_folder import RunFolder


def options(tmp_path, **more):
    values = {
        "workload.name": "launch_rules:Line",
        "batch.global_size": 16,
        "optimizer.learning_rate": 0.01,
        "stop.after": "3 steps",
        "checkpoint.storage_path": str(tmp_path / "runs"),
        "tracking.uri": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "checkpoint.every": "1 steps",
    }
    return {**values, **{key.replace("__", "."): value for key, value in more.items()}}


def config(tmp_path, **more):
    return load_config(flags=options(tmp_path, **more), environ={})


def leave_run(tmp_path, name, *, status=None, started_at=1.0, base_dir=None, **more):
    """The folder of a run, as a process that was killed leaves it, or one that ended."""
    folder = tmp_path / "runs" / name
    folder.mkdir(parents=True)
    about = {"name": name, "config": config(tmp_path, **more).to_dict(), "started_at": started_at, "base_dir": base_dir}
    (folder / "run.json").write_text(json.dumps(about))
    if status:
        (folder / "record.json").write_text(json.dumps({"status": status}))
    return folder


def test_auto_takes_the_newest_unfinished_run_of_the_same_training(tmp_path):
    leave_run(tmp_path, "old", started_at=1.0)
    newest = leave_run(tmp_path, "newest", started_at=2.0, status="FAILED", scale__workers=4)
    leave_run(tmp_path, "finished", started_at=3.0, status="FINISHED")
    leave_run(tmp_path, "other-training", started_at=4.0, seed=5)
    leave_run(tmp_path, "other-project", started_at=5.0, base_dir="/somewhere/else")
    assert find("auto", config(tmp_path)).path == str(newest)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"base_dir": 5}, "base_dir is 5"),
        ({"config": {"batch": {}}}, "it has no config.checkpoint"),
        ({"config": {"checkpoint": [1]}}, r"config.checkpoint is \[1\]"),
        ({"run_id": "a", "experiment_id": None}, "it has no experiment_id"),
        ({"run_id": 7}, "run_id is 7"),
        ({"tracking_uri": ["a"]}, "tracking_uri is"),
        ({"started_at": "x"}, "started_at is 'x'"),
    ],
)
def test_a_run_json_with_another_type_is_one_error_that_names_file_and_key(tmp_path, change, named):
    """A traceback: KeyError, TypeError or AttributeError."""
    folder = leave_run(tmp_path, "run")
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**about, **change}))
    with pytest.raises(CheckpointError, match=named) as caught:
        find(str(folder), None)
    assert "run.json" in str(caught.value)
    said = []
    assert find("auto", config(tmp_path), say=said.append) is None
    assert "run.json is damaged" in said[0]


def test_auto_without_such_a_run_is_a_fresh_start(tmp_path):
    assert find("auto", config(tmp_path)) is None
    leave_run(tmp_path, "finished", status="FINISHED")
    assert find("auto", config(tmp_path)) is None
    assert find("auto", config(tmp_path, tracking__run_name="mine")) is None


def test_auto_with_a_name_takes_the_run_of_that_name(tmp_path):
    leave_run(tmp_path, "newer", started_at=2.0)
    folder = leave_run(tmp_path, "mine", started_at=1.0, status="FAILED")
    assert find("auto", config(tmp_path, tracking__run_name="mine")).path == str(folder)


def test_a_run_is_found_by_its_name_and_gives_its_config(tmp_path):
    folder = leave_run(tmp_path, "mine", seed=7)
    assert find("mine", config(tmp_path)).path == str(folder)
    assert config_of(str(folder), ["--scale.workers", "3"]).scale.workers == 3
    assert config_of(str(folder), []).seed == 7


@pytest.mark.parametrize("where", ["nowhere", "/nowhere/at/all"])
def test_what_is_no_run_is_refused_with_one_message(tmp_path, where):
    with pytest.raises(CheckpointError, match=r"run\.json"):
        find(where, config(tmp_path))


def test_changes_are_listed_and_those_that_alter_the_training_refused(tmp_path):
    leave_run(tmp_path, "mine")
    before = find("mine", config(tmp_path))
    harmless = check_changes(before, config(tmp_path, scale__workers=4, checkpoint__every="2 steps"), ())
    assert {change.key for change in harmless} == {"scale.workers", "checkpoint.every"}
    other = config(tmp_path, optimizer__learning_rate=0.5, seed=3)
    with pytest.raises(ConfigError) as refused:
        check_changes(before, other, ())
    assert "optimizer.learning_rate: 0.01 -> 0.5" in str(refused.value) and "seed: 0 -> 3" in str(refused.value)
    assert "--allow-change optimizer.learning_rate --allow-change seed" in str(refused.value)
    with pytest.raises(ConfigError, match="seed"):
        check_changes(before, other, ("optimizer.learning_rate",))
    assert len(check_changes(before, other, ("optimizer.learning_rate", "seed"))) == 2
    with pytest.raises(ConfigError, match="has no such change"):
        check_changes(before, config(tmp_path), ("seed",))


def test_a_password_that_was_not_kept_is_asked_for(tmp_path):
    leave_run(tmp_path, "mine")
    secret = config(
        tmp_path,
        checkpoint__storage_path="s3://key:very-secret@bucket/runs",
        workload__weights="s3://k:very-secret@b/w",
    )
    assert "very-secret" not in json.dumps(secret.to_dict())
    saved = load_config(
        flags=options(tmp_path, **{"checkpoint.storage_path": secret.to_dict()["checkpoint"]["storage_path"]}),
        environ={},
    )
    with pytest.raises(ConfigError, match="password"):
        check_changes(find("mine", config(tmp_path)), saved, ())


def test_a_name_in_use_says_how_to_continue_and_a_leftover_can_be_taken(tmp_path):
    leave_run(tmp_path, "mine")
    named = config(tmp_path, tracking__run_name="mine")
    with pytest.raises(ConfigError, match="--resume"):
        RunFolder.reserve(named)
    leftover = tmp_path / "runs" / "killed-early"
    leftover.mkdir()
    (leftover / ".lock").touch()
    folder = RunFolder.reserve(config(tmp_path, tracking__run_name="killed-early"))
    folder.unlock()


@pytest.mark.parametrize("is_locked", [True, False])
def test_a_folder_that_cannot_be_locked_is_not_said_to_be_in_use(is_locked, monkeypatch, caplog, tmp_path):
    def refused(*_):
        raise OSError(errno.EAGAIN if is_locked else errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", refused)
    with pytest.raises(StorageError, match="another process") if is_locked else contextlib.nullcontext():
        RunFolder.reserve(config(tmp_path, tracking__run_name="unlockable")).unlock()
    assert ("cannot be locked (no locks available)" in caplog.text) is not is_locked


def test_copies_of_another_run_of_that_name_are_not_taken_for_ones_own(tmp_path):
    copies = tmp_path / "copies" / "mine" / "checkpoints" / "step-000000004"
    copies.mkdir(parents=True)
    with pytest.raises(ConfigError, match="another run called mine"):
        RunFolder.reserve(
            config(
                tmp_path,
                tracking__run_name="mine",
                checkpoint__copies=2,
                checkpoint__copy_path=str(tmp_path / "copies"),
            )
        )


@pytest.mark.usefixtures("mlflow_database")
class TestFinished:
    def run(self, tmp_path, **more):
        from workloads import Line

        return train(options(tmp_path, tracking__run_name="whole", **more), Line(), local=True)

    def test_a_finished_run_is_left_as_it_is(self, tmp_path):
        from workloads import Line

        first = self.run(tmp_path)
        record = (tmp_path / "runs" / "whole" / "record.json").read_bytes()
        said = []
        again = train(None, Line(), resume=str(tmp_path / "runs" / "whole"), local=True, say=said.append)
        assert again.steps == first.steps == 3 and again.run_id == first.run_id
        assert any("already finished" in line for line in said)
        assert (tmp_path / "runs" / "whole" / "record.json").read_bytes() == record

    @pytest.mark.combination
    def test_it_can_be_made_longer_if_one_says_so(self, tmp_path):
        from workloads import Line

        self.run(tmp_path)
        longer = options(tmp_path, stop__after="5 steps")
        with pytest.raises(ConfigError, match=r"stop\.after"):
            train(longer, Line(), resume=str(tmp_path / "runs" / "whole"), local=True)
        record = train(
            longer, Line(), resume=str(tmp_path / "runs" / "whole"), allow_change=("stop.after",), local=True
        )
        assert record.steps == 5 and record.resumed_after == [3]

    @pytest.mark.combination
    def test_another_model_is_refused_and_nothing_is_overwritten(self, tmp_path):

        self.run(tmp_path)
        folder = tmp_path / "runs" / "whole"
        before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name != ".lock"}
        changed = options(tmp_path, stop__after="5 steps")
        with pytest.raises(CheckpointError, match="belongs to another model"):
            train(changed, WiderLine(), resume=str(folder), allow_change=("stop.after",), local=True)
        after = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name != ".lock"}
        assert after == before


def WiderLine():
    from torch import nn
    from workloads import Line

    class Wider(Line):
        def build_model(self):
            return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))

    return Wider()


@pytest.mark.parametrize(
    "content", [b"", bytes(50), b"[]", b'{"config": 3}', b'{"name": "x"}', b"\xff\xfe", b'{"config": {"seed']
)
def test_a_damaged_run_json_is_named_and_auto_says_that_it_passes_the_folder_over(tmp_path, content):
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"run.json of the run .* is damaged: .*\n.*--workload.weights"):
        resume.find(str(folder), None)
    said = []
    assert resume.find("auto", config(tmp_path), say=said.append) is None
    (told,) = said
    assert f"{folder} is skipped: its run.json is damaged" in told


def test_a_damaged_config_in_run_json_is_named_by_its_key(tmp_path):
    with pytest.raises(CheckpointError, match="is damaged: "):
        resume.Interrupted(str(tmp_path), {"config": {"batch": {"global_size": "many"}}}, None).valid_config()


@pytest.mark.parametrize("content", [b"", bytes(50), b"[]", b'{"name": 1}', b"\xff\xfe"])
def test_a_damaged_record_is_named_and_the_run_is_taken_as_one_that_has_not_ended(tmp_path, content):
    (tmp_path / "record.json").write_bytes(content)
    said = []
    assert resume.Interrupted(str(tmp_path), {}, None).finished_record(said.append) is None
    (told,) = said
    assert f"record.json of {tmp_path} is damaged" in told
