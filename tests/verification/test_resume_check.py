"""`verify --resume`: a good resume passes to the bit; for every item of the state, leaving it out is found and named."""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

import pytest
import torch
from small_runs import Classify, RankContext, Tokens, make_job, same_generators
from test_resume import FLAGS, Everything, WithState

from scaleray import Workload
from scaleray.data import Input
from scaleray.records.certificate import ResumeOutcome
from scaleray.training.state import training_state as state_module
from scaleray.training.state.items import IN_WORDS, ITEMS
from scaleray.training.state.training_state import TrainState
from scaleray.verification.interrupted_runs import DATA_POSITION, Interruption, interruption_job, verify_resume
from scaleray.verification.variants import short_job
from scaleray.verification.verify_resume import line, verdict


def check(place, workload, folder, flags=None, *, plant=None, at=5, shift=0):
    """The outcome of one interruption; `plant` is called first, to break something in this process."""
    undo = plant() if plant is not None else lambda: None
    job, sources = make_job(workload, {**FLAGS, **(flags or {})}, world_size=place.world_size)
    job = interruption_job(short_job(job, steps=11))

    opened = Input.open

    def open_late(self, split, part, *more):
        if part.first_step and shift:  # the rows of another step under the right number
            late = dataclasses.replace(part, first_step=part.first_step + shift, last_step=part.last_step + shift)
            return Renumbered(opened(self, split, late, *more), shift)
        return opened(self, split, part, *more)

    try:
        with same_generators(), mock.patch.object(Input, "open", open_late):
            return verify_resume(place, Interruption("x", job, place.world_size, at, str(folder)), sources=sources)
    finally:
        torch.use_deterministic_algorithms(False)  # the processes of the pool serve other tests too
        undo()


class Renumbered:
    def __init__(self, stream, shift):
        self._stream, self._shift = stream, shift

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self._stream)
        return dataclasses.replace(batch, step=batch.step - self._shift)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"precision.dtype": "fp16"},
        {"precision.dtype": "fp16", "precision.initial_loss_scale": 2.0**20},  # some values overflow
        {"optimizer.name": "sgd", "optimizer.momentum": 0.9},
    ],
)
def test_a_good_resume_is_bit_identical(tmp_path, flags):
    outcome = check(RankContext(), Everything(), tmp_path, flags)
    assert outcome.is_equal and outcome.guilty == []
    assert outcome.comparison.largest == 0.0


@pytest.mark.always("[2]")
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_good_resume_on_several_workers_is_bit_identical(gloo, tmp_path, world_size):
    outcomes = gloo.run(world_size, check, Everything(num_rows=54), tmp_path, {"batch.global_size": 12})
    assert all(o.is_equal for o in outcomes)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "strategy",
    ["local_sgd", "async_sgd", *(pytest.param(s, marks=pytest.mark.combination) for s in ("diloco", "gossip"))],
)
@pytest.mark.parametrize("at", [5, 7])  # between two averages, too
def test_a_good_resume_of_replicas_that_train_apart_is_bit_identical(gloo, tmp_path, strategy, at):
    flags = {"batch.global_size": 12, "strategy.name": strategy}
    for outcome in gloo.run(2, functools.partial(check, at=at), Everything(num_rows=54), tmp_path, flags):
        assert (outcome.guilty, outcome.comparison.divergence) == ([], None)
        assert outcome.is_equal


class WithoutPlan(Classify):
    tensor_plan = Workload.tensor_plan


def test_a_strategy_that_cannot_run_the_workload_is_not_run_with_its_reason(gloo, tmp_path):
    for outcome in gloo.run(2, check, WithoutPlan(), tmp_path, {"strategy.name": "tensor"}):
        assert "tensor_plan()" in outcome.not_run and not outcome.is_equal


def test_what_was_not_run_neither_fails_a_verification_nor_passes_it():
    ran = ResumeOutcome("ddp x 2", 2, 1, 4, True, [])
    left_out = ResumeOutcome("tensor x 2", 2, 1, 4, False, [], not_run="it needs a plan:\n  give one")
    differs = ResumeOutcome("fsdp x 2", 2, 1, 4, False, ["optimizer"])
    assert line(left_out) == "tensor x 2: not run: it needs a plan: give one"
    assert verdict([ran, left_out]) == (True, "a resumed run is the same to the bit: 1 interruptions, 1 not run")
    assert verdict([left_out]) == (False, "nothing was compared: no variant can run this workload")
    passed, words = verdict([ran, left_out, differs])
    assert not passed and "1 of 3 variants differ (guilty: optimizer)" in words


