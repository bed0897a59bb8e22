"""Workers with uneven shares train as one process does, and their speed is what they compute, not what they wait."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from small_runs import (
    Classify,
    RankContext,
    TiedAndFrozen,
    Tokens,
    WithDropout,
    job_of,
    largest_difference,
    make_job,
    relative_differences,
    train,
    train_alone,
    train_in_plain_torch,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scaleray.config.strategy_traits import names_with
from scaleray.emulation import EmulatedLayer, Timing
from scaleray.errors import ConfigError
from scaleray.strategies import STRATEGIES
from scaleray.training.step import step as training_step
from scaleray.training.step import worker_shares as measured
from scaleray.training.step.worker_shares import ComputeMeter, WorkerShares
from scaleray.verification.variants import Assignment, verify_group
from scaleray.verification.verification_plan import make_plan
from scaleray.verification.verify_options import VerifyOptions

pytestmark = pytest.mark.combination

UNEVEN = sorted(set(names_with("reduces_by_ddp")) & set(STRATEGIES))
GIVEN = {1: {}, 2: {"shares.speeds": [3.0, 1.0]}, 4: {"shares.speeds": [4.0, 1.0, 2.0, 1.0]}}


def given_shares(world_size):
    return {"shares.by": "given", "shares.smallest": 0.01, **GIVEN[world_size]}


def assert_same_training(finished, plain, *, within=1e-9):
    assert max(relative_differences(plain.losses, finished.losses)) <= within
    assert max(relative_differences(plain.grad_norms, finished.grad_norms)) <= within
    assert largest_difference(plain.weights, finished.weights) <= within


class Counting(TiedAndFrozen):
    """Writes down the size of every micro-batch that is trained on."""

    def __init__(self, **options):
        super().__init__(**options)
        self.sizes = []

    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        if model.training:  # the look at the first batch has no backward pass
            total.register_hook(lambda gradient: self.sizes.append(len(batch["real"])))
        return total, count


# exactness

# 26 rows in batches of 8 leave a partial batch of 2, of which the ranks with small shares have nothing
RECIPES = {
    "one pass": {},
    "accumulation": {"batch.micro_size": 1},
    "clipping": {"optimizer.clip_norm": 0.3},
    "other layout of buckets": {"strategy.bucket_size_mib": 1e-4, "batch.micro_size": 1},
}


@pytest.mark.each_value
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", UNEVEN)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_uneven_shares_equal_one_process(gloo, recipe, strategy, world_size):
    for workload in (Classify, Tokens, TiedAndFrozen):
        flags = {**recipe, **given_shares(world_size), "strategy.name": strategy}
        finished = gloo.run(world_size, train, workload(), flags)[0]
        assert_same_training(finished, train_in_plain_torch(workload(), recipe))
    shares = "6 + 2" if world_size == 2 else "4 + 1 + 2 + 1"
    assert f"shares of 8 samples: {shares}" in finished.events


def rows_trained_on(place, flags):
    workload = Counting()
    train(place, workload, flags)
    return sum(workload.sizes)


def test_every_rank_trains_on_its_share_of_the_rows_and_no_other(gloo):
    flags = {**given_shares(4), "batch.drop_last": True}  # 2 epochs of 3 steps
    assert gloo.run(4, rows_trained_on, flags) == [6 * share for share in (4, 1, 2, 1)]
    assert gloo.run(4, rows_trained_on, {"batch.drop_last": True}) == [6 * 2] * 4


def test_evaluation_keeps_equal_shares_and_its_result(gloo):
    flags = {"evaluation.every": "1 epoch"}
    uneven = gloo.run(2, train, Classify(num_val=9), {**flags, **given_shares(2)})[0]
    alone = train_alone(Classify(num_val=9), flags)
    for ours, theirs in zip(uneven.evaluations, alone.evaluations, strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-9)


def judged(place, config):
    job, sources = job_of(config, Classify())
    plan = make_plan(config, VerifyOptions(("ddp",), (place.world_size,), (1, 2), steps=5), job.workload, sources)
    variants = tuple(plan.groups[place.world_size])
    outcomes, _ = verify_group(place, Assignment(plan.reference, variants, 1e-9), {}, sources=sources)
    return [variant.job.recipe.worker_shares for variant in variants], [(o.verdict, str(o.mismatch)) for o in outcomes]


def test_verify_tries_a_run_of_measured_shares_with_uneven_ones_and_finds_it_equal(gloo):
    job, _ = make_job(Classify(), {"shares.by": "speed"}, world_size=2)
    shares, outcomes = gloo.run(2, judged, job.config)[0]
    assert shares == [(3, 5), (3, 5)]  # planted speeds of 1 and 2
    assert outcomes == [("equal", "None")] * 2


# shares that change while the training runs

CHANGING = {"shares.by": "speed", "shares.measure_every": 3, "shares.smallest": 0.01, "stop.after": "14 steps"}


def seesaw(self):
    """Planted: whoever was slowest is measured eight times as fast, so that shares change at every measurement."""
    rank = self._place.rank
    if self.speeds is None:
        return 1.0 + rank
    return self.speeds[rank] * (8 if rank == self.speeds.index(min(self.speeds)) else 1)


def train_on_a_seesaw(place, workload, flags, **options):
    with mock.patch.object(WorkerShares, "measured_speed", seesaw):
        return train(place, workload, flags, **options), getattr(workload, "sizes", None)


@pytest.mark.parametrize("world_size", [2, 3])
def test_shares_that_change_at_every_measurement_equal_one_process(gloo, world_size):
    flags = {**CHANGING, "batch.global_size": 12, "batch.micro_size": 2}
    outcomes = gloo.run(world_size, train_on_a_seesaw, Counting(num_rows=40), flags)
    plain = train_in_plain_torch(TiedAndFrozen(num_rows=40), {"batch.global_size": 12, "stop.after": "14 steps"})
    finished = outcomes[0][0]
    assert_same_training(finished, plain)
    events = [event for event in finished.events if "shares" in event]
    assert len(events) == 4 and all(event.startswith("shares of 12 samples: ") for event in events)
    assert all(a != b for a, b in itertools.pairwise(events))
    assert [outcome.events for outcome, _ in outcomes[1:]] == [[]] * (world_size - 1)  # rank 0 speaks for all
    sizes = [sizes for _, sizes in outcomes]
    assert max(map(max, sizes)) == 2  # no micro-batch is larger, so that no more memory is needed
    assert len({len(own) for own in sizes}) > 1  # but some ranks ran more of them


def test_the_event_tells_shares_and_speeds(gloo):
    (finished, _), _ = gloo.run(2, train_on_a_seesaw, Classify(), {**CHANGING, "stop.after": "5 steps"})
    assert [event for event in finished.events if "shares" in event] == ["shares of 8 samples: 3 + 5, speeds 1 : 2"]


def test_a_run_of_measured_shares_that_wants_the_same_bits_is_told_that_it_cannot_have_them(gloo):
    (finished, _), _ = gloo.run(2, train_on_a_seesaw, Classify(), {**CHANGING, "deterministic": True})
    assert any("not to the bit" in event for event in finished.events)


def seesaw_with_an_interruption(place, flags, folder, kill_at):
    """A whole run, and one that was killed and resumed."""
    whole, _ = train_on_a_seesaw(place, WithDropout(num_rows=40), flags)
    train_on_a_seesaw(place, WithDropout(num_rows=40), flags, folder=folder, kill_at=kill_at)
    return whole, train_on_a_seesaw(place, WithDropout(num_rows=40), flags, folder=folder)[0]


@pytest.mark.parametrize(
    "kill_at", [pytest.param(5, marks=pytest.mark.combination), 9, pytest.param(11, marks=pytest.mark.combination)]
)
def test_a_resumed_run_goes_on_with_the_shares_it_had_to_the_bit(gloo, tmp_path, kill_at):
    """Saved every other step: also right at a change, and between a change and the next measurement."""
    flags = {
        **CHANGING,
        "batch.global_size": 12,
        "deterministic": True,
        "precision.dtype": "fp32",
        "checkpoint.every": "2 steps",
        "checkpoint.is_asynchronous": False,
    }
    whole, resumed = gloo.run(2, seesaw_with_an_interruption, flags, str(tmp_path), kill_at)[0]
    start = kill_at // 2 * 2
    assert [step.step for step in resumed.steps] == list(range(start + 1, 15))
    assert resumed.losses == whole.losses[start:]
    assert all(torch.equal(resumed.weights[name], whole.weights[name]) for name in whole.weights)
    changes = [event for event in whole.events if event.startswith("shares of")]
    held, later = changes[start // 3 - 1], changes[start // 3 :]
    assert [event for event in resumed.events if event.startswith("shares of")] == [held, *later]


def interrupted(place, flags, folder, kill_at):
    return train_on_a_seesaw(place, Tokens(num_rows=40), flags, folder=folder, kill_at=kill_at)[0]


@pytest.mark.parametrize("after", [1, 3])
def test_on_another_number_of_workers_a_resumed_run_begins_with_equal_shares(gloo, tmp_path, after):
    flags = {**CHANGING, "batch.global_size": 12, "checkpoint.every": "4 steps", "checkpoint.is_asynchronous": False}
    gloo.run(2, interrupted, flags, str(tmp_path), 9)
    resumed = gloo.run(after, interrupted, flags, str(tmp_path), None)[0]
    plain = train_in_plain_torch(Tokens(num_rows=40), {"batch.global_size": 12, "stop.after": "14 steps"})
    assert max(relative_differences(plain.losses[8:], resumed.losses)) <= 1e-9
    events = [event for event in resumed.events if event.startswith("shares of")]
    assert len(events) == (0 if after == 1 else 2)  # those of steps 9 and 12


# what is measured, by a clock that only computing and waiting move


class Clock:
    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class Ticks(torch.autograd.Function):
    """Computing: 1 s forward and 2 s backward for each sample."""

    @staticmethod
    def forward(ctx, x, clock):
        ctx.clock, ctx.num_samples = clock, len(x)
        clock.now += len(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += 2 * ctx.num_samples
        return gradient, None


class Ticking(nn.Sequential):
    def __init__(self, clock, *modules):
        super().__init__(*modules)
        self.clock = clock

    def forward(self, x):
        return Ticks.apply(super().forward(x), self.clock)


class OnAClock(Classify):
    """Waiting for others, after the backward pass and for DDP's buffers, takes 1000 s each."""

    def __init__(self, has_buffers):
        super().__init__(num_rows=40)
        self.has_buffers = has_buffers

    def build_model(self):
        norm = [nn.BatchNorm1d(8)] if self.has_buffers else []
        return Ticking(self.clock, nn.Linear(6, 8), *norm, nn.Linear(8, 3))


