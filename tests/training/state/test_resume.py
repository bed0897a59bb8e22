"""A run that is interrupted and resumed is the run that was not: bit for bit on as many workers, in value on others."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import (
    Classify,
    KillAt,
    RankContext,
    Tokens,
    WithDropout,
    largest_difference,
    make_job,
    relative_differences,
    same_generators,
    train,
    train_alone,
)
from torch import nn

from scaleray.checkpoints.catalog import Catalog
from scaleray.errors import WorkloadError
from scaleray.records.run_record import EventRecord
from scaleray.training import loop
from scaleray.training.setup.model_setup import Setup
from scaleray.training.state.checkpointing import Checkpointing, Control
from scaleray.training.state.items import ITEMS


class Everything(Classify):
    """Dropout, BatchNorm, and a loss that draws from numpy's and Python's generators: all the state there can be."""

    def build_model(self):
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 3))

    def loss(self, model, batch):
        noise = 0.01 * float(np.random.normal()) + 0.01 * random.gauss(0, 1) + 0.01 * float(np.random.standard_normal())
        total = F.cross_entropy(model(batch["x"]) * (1 + noise), batch["y"], reduction="sum")
        return total, len(batch["y"])


FLAGS = {
    "deterministic": True,
    "checkpoint.every": "3 steps",
    "stop.after": "14 steps",
    "schedule.name": "cosine",
    "schedule.warmup": "4 steps",
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 0.01,
    "optimizer.clip_norm": 0.5,
    "precision.dtype": "fp32",
}


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.mark.always("flags1-13")
@pytest.mark.parametrize("kill_at", [4, 6, 11, 13])
@pytest.mark.parametrize(
    "flags", [{}, {"optimizer.name": "sgd", "optimizer.momentum": 0.9}, {"precision.dtype": "fp16"}]
)
def test_a_resumed_run_is_bit_identical(tmp_path, kill_at, flags):
    flags = {**FLAGS, **flags}
    whole = train_alone(Everything(), flags)
    killed = train_alone(Everything(), flags, folder=tmp_path, kill_at=kill_at)
    assert killed.losses == whole.losses[:kill_at]
    resumed = train_alone(Everything(), flags, folder=tmp_path)
    first = kill_at // 3 * 3
    assert [s.step for s in resumed.steps] == list(range(first + 1, 15))
    assert resumed.losses == whole.losses[first:]
    assert repr(resumed.grad_norms) == repr(whole.grad_norms[first:])  # fp16 skips steps with NaN
    assert [s.learning_rate for s in resumed.steps] == [s.learning_rate for s in whole.steps[first:]]
    assert_same_bits(resumed.weights, whole.weights)
    assert any(f"resumed after step {first}" in event for event in resumed.events)


def resume_in_pool(place, workload, flags, folder, kill_at):
    whole = train(place, workload, flags)
    killed = train(place, workload, flags, folder=folder, kill_at=kill_at)
    resumed = train(place, workload, flags, folder=folder)
    return whole, killed, resumed


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_resumed_run_is_bit_identical_on_several_workers(gloo, tmp_path, world_size):
    flags = {
        **FLAGS,
        "batch.global_size": 24,
        "batch.micro_size": 1 if world_size == 4 else 4,
        "strategy.bucket_size_mib": 0.0005,
    }
    workload = WithDropout(num_rows=61)
    outcomes = gloo.run(world_size, resume_in_pool, workload, flags, str(tmp_path), 8)
    whole, _, resumed = outcomes[0]
    assert resumed.losses == whole.losses[6:]
    assert_same_bits(resumed.weights, whole.weights)


def killed_run(place, workload, flags, folder, kill_at):
    return train(place, workload, flags, folder=folder, kill_at=kill_at)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (4, 2)])
def test_a_run_resumes_on_another_number_of_workers(gloo, tmp_path, before, after):
    flags = {**FLAGS, "batch.global_size": 12, "precision.dtype": "fp64"}
    workload = Tokens(num_rows=50)
    whole = gloo.run(1, killed_run, workload, flags, None, None)[0]
    gloo.run(before, killed_run, workload, flags, str(tmp_path), 8)
    resumed = gloo.run(after, killed_run, workload, flags, str(tmp_path), None)[0]
    assert [s.step for s in resumed.steps] == list(range(7, 15))
    assert max(relative_differences(whole.losses[6:], resumed.losses)) < 1e-12
    assert largest_difference(whole.weights, resumed.weights) < 1e-11
    assert any(f"instead of {before}" in event for event in resumed.events)


def test_every_field_of_the_setup_is_saved_or_has_no_state():
    stateless = {"parameters", "num_parameters", "initial_hash", "compilation", "in_use", "undo"}
    fields = {field.name for field in dataclasses.fields(Setup)}
    items = {"parallel": "model", "optimizer": "optimizer", "schedule": "schedule", "precision": "scaler",
             "pruning": "pruning", "averaging": "averaging", "rate_scale": "rate_scale"}  # fmt: skip
    assert fields == items.keys() | stateless, "a new field of Setup holds state or not: say which"
    assert set(items.values()) <= set(ITEMS)


class WithState(Classify):
    """A workload with a moving average of its own."""

    def __init__(self):
        super().__init__()
        self.average = torch.zeros(3)
        self.calls = 0

    def loss(self, model, batch):
        if model.training:
            self.calls += 1
            self.average = 0.9 * self.average + 0.1 * batch["x"].mean(dim=0)[:3].float()
        total = F.cross_entropy(model(batch["x"]) + self.average, batch["y"], reduction="sum")
        return total, len(batch["y"])

    def state_dict(self):
        return {"average": self.average, "calls": self.calls}

    def load_state_dict(self, state):
        self.average, self.calls = state["average"], state["calls"]


def test_the_workloads_own_state_is_part_of_the_checkpoint(tmp_path):
    whole = train_alone(WithState(), FLAGS)
    train_alone(WithState(), FLAGS, folder=tmp_path, kill_at=5)
    resumed = train_alone(WithState(), FLAGS, folder=tmp_path)
    assert resumed.losses == whole.losses[3:]


def test_checkpoints_do_not_change_the_training(tmp_path):
    whole = train_alone(Everything(), FLAGS)
    saved = train_alone(Everything(), {**FLAGS, "checkpoint.every": "1 steps"}, folder=tmp_path)
    assert saved.losses == whole.losses
    assert_same_bits(saved.weights, whole.weights)
    assert [c.step for c in saved.checkpoints] == list(range(1, 15))
    assert [m.step for m in Catalog.of_run(str(tmp_path)).complete()] == [14, 13], "keep_last is 2"


def test_a_finished_run_can_be_resumed_and_has_nothing_to_do(tmp_path):
    first = train_alone(Classify(num_val=10), FLAGS, folder=tmp_path)
    again = train_alone(Classify(num_val=10), FLAGS, folder=tmp_path)
    assert again.steps == [] and again.summary.steps == 14
    assert_same_bits(again.weights, first.weights)


# what a loop and a step keep between two steps: saved, or no state of the training
LOOP_STATE = {"job", "step", "nonfinite_steps", "verdict"}
LOOP_SAVED = {"state", "shares", "noise", "micro_sizes"}
LOOP_STATELESS = {
    "place", "input", "save_weights", "probe", "checkpointing", "progress", "first_step", "clock", "limits",
    "evaluations", "memory", "plan", "reporter", "compilation", "observers", "profile", "located",
    "callbacks",  # an item of its own
    "fixed",  # of the model as it is built
    "attributes",  # read when training has ended
    "under_way",  # empty whenever something is saved
    "ahead",
    "live",  # outlives the loop
}  # fmt: skip
MICRO_SIZES = {"now"} | {"config", "place", "reporter", "search"}  # saved, and no state
NOISE = {"kept", "meter"} | {"guard"}
REPORTER_STATELESS = {
    "job", "config", "place", "_step", "guard", "emit", "_is_first", "_num_notes", "_sent_bytes", "_system", "_sampled_at",
    "_setup", "_others_figures", "_kept",
}  # fmt: skip
EVALUATIONS_SAVED = {"metrics", "step", "best"}
EVALUATIONS_STATELESS = {
    "place",
    "input",
    "enter",
    "setup",
    "target",
    "every",
    "only_at_end",
    "evaluators",
    "_own",
    "_followed",
}
STEP_SAVED = {"_count_per_row", "num_updates", "_nonfinite", "noise"}
STEP_STATELESS = {
    "_has_ended", "_ends",  # a training that has ended saves no more
    "_apply", "_reads",
    "workload", "setup", "config", "recipe", "place", "gives_tuples", "probe", "signals", "before_update", "enter",
    "_scale", "_totals", "back_off", "on_halved",
    "_whole",  # of a loss over the whole batch: begun with each step
}  # fmt: skip


class Inspector(KillAt):
    """Takes the loop's own objects out of its stack."""

    def on_batch(self, batch):
        if batch.step == 2:
            frame = inspect.currentframe()
            while frame.f_code is not loop._Run._take.__code__:
                frame = frame.f_back
            found = frame.f_locals
            self.loop, self.step_object = copy.copy(found["self"]), found["step"]  # the loop lets go of all at its end


