"""A training that waits after its evaluations is the same training, stops where it is told to, and goes on from a save."""

import threading

import pytest
import torch
from small_runs import Classify, Finished, make_job, same_generators, train_alone

from scaleray.checkpoints.catalog import Catalog
from scaleray.errors import LeftEarly, RunFailedError, ScaleRayError
from scaleray.records.run_record import StepRecord
from scaleray.training import loop
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.state.pausable_training import (
    COURSE,
    AskingCheckpointing,
    Decision,
    Ended,
    Paused,
    StepwiseTraining,
)

FLAGS = {"evaluation.every": "2 steps", "stop.after": "9 steps", "optimizer.momentum": 0.9}


class Stepwise:
    """A StepwiseTraining of one worker here, with its steps and final weights."""

    def __init__(self, flags=None, *, pauses=True, start_from=None, workload=None):
        self.weights, self.losses = {}, []
        job, sources = make_job(workload or Classify(num_rows=26, num_val=5), {**FLAGS, **(flags or {})})
        self.config = job.config.to_dict()

        def train(emit, make_checkpointing):
            def watch(message):
                if isinstance(message, StepRecord):
                    self.losses.append(message.loss)
                emit(message)

            with same_generators():
                return loop.run(
                    job,
                    RankContext(),
                    sources=sources,
                    emit=watch,
                    save_weights=lambda share, name: self.weights.update(share.tensors),
                    checkpointing=make_checkpointing(job, RankContext()),
                )

        self.training = StepwiseTraining(train, pauses=pauses, start_from=start_from)

    def to_the_end(self):
        happened = []
        while not (happened and isinstance(happened[-1], Ended)):
            happened.append(self.training.advance(timeout_s=60))
        return happened


def plain() -> Finished:
    return train_alone(Classify(num_rows=26, num_val=5), FLAGS)


@pytest.mark.parametrize("pauses", [True, False])
def test_it_is_the_training_that_does_not_wait_to_the_bit(pauses):
    stepwise = Stepwise(pauses=pauses)
    happened = stepwise.to_the_end()
    expected = plain()
    assert happened[-1].error is None and happened[-1].summary.steps == 9
    assert stepwise.losses == expected.losses
    assert all(torch.equal(stepwise.weights[name], value) for name, value in expected.weights.items())
    assert [h.step for h in happened[:-1]] == ([2, 4, 6, 8] if pauses else [])
    course = stepwise.training.course
    assert (course.step, course.samples) == (9, sum(m.num_samples for m in expected.steps))
    assert [m for _, _, m, _ in stepwise.training.curve] == [e.metrics for e in expected.evaluations]


def test_the_curve_counts_samples_and_seconds_of_training():
    stepwise = Stepwise()
    stepwise.to_the_end()
    samples = [n for n, _, _, _ in stepwise.training.curve]
    per_step = [8, 8, 8, 2] * 3  # 26 rows: the last step of an epoch has two
    assert samples == [sum(per_step[:step]) for step in (2, 4, 6, 8, 9)]
    seconds = [s for _, s, _, _ in stepwise.training.curve]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert stepwise.training.course.samples_per_s > 0


@pytest.mark.combination
def test_time_that_it_waits_is_not_time_of_training():
    stepwise = Stepwise()
    stepwise.training.advance(timeout_s=60)
    before = stepwise.training.course.seconds
    waiting = threading.Event()
    waiting.wait(1.5)
    stepwise.training.advance(timeout_s=60)
    assert stepwise.training._checkpointing.paused_s >= 1.5
    stepwise.training.stop()
    clock = stepwise.training.course
    # two steps and their share of a pause would be above 1.5 s if it counted
    assert sum(s for _, s in clock.step_times) == pytest.approx(clock.seconds)
    assert clock.seconds - before < stepwise.training._checkpointing.paused_s


def test_stopping_ends_it_where_it_waits():
    stepwise = Stepwise()
    assert stepwise.training.advance(timeout_s=60) == Paused(2)
    assert stepwise.training.stop()
    assert isinstance(stepwise.training.ended.error, LeftEarly)
    assert stepwise.training.course.step == 2
    assert stepwise.training.stop()  # once more does no harm
    assert stepwise.training.advance() is stepwise.training.ended