def measured_seconds(place, has_buffers, micro_size):
    clock, found = Clock(), []
    workload = OnAClock(has_buffers)
    workload.clock = clock
    run = training_step.TrainStep._run_micro_batches
    sync = DistributedDataParallel._sync_buffers

    def wait_for_gradients(self, *args, **kwargs):
        result = run(self, *args, **kwargs)
        clock.now += 1000
        return result

    def wait_for_buffers(self):
        clock.now += 1000
        return sync(self)

    def keep(self):
        found.append([(count, self._meter.seconds(pair)) for count, pair in self._measured])
        return 1.0

    flags = {**CHANGING, "stop.after": "7 steps", "batch.micro_size": micro_size, "batch.drop_last": True}
    with contextlib.ExitStack() as stack:
        patch = lambda *args: stack.enter_context(mock.patch.object(*args))
        patch(measured, "time", SimpleNamespace(perf_counter=clock.perf_counter))
        patch(training_step.TrainStep, "_run_micro_batches", wait_for_gradients)
        patch(DistributedDataParallel, "_sync_buffers", wait_for_buffers)
        patch(WorkerShares, "measured_speed", keep)
        train(place, workload, flags)
    return found, clock.now


@pytest.mark.parametrize(("has_buffers", "micro_size"), [(False, 1), (False, 4), (True, 2), (True, 4)])
def test_a_speed_counts_computing_and_no_waiting(gloo, has_buffers, micro_size):
    for found, now in gloo.run(2, measured_seconds, has_buffers, micro_size):
        # 4 samples of 3 s each in every step; the first step of the process does not count
        assert found == [[(4, 12.0)] * 2, [(4, 12.0)] * 3]
        assert now >= 7 * 1000  # there was waiting