def test_everything_that_the_loop_keeps_between_steps_is_saved_or_known_to_be_no_state():
    job, sources = make_job(Everything(num_val=10), FLAGS)
    inspector = Inspector(-1, None)
    with same_generators():
        loop.run(job, RankContext(), sources=sources, emit=lambda message: None, probe=inspector)
    torch.use_deterministic_algorithms(False)
    for kept, known in [
        (inspector.loop, LOOP_SAVED | LOOP_STATELESS),
        (inspector.loop.state, LOOP_STATE),
        (inspector.loop.memory, {"device", "guard", "found", "_num_steps", "_setup"}),
        (inspector.loop.compilation, {"reporter", "_compilation", "_is_checked"}),
        (inspector.loop.evaluations, EVALUATIONS_SAVED | EVALUATIONS_STATELESS),
        (inspector.loop.micro_sizes, MICRO_SIZES),
        (inspector.loop.noise, NOISE),
        (inspector.loop.reporter, REPORTER_STATELESS),
        (inspector.step_object, STEP_SAVED | STEP_STATELESS),
        (inspector.step_object.back_off, {"setup", "place", "is_on"}),
    ]:
        assert set(vars(kept)) == known, "a new attribute holds state or not: say which, and save it"


def test_a_checkpoint_names_its_run_and_its_environment(tmp_path):
    job, sources = make_job(Classify(), FLAGS)
    facts = {"config_hash": "c", "environment_hash": "e", "config": job.config.to_dict()}
    saves = Checkpointing(
        job,
        RankContext(),
        Catalog.of_run(str(tmp_path)),
        emit=lambda message: None,
        facts=facts,
        before_publishing=lambda: {"mlflow": {"run_id": "r"}},
    )
    with same_generators():
        loop.run(job, RankContext(), sources=sources, emit=lambda m: None, checkpointing=saves)
    torch.use_deterministic_algorithms(False)
    manifest = Catalog.of_run(str(tmp_path)).newest()
    assert manifest.step == 14 and set(manifest.values) >= {"optimizer", "schedule", "scaler", "progress", "workload"}
    assert manifest.facts == {**facts, "metrics": {}, "evaluated_at": None, "mlflow": {"run_id": "r"}}
    assert manifest.values["progress"]["epoch"] == 3 and manifest.values["progress"]["sample_in_epoch"] == 16


