"""What the driver does when the recorder's process or Ray Train's controller is lost, and what a worker keeps meanwhile. Without a cluster."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError

from scaleray.config import load_config
from scaleray.errors import RunFailedError
from scaleray.launch.run import trainer
from scaleray.records.run_record import EventRecord
from scaleray.training import worker


class FakeRecorder:
    """Instead of the actor: is lost when told, and knows what it heard since it was spawned."""

    published_as, description = None, SimpleNamespace(run_name="run")

    def __init__(self):
        self.actor, self.heard, self.spawned = object(), [], 1
        self.is_gone = self.is_started = False

    def respawn(self):
        self.actor, self.heard, self.is_gone = object(), [], False
        self.spawned += 1

    def is_lost(self):
        return self.is_gone

    def log(self, messages):
        self.heard += messages

    def wait_started(self, timeout_s=None):
        self.is_started = self.is_started or timeout_s != 0
        return self.is_started

    def heartbeats(self):
        return []

    def silent_s(self):
        return 1e9

    def poll(self, position):
        new = [EventRecord("a step")][position:] if self.is_started else []
        return position + len(new), new

    def drain(self):
        pass


class Job:
    def __init__(self, max_failures):
        flags = {"workload.name": "x", "batch.global_size": 8, "optimizer.learning_rate": 0.1, "stop.after": "1 steps"}
        self.config = load_config(flags={**flags, "scale.max_failures": max_failures})


@pytest.fixture
def fit(monkeypatch):
    """Runs `fit` with attempts that do what they are told, one after another; gives the recorders that they were given."""
    recorder, actors, shown, groups = FakeRecorder(), [], [], {"of others"}
    monkeypatch.setattr(trainer, "alive_nodes", list)
    monkeypatch.setattr(trainer, "own_placement_groups", lambda: set(groups))
    monkeypatch.setattr(trainer, "remove_placement_groups", groups.difference_update)

    def run(*attempts, max_failures=3):
        left = list(attempts)

        class Attempt:
            def fit(self):
                attempt = left.pop(0)
                assert groups == {"of others"}, "a group of a controller that died would keep this one waiting for ever"
                groups.add(f"of attempt {len(left)}")
                if attempt == "recorder lost":
                    recorder.is_gone = True
                    raise ray.train.TrainingFailedError("its callbacks could not reach the recorder")
                if attempt == "controller lost":
                    raise ActorDiedError()
                if attempt == "recorder lost at the end":
                    recorder.is_gone = True

        def make(config, worker, task, **more):
            actors.append(task.recorder)
            return Attempt()

        monkeypatch.setattr(trainer, "torch_trainer", make)
        trainer.fit(Job(max_failures), {}, recorder, run_path="", facts={}, can_be_preempted=False, show=shown.extend)
        assert not left
        return actors

    run.recorder, run.shown = recorder, shown
    return run


def test_steps_are_shown_although_mlflow_starts_after_the_last_one(fit):
    fit("done")
    assert [message.text for message in fit.shown] == ["a step"]


@pytest.mark.parametrize("how", ["recorder lost", "recorder lost at the end"])
def test_a_lost_recorder_is_spawned_again_and_the_workers_with_it(fit, how):
    first, second, third = fit(how, "controller lost", "done")
    assert first is not second and second is third is fit.recorder.actor
    assert fit.recorder.spawned == 2
    texts = [message.text for message in fit.recorder.heard]
    assert texts[0].startswith("the recorder's process was lost; starting again from the newest checkpoint, 1 of 3")
    assert texts[1].startswith("Ray Train's controller was lost; starting again from the newest checkpoint, 2 of 3")


def test_a_recorder_that_is_lost_again_and_again_ends_the_run(fit):
    with pytest.raises(RunFailedError, match="the recorder's process was lost repeatedly"):
        fit("recorder lost", "recorder lost", max_failures=1)


class Call:
    """An answer of the recorder that is on its way, has come, or will not come."""

    def __init__(self, messages):
        self.messages, self.state = list(messages), "under way"


@pytest.fixture
def calls(monkeypatch):
    """The sender's calls, in order."""
    found = []

    class Actor:
        class log:
            @staticmethod
            def remote(messages):
                found.append(Call(messages))
                return found[-1]

    def get(call, timeout=None):
        if call.state == "lost":
            raise ActorDiedError()

    monkeypatch.setattr(ray, "wait", lambda refs, timeout: ([r for r in refs if r.state != "under way"], []))
    monkeypatch.setattr(ray, "get", get)
    found_actor = Actor
    return found, found_actor


def test_messages_that_did_not_arrive_are_sent_again_in_their_order(calls):
    made, actor = calls
    send = worker.Sender(actor, interval_s=0.0)
    one, two, three = (EventRecord(str(n)) for n in range(3))
    send(one)
    send(two)  # waits behind the first, which is under way
    made[0].state = "lost"
    send(three)
    assert [call.messages for call in made] == [[one], [one, two, three]]
    made[1].state = "arrived"
    assert send.flush()
    assert len(made) == 2


def test_a_flush_whose_messages_did_not_arrive_says_so(calls):
    made, actor = calls
    send = worker.Sender(actor, interval_s=0.0)
    send(EventRecord("one"))
    assert not send.flush()  # it is under way for too long, as on a loaded machine
    made[0].state = "arrived"
    assert send.flush()
    send(EventRecord("two"))
    made[-1].state = "lost"
    assert not send.flush()


def test_a_recorder_that_does_not_answer_in_time_does_not_end_the_run(monkeypatch, tmp_path):
    class Busy:
        class heartbeats:
            @staticmethod
            def remote():
                return None

        class log:
            @staticmethod
            def remote(messages):
                told.extend(messages)

    def late(ref, timeout):
        raise GetTimeoutError("busy")

    told = []
    monkeypatch.setattr(ray, "get", late)
    restart = trainer.restart_callback(Busy, max_failures=3, run_path=str(tmp_path))
    restart.after_exception(None, {0: RuntimeError("the worker died")})
    assert "starting again from the newest checkpoint, 1 of 3" in told[0].text


@pytest.mark.parametrize("how", ["recorder lost", "recorder lost at the end"])
def test_a_run_that_a_lost_recorder_ends_says_what_was_lost_first(fit, how):
    with pytest.raises(RunFailedError) as caught:
        fit(how, max_failures=0)
    assert caught.value.__cause__ is not None


def restart_after(monkeypatch, failures):
    """What is said when these workers fail, by rank."""
    told = []

    class Recorder:
        class heartbeats:
            remote = staticmethod(lambda: [])

        class log:
            remote = staticmethod(told.extend)

    monkeypatch.setattr(ray, "get", lambda ref, timeout: ref)
    trainer.restart_callback(Recorder, max_failures=3, run_path="/no/run").after_exception(None, failures)
    return told[0].text


def test_a_node_that_was_taken_away_costs_no_restart_although_other_workers_fail_with_it(monkeypatch):
    gone, other = RuntimeError("the node is gone"), RuntimeError("the worker died")
    gone.preempted = True
    assert "its node was taken away" in restart_after(monkeypatch, {0: gone, 1: other})
    assert "1 of 3" in restart_after(monkeypatch, {0: other, 1: RuntimeError("so did this one")})