def test_only_the_steps_before_a_measurement_are_measured_and_the_hooks_go_with_the_run():
    workload = Classify(num_rows=8)
    job, _ = make_job(
        workload, {"shares.by": "speed", "shares.measure_every": 50, "stop.after": "120 steps"}, world_size=2
    )
    shares, model = WorkerShares(job.config, job.recipe, RankContext(world_size=2)), workload.build_model()
    shares.watch(model)
    timed = []
    for step in range(1, 51):
        shares.begin_step(step)
        model(torch.zeros(1, 6)).sum().backward()
        before = len(shares._measured)
        with mock.patch.object(shares, "_decide", return_value=f"decided at {step}"):
            assert shares.end_step(step, num_rows=4) == ("decided at 50" if step == 50 else None)
        timed += [step] * (len(shares._measured) - before)
    assert timed == list(range(36, 51))  # 16, without the first
    shares.close()
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_step_without_rows_or_without_gradients_says_nothing_of_speed():
    model = nn.Linear(2, 1)
    meter = ComputeMeter(model, torch.device("cpu"))
    meter.begin()
    assert meter.end() is None
    assert meter.end() is None
    meter.close()
    job, _ = make_job(Classify(), CHANGING, world_size=2)
    assert WorkerShares(job.config, job.recipe, RankContext(world_size=2)).measured_speed() == 0.0