def test_a_run_that_had_reached_its_target_does_not_train_on(tmp_path):
    flags = {**FLAGS, "evaluation.every": "3 steps", "stop.at": "val/loss <= 100", "stop.after": "14 steps"}
    first = train_alone(Classify(num_val=10), flags, folder=tmp_path)
    assert first.summary.verdict.startswith("target reached") and first.summary.steps == 3
    again = train_alone(Classify(num_val=10), flags, folder=tmp_path)
    assert again.steps == [] and again.summary.verdict == first.summary.verdict
    assert again.evaluations[-1].metrics == first.evaluations[-1].metrics
    assert_same_bits(again.weights, first.weights)


class Exploding(Classify):
    """The loss is NaN in one step."""

    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        self.calls = getattr(self, "calls", 0) + model.training
        return total * (float("nan") if self.calls == 7 and model.training else 1.0), count


def test_a_run_that_had_stopped_for_good_does_not_train_on(tmp_path):
    flags = {**FLAGS, "on_nonfinite": "stop"}
    first = train_alone(Exploding(), flags, folder=tmp_path)
    assert first.summary.verdict.startswith("stopped")
    again = train_alone(Exploding(), flags, folder=tmp_path)
    assert again.steps == [] and again.summary.verdict == first.summary.verdict


class Hidden(Classify):
    """State in places that a state dict leaves out: a buffer that is not persistent, extra state, a lone parameter."""

    def build_model(self):
        model = WithExtras()
        self.temperature = nn.Parameter(torch.ones(()))
        return model

    def optimizer(self, model, values):
        rate = torch.tensor(values.learning_rate)
        return torch.optim.SGD([*model.parameters(), self.temperature], lr=rate, momentum=0.9)

    def loss(self, model, batch):
        out = model(batch["x"]) * self.temperature
        return F.cross_entropy(out, batch["y"], reduction="sum"), len(batch["y"])

    def state_dict(self):
        return {"nested": {"a/b": {"calls": 3}, "average": torch.ones(2)}, "empty": {}}

    def load_state_dict(self, state):
        assert state["nested"]["a/b"] == {"calls": 3} and state["empty"] == {}
        assert torch.equal(state["nested"]["average"], torch.ones(2))
        self.loaded = True