def test_one_that_never_began_stops_too():
    assert Stepwise().training.stop()


def test_a_saved_training_goes_on_as_if_it_had_not_been_saved(tmp_path):
    first = Stepwise()
    first.training.advance(timeout_s=60)
    first.training.advance(timeout_s=60)
    first.training.save(str(tmp_path / "state"))
    first.to_the_end()
    manifest = Catalog.of_run(str(tmp_path / "state")).newest()
    course = manifest.facts[COURSE]
    assert (manifest.step, manifest.evaluated_at, course["samples"]) == (4, 4, 26)
    assert manifest.own_metrics == first.training.curve[1][2] and course["seconds"] == first.training.curve[1][1]
    assert manifest.facts["config"] == first.config
    second = Stepwise(start_from=str(tmp_path / "state"))
    second.to_the_end()
    assert first.losses[4:] == second.losses
    assert all(torch.equal(second.weights[name], value) for name, value in first.weights.items())
    assert second.training.course.samples == first.training.course.samples
    assert second.training.course.seconds > 0


def test_a_state_goes_on_under_another_learning_rate_with_the_same_weights(tmp_path):
    first = Stepwise()
    first.training.advance(timeout_s=60)
    first.training.save(str(tmp_path / "state"))
    first.to_the_end()
    other = Stepwise({"optimizer.learning_rate": 0.01}, start_from=str(tmp_path / "state"))
    other.to_the_end()
    assert other.losses[0] == first.losses[2]  # the loss before the first update: weights were copied
    assert other.losses[1] != first.losses[3]  # and the update was another


def test_a_folder_without_a_state_is_an_error(tmp_path):
    ended = Stepwise(start_from=str(tmp_path / "nothing")).to_the_end()[-1]
    assert isinstance(ended.error, RunFailedError) and "cannot be read" in str(ended.error)


def test_what_the_training_raises_reaches_the_one_that_waits():
    class Broken(Classify):
        def loss(self, model, batch):
            raise ValueError("the user's own")

    ended = Stepwise(workload=Broken(26, 5)).to_the_end()[-1]
    assert isinstance(ended.error, ScaleRayError) and "the user's own" in str(ended.error)


def test_one_that_hangs_is_given_up():
    forever = threading.Event()

    def train(emit, make_checkpointing):
        forever.wait()

    training = StepwiseTraining(train)
    threading.Timer(0.2, training.give_up, [RunFailedError("it hangs")]).start()
    ended = training.advance(timeout_s=60)
    forever.set()
    assert str(ended.error) == "it hangs"


def two_ranks(place, folder, decisions, start_from):
    """Each rank's losses, and whether it left early; rank 0 takes one decision after another."""
    flags = {**FLAGS, "stop.after": "2 epochs"}
    job, sources = make_job(Classify(num_rows=32, num_val=6), flags, world_size=place.world_size)
    asked, losses = iter(decisions), []

    checkpointing = AskingCheckpointing(
        job, place, start_from=start_from, emit=lambda message: None, ask=lambda step: next(asked)
    )
    try:
        summary = loop.run(
            job,
            place,
            sources=sources,
            checkpointing=checkpointing,
            emit=lambda m: losses.append(m.loss) if isinstance(m, StepRecord) else None,
        )
    except LeftEarly:
        return losses, "left"
    return losses, summary.verdict


def test_all_ranks_stop_where_rank_0_decides(gloo):
    answers = gloo.run(2, two_ranks, None, [Decision(), Decision(is_stop=True)], None)
    assert [verdict for _, verdict in answers] == ["left", "left"]
    assert len(answers[0][0]) == 4


def test_two_ranks_save_and_go_on_like_one_run(gloo, tmp_path):
    go, save = Decision(), Decision(save_to=str(tmp_path / "state"))
    whole = gloo.run(2, two_ranks, None, [go, save, go, go], None)
    rest = gloo.run(2, two_ranks, None, [go, go], str(tmp_path / "state"))
    assert whole[0][1] == rest[0][1] == "done"
    assert len(whole[0][0]) == 8
    assert whole[0][0][4:] == rest[0][0]
