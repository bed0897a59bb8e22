"""Where the time of real steps goes: on a clock that stands still but for what the workload does."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from small_runs import Classify, WithDropout, train, train_alone

from scaleray.profiling.run_profile import rank_profile
from scaleray.records.phases import Phase
from scaleray.training.health import clock as clock_module
from scaleray.training.health.worker_progress import Progress
from scaleray.training.profile import marks as marks_module
from scaleray.training.profile.phase_times import PhaseTimes


class Clock:
    """Seconds that go by only where something is said to take some."""

    now = 100.0

    @classmethod
    def takes(cls, seconds):
        cls.now += seconds


class TakesTwo(torch.autograd.Function):
    """Nothing, whose backward pass takes 2 seconds."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Clock.takes(2.0)
        return grad


class OnAClock(Classify):
    """A micro-batch whose forward pass takes 1 second, and its backward pass 2; an evaluated one takes 4."""

    def loss(self, model, batch):
        Clock.takes(1.0 if torch.is_grad_enabled() else 4.0)
        total, count = super().loss(model, batch)
        return TakesTwo.apply(total), count

    def step_metrics(self):
        Clock.takes(0.5)
        return {}


class SeveralOnAClock(OnAClock):
    """Two losses a step, each with its own passes, of one network."""

    def losses(self):
        return {"first": self.loss, "second": self.loss}

    def optimizer(self, model, recipe):
        return {
            "first": torch.optim.SGD(model[0].parameters(), 0.1),
            "second": torch.optim.SGD(model[2].parameters(), 0.1),
        }


@pytest.fixture
def still(monkeypatch):
    """The clocks of the training, standing still."""
    real = clock_module.time
    frozen = SimpleNamespace(perf_counter=lambda: Clock.now, time=real.time)
    monkeypatch.setattr(clock_module, "time", frozen)
    monkeypatch.setattr(marks_module, "time", frozen)


def profile_of(finished):
    return finished.summary.profile, rank_profile(finished.summary.profile)


@pytest.mark.parametrize(("flags", "micro_batches"), [({}, 1), ({"batch.micro_size": 2}, 4)])
def test_every_micro_batch_is_in_the_parts_of_its_step(still, flags, micro_batches):
    measured, profile = profile_of(train_alone(OnAClock(32), {"stop.after": "6 steps", **flags}))
    assert measured.first_step == 2 and measured.num_steps == 5, "the first step is left out"
    medians = {name: spread.median for name, spread in profile.phases.items()}
    assert medians == {"forward": micro_batches, "backward": 2.0 * micro_batches, "other": 0.5}
    assert profile.step.median == sum(medians.values())
    assert measured.gap == measured.worst_gap == 0


def test_an_evaluation_belongs_to_the_step_that_follows_it(still):
    flags = {"stop.after": "6 steps", "evaluation.every": "3 steps"}
    measured, profile = profile_of(train_alone(OnAClock(32, num_val=8), flags))
    assert measured.rows[:, measured.columns.index("evaluation")].tolist() == [0, 0, 4, 0, 0]
    assert profile.phases["evaluation"].total == 4.0 and profile.step.total == 5 * 3.5 + 4.0
    assert measured.gap == 0


def test_the_passes_of_several_losses_are_summed(still):
    measured, profile = profile_of(train_alone(SeveralOnAClock(32), {"stop.after": "4 steps"}))
    assert profile.phases["forward"].median == 2.0 and profile.phases["backward"].median == 4.0
    assert measured.gap == 0


def test_time_that_no_mark_saw_is_told_as_a_gap(still, monkeypatch):
    unmarked = marks_module.HostMarks.end_step

    def loses_time(marks, step_s, now):
        unmarked(marks, step_s + 0.35, now)  # as the clock would, if marks were of another one

    monkeypatch.setattr(marks_module.HostMarks, "end_step", loses_time)
    finished = train_alone(OnAClock(32), {"stop.after": "4 steps"})
    measured, _ = profile_of(finished)
    assert measured.gap == pytest.approx(0.35 / 3.85) and measured.worst_gap == measured.gap
    assert any("rank 0: parts of its steps are off by 9.1%" in event for event in finished.events)


def test_with_and_without_a_profile_the_weights_are_the_same_to_the_bit(monkeypatch):
    flags = {"stop.after": "6 steps", "evaluation.every": "2 steps", "batch.micro_size": 2}
    watched = train_alone(WithDropout(32, num_val=8), flags)
    monkeypatch.setattr(marks_module.HostMarks, "mark", lambda *args: None)
    for name in ("start", "cut", "after_launch", "begin"):
        monkeypatch.setattr(PhaseTimes, name, lambda *args: None)
    monkeypatch.setattr(PhaseTimes, "measurements", lambda self: None)
    alone = train_alone(WithDropout(32, num_val=8), flags)
    assert watched.summary.profile.num_steps == 5 and alone.summary.profile is None
    assert watched.losses == alone.losses
    assert all(torch.equal(watched.weights[name], alone.weights[name]) for name in alone.weights)


def phases_of_steps(place, strategy, flags):
    """How often each phase was entered, and what came right after each backward pass."""
    entered = []

    class Listening(Progress):
        def enter(self, phase):
            entered.append(phase)
            return super().enter(phase)

    finished = train(
        place, Classify(32), {"strategy.name": strategy, "stop.after": "4 steps", **flags}, progress=Listening()
    )
    after = Counter(b for a, b in itertools.pairwise(entered) if a == Phase.BACKWARD)
    return Counter(entered), after, dict(rank_profile(finished.summary.profile).phases)


def test_what_ddp_waits_for_at_the_end_of_a_backward_pass_is_exposed_communication(gloo):
    for entered, after, phases in gloo.run(2, phases_of_steps, "ddp", {"batch.micro_size": 2}):
        assert entered[Phase.FORWARD] == 8 and entered[Phase.BACKWARD] == 8, "two micro-batches a step"
        # of a step's two backward passes the last one communicates
        assert after == {Phase.COPY: 4, Phase.COMMUNICATION: 4}
        assert {"copy_to_device", "forward", "backward", "exposed_communication", "optimizer"} <= set(phases)


def test_steps_that_are_not_put_together_yet_are_known_to_whoever_asks():
    place = SimpleNamespace(rank=0, node="here", device=torch.device("cpu"))
    times = PhaseTimes(
        place, 0, started_at=0.0, enter=lambda phase: phase, emit=print, guard=lambda watcher, look, *_, **__: look()
    )
    try:
        times.start(0.0)
        for step in range(1, 6):
            times.cut(0.5, 0.5 * step)
            assert times.num_known == step - 1, "without the first step of the process"
        for step in range(6, 9):
            times.cut(0.5, 0.5 * step)
        columns, steps, totals = times.totals()
        assert (steps, columns[0], totals[0]) == (7, "step", 3.5)
    finally:
        times.close()
