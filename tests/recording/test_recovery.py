"""A run is one MLflow run with every point once, and says what it lost, wherever its recorder is killed and whatever its files hold."""

from __future__ import annotations

import json
import threading

import pytest
from fake_mlflow import FakeMlflow
from test_recorder import describe, rows, step

from scaleray.checkpoints.storage import Store
from scaleray.errors import TrackingError
from scaleray.live.steps_file import StepsFile
from scaleray.recording import store, writer
from scaleray.recording.recorder import Recorder
from scaleray.recording.replay import replay
from scaleray.records.run_record import EvaluationRecord, EventRecord

STEPS, EVERY = 12, 4
WRITES = {kind: kind.write for kind in (Store, StepsFile)}


class Killed(BaseException):
    """SIGKILL: nothing that this process would have done happens any more."""


class Life:
    """A process that is killed at its `end`-th write, wherever that is; None lets it live."""

    def __init__(self, end):
        self.end, self.count, self.is_over = end, 0, False

    def write(self, *_):
        if self.is_over or self.count == self.end:
            self.is_over = True
            raise Killed
        self.count += 1


class World:
    """Everything that outlives a process: MLflow, the run's folder, the newest checkpoint."""

    def __init__(self, tmp_path, monkeypatch):
        self.tmp_path, self.mlflow, self.life = tmp_path, FakeMlflow(), Life(None)
        self.checkpoint, self.is_away = 0, False
        self.mlflow.install(monkeypatch)
        self.mlflow.on_call = self._on_call
        monkeypatch.setattr("os.fsync", lambda file: None)  # no power fails here
        monkeypatch.setattr(writer, "FLUSH_S", 0.02)
        monkeypatch.setattr("scaleray.recording.outbox.FIRST_S", 0.0)
        monkeypatch.setattr("scaleray.recording.outbox.MOST_S", 0.0)
        monkeypatch.setattr(threading, "excepthook", lambda found: None)  # a thread that is killed says nothing
        for kind, write in WRITES.items():
            monkeypatch.setattr(kind, "write", self._around(write))

    def _around(self, write):
        def wrapped(*args, **more):
            self.life.write()
            result = write(*args, **more)
            self.life.write()
            return result

        return wrapped

    def _on_call(self, name, is_done):
        self.life.write()
        if self.is_away and name not in ("create_run", "update_run"):
            raise ConnectionError("the server is away")

    def live(self, end=None, *, is_away=False):
        """Train from the newest checkpoint; whether it came to its end."""
        self.life, self.is_away = Life(end), is_away
        note = self.tmp_path / "run" / "run.json"
        about = json.loads(note.read_text()) if note.exists() else None
        try:
            recorder = Recorder(describe(f"sqlite:///{self.tmp_path}/none.db", self.tmp_path, continues=about))
            recorder.start()
            self.is_away = is_away
            for n in range(self.checkpoint + 1, STEPS + 1):
                recorder.log([step(n, loss=1 / n, recorded_at=1e9 + n)])
                if n % EVERY == 0:
                    recorder.log([EvaluationRecord(n, {"val/loss": 2 / n}, 0.1)])
                    recorder.durable()
                    self.life.write()
                    self.checkpoint = n
            recorder.finish("FINISHED", metrics={"point/world_size": 2.0}, tags={"scaleray.verdict": "done"}, files={})
        except (Killed, TrackingError):
            assert self.life.is_over
        return not self.life.is_over

    def assert_whole(self):
        (run,) = self.mlflow.active()
        assert run.info.status == "FINISHED"
        assert run.data.params == {"batch.global_size": "8"}
        assert run.data.tags["scaleray.verdict"] == "done"
        assert self.mlflow.points("train/loss", run) == [(n, 1 / n) for n in range(1, STEPS + 1)]
        assert self.mlflow.points("train/epoch", run) == [(n, n / 10) for n in range(1, STEPS + 1)]
        assert {m.timestamp for m in run.points if m.key == "train/loss"} == {
            int(1e12 + 1000 * n) for n in range(1, STEPS + 1)
        }
        assert self.mlflow.points("val/loss", run) == [(n, 2 / n) for n in range(EVERY, STEPS + 1, EVERY)]
        assert self.mlflow.points("point/world_size", run) == [(STEPS, 2.0)]
        assert rows(self.tmp_path) == list(range(1, STEPS + 1))