class WithExtras(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.register_buffer("moving", torch.zeros(6), persistent=False)
        self.calls = 0

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.moving.mul_(0.9).add_(x.mean(dim=0).to(self.moving.dtype), alpha=0.1)
        return self.layers(x - self.moving) * (1 + 0.01 * self.calls)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_state_in_unusual_places_is_saved_too(tmp_path):
    whole = train_alone(Hidden(), FLAGS)
    train_alone(Hidden(), FLAGS, folder=tmp_path, kill_at=7)
    workload = Hidden()
    resumed = train_alone(workload, FLAGS, folder=tmp_path)
    assert workload.loaded
    assert resumed.losses == whole.losses[6:]
    assert {n: v for n, v in resumed.weights.items() if isinstance(v, dict)} == {"_extra_state": {"calls": 14}}


def test_state_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path):
    class Unsavable(Classify):
        def state_dict(self):
            return {"set": {1, 2}}

        def load_state_dict(self, state): ...

    with pytest.raises(WorkloadError, match="state of the workload") as caught:
        train_alone(Unsavable(), FLAGS, folder=tmp_path)
    assert "every-minutes" in str(caught.value)
    assert Catalog.of_run(str(tmp_path)).newest() is None


def test_an_allowed_change_of_the_optimizer_takes_effect(tmp_path):
    facts = {"config": make_job(Classify(), FLAGS)[0].config.to_dict()}
    train_alone(Classify(), FLAGS, folder=tmp_path, kill_at=6, facts=facts)
    slower = {**FLAGS, "optimizer.learning_rate": 0.001, "optimizer.weight_decay": 0.5}
    resumed = train_alone(Classify(), slower, folder=tmp_path, facts=facts)
    assert max(s.learning_rate for s in resumed.steps) <= 0.001
    unchanged = train_alone(Classify(), FLAGS, folder=tmp_path, facts=facts)
    assert unchanged.steps == [], "the run is at its end"


class OneCycle(Classify):
    def schedule(self, optimizer, recipe):
        total = recipe.total_steps
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=recipe.learning_rate, total_steps=total)


@pytest.mark.parametrize(
    ("workload", "schedule"),
    [(Classify, "constant"), (Classify, "linear"), (Classify, "cosine"), (OneCycle, "constant")],
    ids=["constant", "linear", "cosine", "own"],
)
def test_a_run_that_is_trained_for_longer_continues_on_the_schedule_of_its_new_length(tmp_path, workload, schedule):
    flags = {**FLAGS, "schedule.name": schedule, "schedule.warmup": "2 steps", "stop.after": "2 epochs"}
    facts = {"config": make_job(workload(), flags)[0].config.to_dict()}
    finished = train_alone(workload(), flags, folder=tmp_path, facts=facts)
    longer = {**flags, "stop.after": "4 epochs"}
    whole = [step.learning_rate for step in train_alone(workload(), longer).steps]
    resumed = train_alone(workload(), longer, folder=tmp_path, facts=facts)
    rates = [step.learning_rate for step in resumed.steps]
    assert rates == whole[len(finished.steps) :] and len(rates) == len(finished.steps)
    events = [m.text for m in resumed.messages if isinstance(m, EventRecord) and m.kind == "resumed"]
    assert ("the learning rate of the next step is" in events[0]) == (rates[0] != finished.steps[-1].learning_rate)


def test_a_notice_for_a_second_node_is_new_although_the_first_still_stands(tmp_path):
    job, _ = make_job(Classify())
    notices = iter([frozenset(), frozenset("a"), frozenset("a"), frozenset("ab"), frozenset("b")])
    saves = Checkpointing(
        job, RankContext(), Catalog.of_run(str(tmp_path)), emit=print, control=Control(notice=lambda: next(notices))
    )
    assert [saves._is_notice_new() for _ in range(5)] == [False, True, False, True, False]