class Sleepy(Classify):
    """Rank 1 needs three times as long for a sample."""

    def build_model(self):
        timing = Timing(forward_s_per_sample=4e-4, slowdown={1: 3.0})
        return nn.Sequential(nn.Linear(6, 8), EmulatedLayer(8, timing), nn.Linear(8, 3))


def test_a_worker_that_is_really_slower_gets_less(gloo):
    """Measured by real sleeps: 8 samples take 10 ms on one and 29 ms on the other, and only the direction is asked for."""
    flags = {"shares.by": "speed", "shares.measure_every": 10, "batch.global_size": 16, "stop.after": "11 steps"}
    finished = gloo.run(2, train, Sleepy(num_rows=64), flags)[0]
    plain = train_in_plain_torch(Sleepy(num_rows=64), {"batch.global_size": 16, "stop.after": "11 steps"})
    assert_same_training(finished, plain)
    (event,) = [event for event in finished.events if event.startswith("shares of 16 samples")]
    first, second = (int(word) for word in event.partition(": ")[2].partition(",")[0].split(" + "))
    assert first > second


# what is refused


def test_a_streamed_dataset_keeps_equal_shares():
    job, _ = make_job(Classify(), {"shares.by": "speed"}, world_size=2)
    streamed = {"train": dataclasses.replace(job.splits["train"], is_streamed=True)}
    with pytest.raises(ConfigError, match="in equal shares"):
        dataclasses.replace(job, splits=streamed)


def test_one_worker_has_the_whole_batch():
    finished = train_alone(Classify(), CHANGING)
    assert finished.losses == train_alone(Classify(), {"stop.after": "14 steps"}).losses
    assert not any("shares" in event for event in finished.events)