@pytest.mark.always("False")
@pytest.mark.parametrize("is_away", [False, True])
def test_a_recorder_that_is_killed_at_any_of_its_writes_leaves_one_run_with_every_point_once(
    tmp_path, monkeypatch, is_away
):
    number = 0
    while True:
        world = World(tmp_path / str(number), monkeypatch)
        is_done = world.live(number, is_away=is_away)
        while not is_done:  # once more, somewhere else, then to its end
            is_done = world.live((7 * number) % 31) or world.live()
        if is_away and not world.life.is_over and world.life.end == number:
            break  # what a server that stays away does not have is in unsent.jsonl, see test_recorder
        world.assert_whole()
        if world.life.end == number and not world.life.is_over:
            break
        number += 1
    assert number > 25  # writes of a whole run, each of which was the last of a process


def test_the_run_is_known_by_its_key_before_mlflow_is_asked_for_one(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    seen = []
    world.mlflow.on_call = lambda name, is_done: seen.append((name, (tmp_path / "run" / "run.json").exists()))
    recorder = Recorder(describe(f"sqlite:///{tmp_path}/none.db", tmp_path))
    recorder.start()
    recorder.finish("FINISHED", metrics={}, tags={}, files={})
    assert seen[0] == ("create_run", True)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    (run,) = world.mlflow.active()
    assert about["run_id"] == run.info.run_id and run.data.tags[store.KEY_TAG] == about["key"]


def test_a_run_whose_making_was_answered_with_an_error_is_not_made_again(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)

    def lose_the_answer(name, is_done):
        if name == "create_run" and is_done:
            raise ConnectionError("the answer was lost")

    world.mlflow.on_call = lose_the_answer
    recorder = Recorder(describe(f"sqlite:///{tmp_path}/none.db", tmp_path))
    recorder.start()
    recorder.finish("FINISHED", metrics={}, tags={}, files={})
    (run,) = world.mlflow.active()
    assert run.info.status == "FINISHED"


@pytest.mark.parametrize("is_late", [False, True])
def test_a_second_run_that_a_repeated_request_made_is_removed(tmp_path, monkeypatch, is_late):
    world = World(tmp_path, monkeypatch)
    make, requests = world.mlflow.create_run, []

    def twice(*args, **more):  # MLflow's HTTP client repeats what was not answered in time, and the server does both
        requests.append((args, more))
        if not is_late:
            make(*args, **more)
        return make(*args, **more)

    world.mlflow.create_run = twice
    recorder = Recorder(describe(f"sqlite:///{tmp_path}/none.db", tmp_path))
    run_id = recorder.start().run_id
    recorder.log([step(1)])
    recorder.drain()
    if is_late:
        make(*requests[0][0], **requests[0][1])
    recorder.finish("FINISHED", metrics={}, tags={}, files={})
    (run,) = world.mlflow.active()
    assert (run.info.run_id, run.info.status) == (run_id, "FINISHED")
    assert len(world.mlflow.runs) == 2


def test_messages_that_arrive_twice_are_recorded_once(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    recorder = Recorder(describe(f"sqlite:///{tmp_path}/none.db", tmp_path))
    recorder.start()
    messages = [
        EventRecord("resumed after step 0", kind="resumed", step=0),
        step(1),
        EvaluationRecord(1, {"val/loss": 1.0}, 0.1),
    ]
    recorder.log(messages)
    recorder.log(messages)
    recording = recorder.drain()
    recorder.finish("FINISHED", metrics={}, tags={}, files={})
    assert (recording.resumed_after, recording.events) == ([0], ["resumed after step 0"])
    (run,) = world.mlflow.active()
    assert world.mlflow.points("val/loss", run) == [(1, 1.0)] and rows(tmp_path) == [1]


def interrupted(world):
    """A run of 8 steps whose newest checkpoint is the last; gives its steps.csv."""
    recorder = Recorder(describe(f"sqlite:///{world.tmp_path}/none.db", world.tmp_path))
    recorder.start()
    recorder.log([step(n, loss=1 / n, recorded_at=1e9 + n, grad_norm=0.5) for n in range(1, 9)])
    recorder.durable()
    return world.tmp_path / "run" / "steps.csv"


def goes_on(world, *, meanwhile=lambda: None):
    """The same run from step 9 to 10; gives what was said. meanwhile: called when the run is open again."""
    about = json.loads((world.tmp_path / "run" / "run.json").read_text())
    again = Recorder(describe(f"sqlite:///{world.tmp_path}/none.db", world.tmp_path, continues=about))
    again.start()
    meanwhile()
    again.log([EventRecord("resumed after step 8", kind="resumed", step=8)])
    again.log([step(n, loss=1 / n, recorded_at=1e9 + n) for n in (9, 10)])
    events = again.drain().events
    again.finish("FINISHED", metrics={}, tags={}, files={})
    return events


def changed_lines(change):
    def harm(content):
        return b"".join(change(content.splitlines(keepends=True)))

    return harm


DAMAGES = {
    "empty": (lambda content: b"", ["lacked steps 1 to 8: MLflow had 8"], 8),
    "zeros": (lambda content: bytes(len(content)), ["was damaged: it has no complete line", "lacked steps 1 to 8: MLflow had 8"], 8),
    "binary": (lambda content: bytes(range(256)) * 4, ["was damaged: its first line is", "lacked steps 1 to 8: MLflow had 8"], 8),
    "cut in a line": (lambda content: content[: len(content) // 2], ["lacked steps 4 to 8: MLflow had 5"], 5),
    "cut at a line": (changed_lines(lambda lines: lines[:4]), ["lacked steps 4 to 8: MLflow had 5"], 5),
    "its middle is gone": (changed_lines(lambda lines: lines[:3] + lines[6:]), ["lacked steps 3 to 5: MLflow had 3"], 3),
    "other columns": (
        changed_lines(lambda lines: [b"step,loss\n", *(b",".join(line.split(b",")[:2]) + b"\n" for line in lines[1:])]),
        ["was damaged: its first line is 'step,loss'", "lacked steps 1 to 8: MLflow had 8"], 8,
    ),
    "no columns": (changed_lines(lambda lines: lines[1:]), ["was damaged: its first line is '1,", "lacked steps 1 to 8: MLflow had 8"], 8),
    "out of order": (changed_lines(lambda lines: lines[:1] + lines[:0:-1]), ["was damaged: the steps are not in order"], 0),
    "doubled": (changed_lines(lambda lines: lines + lines[5:]), ["was damaged: 4 steps are repeated, the steps are not in order"], 0),
    "a line of text": (
        changed_lines(lambda lines: [*lines[:4], b"\xff\x00 no step\n", *lines[5:]]),
        ["was damaged: 1 lines are not steps", "lacked steps 4: MLflow had 1"], 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_run_that_goes_on_says_what_its_steps_lack_and_has_it_back_from_mlflow(tmp_path, monkeypatch, name):
    harm, said, num_restored = DAMAGES[name]
    world = World(tmp_path, monkeypatch)
    path = interrupted(world)
    content = path.read_bytes()
    path.write_bytes(harm(content))
    events = goes_on(world)
    told = [event for event in events if event.startswith("steps.csv")]
    assert len(told) == len(said) and all(words in event for words, event in zip(said, told, strict=True)), told
    assert rows(tmp_path) == list(range(1, 11))
    restored = [line.split(",") for line in path.read_text().splitlines()[1:] if not line.split(",")[3]]
    assert len(restored) == num_restored  # MLflow does not keep the number of samples
    for step_, loss, _, _, rate, norm, *_, is_finite, size, at, _ in restored:
        assert (float(loss), rate, norm, is_finite, size) == (1 / int(step_), "0.1", "0.5", "True", "1")
        assert float(at) == 1e9 + int(step_)
    kept = path.with_name("steps.csv.damaged")
    if harm(content):
        assert kept.read_bytes() == harm(content) and all("kept as steps.csv.damaged" in event for event in told)
    (run,) = world.mlflow.active()
    assert [n for n, _ in world.mlflow.points("train/loss", run)] == list(range(1, 11))


def test_steps_that_mlflow_has_not_or_does_not_give_are_named_as_lost(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    path = interrupted(world)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], *lines[5:]]))
    (run,) = world.mlflow.active()
    run.points = {m for m in run.points if m.step != 3}
    assert any("lacked steps 2 to 4: MLflow had 2 of them" in e and "; steps 3 are lost" in e for e in goes_on(world))

    def away(*args):
        raise ConnectionError("the server is away")

    run.data.tags.clear()  # what was said before
    path.write_text("".join([*lines[:2], *lines[5:]]))
    events = goes_on(world, meanwhile=lambda: monkeypatch.setattr(world.mlflow, "get_metric_history", away))
    (told,) = [event for event in events if event.startswith("steps.csv lacked")]
    assert "lacked steps 2 to 4: MLflow could not be queried for them (ConnectionError); steps 2 to 4 are lost" in told
    assert rows(tmp_path) == [1, *range(5, 11)]


def test_a_kill_that_cut_the_last_line_is_no_damage(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    path = interrupted(world)
    with open(path, "a") as file:
        file.write("9,0.1")
    assert not [event for event in goes_on(world) if event.startswith("steps.csv")]
    assert rows(tmp_path) == list(range(1, 11))


def test_steps_after_the_checkpoint_are_taken_again_where_some_of_them_are_missing(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    path = interrupted(world)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:6], *lines[7:]]))  # 6 is missing, and training goes on after 4
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    again = Recorder(describe(f"sqlite:///{tmp_path}/none.db", tmp_path, continues=about))
    again.start()
    again.log([step(n, loss=1 / n) for n in range(5, 11)])
    again.finish("FINISHED", metrics={}, tags={}, files={})
    assert rows(tmp_path) == list(range(1, 11))


def test_other_damaged_files_of_a_run_are_named_kept_and_written_anew(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    interrupted(world)
    folder = tmp_path / "run"
    (folder / "config.yaml").write_bytes(b"a: [\0")
    head = {"tracking_uri": f"sqlite:///{tmp_path}/none.db", "run_id": "0" * 32, "experiment_id": "1"}
    whole = {"op": "metrics", "points": [["val/loss", 0.5, 5, 8]]}
    lines = [
        json.dumps(head),
        json.dumps(whole),
        '{"op": "metrics"}',
        '{"op": ["tags"]}',
        "\0\0",
        '{"op": "tags", "values": {"cut": "he',
    ]
    (folder / "unsent.jsonl").write_text("\n".join(lines))
    events = goes_on(world)
    assert "config.yaml was damaged and has been rewritten; the old one is kept as config.yaml.damaged" in events
    assert (folder / "config.yaml").read_text() == "a: 1\n"
    assert (folder / "config.yaml.damaged").read_bytes() == b"a: [\0"
    (told,) = [event for event in events if event.startswith("unsent.jsonl")]
    assert "3 of its lines cannot be read, 1 can; it is kept as unsent.jsonl.damaged" in told
    (run,) = world.mlflow.active()
    assert world.mlflow.points("val/loss", run) == [(8, 0.5)]


def test_a_damaged_unsent_file_is_sent_as_far_as_it_can_be_read_and_says_what_is_lost(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    monkeypatch.setattr(store, "check_reachable", lambda uri: None)
    interrupted(world)
    (run,) = world.mlflow.active()
    head = json.dumps(
        {"tracking_uri": f"sqlite:///{tmp_path}/none.db", "run_id": run.info.run_id, "experiment_id": "1"}
    )
    path = tmp_path / "copy.jsonl"
    path.write_text(
        head + '\n{"op": "metrics", "points": [["val/loss", 0.5, 5, 8]]}\n{"op": "metrics", "points": [[1]]}\n{"op"'
    )
    with pytest.raises(TrackingError, match="has unreadable lines: 2; operations sent: 1"):
        replay(path, uri=f"sqlite:///{tmp_path}/none.db")
    assert world.mlflow.points("val/loss", run) == [(8, 0.5)]
    assert not path.exists() and (tmp_path / "copy.jsonl.damaged").exists()
    path.write_bytes(b"\0\1\2")
    with pytest.raises(TrackingError, match="its first line does not name its run"):
        replay(path)