def without(item):
    """Break the loading of one item of the state: the resumed run keeps what it began with."""

    def plant():
        restore = TrainState.restore

        def broken(self, manifest, load):
            # collective, so that only what needs it asks for it: one rank alone may be broken
            tensors = self.capture()[0] if item == "model" else {}
            kept = {name: value.clone() for name, value in tensors.items() if name.startswith("model.")}
            optimizer = self.setup.optimizer.state_dict() if item == "optimizer" else None
            schedule = dict(self.setup.schedule.state_dict())
            scaler = self.setup.precision.scaler.state_dict()
            progress = self.get_progress()
            random = state_module.random_state(self.place.device)
            before = self.workload.state_dict() if item == "workload" else None
            restore(self, manifest, load)
            if item == "model":
                for name, value in self.setup.parallel.module.state_dict().items():
                    value.copy_(kept[f"model.{name}"])
            elif item == "optimizer":
                self.setup.optimizer.load_state_dict(optimizer)
            elif item == "schedule":
                self.setup.schedule.load_state_dict(schedule)
            elif item == "scaler":
                self.setup.precision.scaler.load_state_dict(scaler)
            elif item == "progress":
                self.set_progress({**progress, "step": manifest.step})
            elif item == "workload":
                self.workload.load_state_dict(before)
            elif item == "random":
                state_module.set_random_state(random, self.place.device)

        TrainState.restore = broken

        def undo():
            TrainState.restore = restore

        return undo

    return plant


@pytest.mark.always("schedule-learning-rate schedule-7")
@pytest.mark.parametrize(
    ("item", "words", "first"),
    [
        ("model", "model parameters or buffers", 6),
        ("optimizer", "optimizer state", 6),
        ("schedule", "learning-rate schedule", 7),  # the optimizer's state has the rate of the step after
        ("random", "random number generators", 6),
    ],
)
def test_state_that_is_left_out_is_named(tmp_path, item, words, first):
    outcome = check(RankContext(), Everything(), tmp_path, plant=without(item))
    assert not outcome.is_equal
    assert outcome.guilty == [words]
    assert outcome.comparison.divergence.step == first


def test_a_loss_scaler_that_is_left_out_is_named(tmp_path):
    flags = {"precision.dtype": "fp16", "precision.initial_loss_scale": 2.0**40}  # it is lowered in the first steps
    outcome = check(RankContext(), Everything(), tmp_path, flags, plant=without("scaler"))
    assert outcome.guilty == ["loss scaler"] and not outcome.is_equal


def test_the_loops_own_counters_that_are_left_out_are_named(tmp_path):
    outcome = check(
        RankContext(), Tokens(num_rows=60), tmp_path, {"precision.dtype": "fp32"}, plant=without("progress")
    )
    assert outcome.guilty == ["progress of the loop"] and not outcome.is_equal


def test_a_workloads_state_that_is_left_out_is_named(tmp_path):
    outcome = check(RankContext(), WithState(), tmp_path, plant=without("workload"))
    assert outcome.guilty == ["the workload's own state"] and not outcome.is_equal


def test_a_wrong_data_position_is_named(tmp_path):
    outcome = check(RankContext(), Classify(num_rows=200), tmp_path, shift=1)
    assert outcome.guilty == [DATA_POSITION] and not outcome.is_equal
    assert (outcome.comparison.divergence.step, outcome.comparison.divergence.quantity) == (6, "rows")


@pytest.mark.combination
def test_a_guilty_state_on_one_rank_alone_is_named(gloo, tmp_path):
    outcomes = gloo.run(2, broken_on_rank_1, tmp_path)
    assert all(o.guilty == ["random number generators"] and not o.is_equal for o in outcomes)


def broken_on_rank_1(place, folder):
    plant = without("random") if place.rank == 1 else None
    return check(place, Everything(num_rows=54), folder, {"batch.global_size": 12}, plant=plant)


def test_every_item_of_the_state_has_a_name_in_a_sentence():
    assert set(IN_WORDS) == set(ITEMS)
