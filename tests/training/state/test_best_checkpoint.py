"""The best checkpoint is the state that was measured to be the best, and every manifest says which step its metrics belong to."""

from __future__ import annotations

import math

import pytest
import torch
from small_runs import NUM_CLASSES, NUM_FEATURES, Classify, train, train_alone
from torch import nn

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.tensor_files import read_tensor
from scaleray.errors import ConfigError
from scaleray.training.state.checkpointing import Checkpointing

FLAGS = {
    "stop.after": "12 steps", "evaluation.every": "2 steps", "checkpoint.every": "3 steps", "checkpoint.keep_last": 1,
    "checkpoint.best": "val/score max",
}  # fmt: skip
ONLY_BEST = {**FLAGS, "checkpoint.every": None, "checkpoint.every_minutes": None}
RISE_AND_FALL = {2: 0.5, 4: 0.9, 6: 0.7, 8: 0.8, 10: 0.6, 12: 0.4}


class Counted(nn.Module):
    """A linear layer that counts its training steps in a buffer, so that a checkpoint shows whose state it is."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.steps += 1
        return self.layer(x)


class Scored(Classify):
    """`val/score` after so many steps is what a table says."""

    def __init__(self, scores):
        super().__init__(num_val=4)
        self.scores = scores

    def build_model(self):
        return Counted()

    def metrics(self, model, batch):
        count = len(batch["y"])
        return {"score": (torch.tensor(self.scores.get(int(model.steps), math.nan)) * count, count)}


def stored(folder):
    """What the checkpoints of a run say of their own states, by step; None where nobody measured that state."""
    manifests = Catalog.of_run(str(folder)).complete()
    return {m.step: m.own_metrics.get("val/score") for m in manifests}


def step_in(folder, step):
    """How many steps the model of a checkpoint has seen."""
    catalog = Catalog.of_run(str(folder))
    return int(read_tensor(catalog.stores, catalog.read(step).tensors["model.steps"]))


@pytest.mark.parametrize("is_asynchronous", [True, False])
@pytest.mark.parametrize("direction", ["max", "min"])
def test_a_new_best_is_saved_at_its_own_step_and_kept(tmp_path, is_asynchronous, direction):
    sign = 1 if direction == "max" else -1
    scores = {step: sign * score for step, score in RISE_AND_FALL.items()}
    flags = {**FLAGS, "checkpoint.best": f"val/score {direction}", "checkpoint.is_asynchronous": is_asynchronous}
    finished = train_alone(Scored(scores), flags, folder=tmp_path)
    assert [c.step for c in finished.checkpoints] == [2, 3, 4, 6, 9, 12], "2 and 4 are the best so far, others are due"
    assert stored(tmp_path) == {4: pytest.approx(sign * 0.9), 12: pytest.approx(sign * 0.4)}
    assert step_in(tmp_path, 4) == 4


def test_a_checkpoint_between_evaluations_does_not_inherit_a_rank(tmp_path):
    flags = {**FLAGS, "evaluation.every": "4 steps", "checkpoint.keep_last": 10}
    train_alone(Scored({4: 0.9, 8: 0.5, 12: 0.1}), flags, folder=tmp_path)
    manifests = {m.step: m for m in Catalog.of_run(str(tmp_path)).complete()}
    assert {step: m.evaluated_at for step, m in manifests.items()} == {3: None, 4: 4, 6: 4, 9: 8, 12: 12}
    assert manifests[6].metrics["val/score"] == pytest.approx(0.9) and manifests[6].own_metrics == {}
    assert manifests[3].facts["metrics"] == {} and manifests[3].facts["evaluated_at"] is None
    flags["checkpoint.keep_last"] = 1
    train_alone(Scored({4: 0.9, 8: 0.5, 12: 0.1}), flags, folder=tmp_path / "strict")
    assert set(stored(tmp_path / "strict")) == {4, 12}


@pytest.mark.parametrize("full_every", [1, 16])
def test_the_last_evaluation_reaches_the_checkpoint_that_was_saved_before_it(tmp_path, full_every):
    flags = {
        **FLAGS,
        "evaluation.every": "5 steps",
        "checkpoint.every": "12 steps",
        "checkpoint.full_every": full_every,
    }
    finished = train_alone(Scored({5: 0.3, 10: 0.2, 12: 0.9}), flags, folder=tmp_path)
    assert [c.step for c in finished.checkpoints] == [5, 12], "its tensors are written once"
    catalog = Catalog.of_run(str(tmp_path))
    assert stored(tmp_path) == {12: pytest.approx(0.9)}, "and 5 is not the best any more"
    assert catalog.check(catalog.read(12)) == [] and step_in(tmp_path, 12) == 12
    assert catalog.read(12).values["progress"]["evaluated_at"] == 12
    again = train_alone(Scored({}), flags, folder=tmp_path)
    assert again.steps == [] and again.evaluations[-1].metrics["val/score"] == pytest.approx(0.9)


def test_a_best_at_the_very_end_is_saved_where_nothing_else_is(tmp_path):
    flags = {**ONLY_BEST, "evaluation.every": "5 steps"}
    train_alone(Scored({5: 0.3, 10: 0.2, 12: 0.9}), flags, folder=tmp_path)
    assert stored(tmp_path) == {12: pytest.approx(0.9)} and step_in(tmp_path, 12) == 12


def test_a_run_that_stops_at_its_target_saves_the_state_that_reached_it(tmp_path):
    finished = train_alone(Scored(RISE_AND_FALL), {**ONLY_BEST, "stop.at": "val/score >= 0.85"}, folder=tmp_path)
    assert finished.summary.steps == 4
    assert stored(tmp_path) == {4: pytest.approx(0.9)} and step_in(tmp_path, 4) == 4


def test_a_resumed_run_knows_the_best_so_far(tmp_path):
    train_alone(Scored(RISE_AND_FALL), FLAGS, folder=tmp_path, kill_at=7)
    assert set(stored(tmp_path)) == {4, 6}
    resumed = train_alone(Scored(RISE_AND_FALL), FLAGS, folder=tmp_path)
    assert [c.step for c in resumed.checkpoints] == [9, 12], "8 is better than 6, but not than 4"
    assert set(stored(tmp_path)) == {4, 12}


def test_a_run_resumed_before_its_best_state_may_find_another(tmp_path):
    train_alone(Scored(RISE_AND_FALL), {**FLAGS, "checkpoint.keep_last": 5}, folder=tmp_path, kill_at=7)
    for name in ("step-000000006", "step-000000004"):
        (tmp_path / "checkpoints" / name / "manifest.json").unlink()
    resumed = train_alone(Scored({2: 0.5, 4: 0.1, 6: 0.2, 8: 0.6}), FLAGS, folder=tmp_path)
    assert resumed.steps[0].step == 4
    assert stored(tmp_path)[8] == pytest.approx(0.6) and 2 not in stored(tmp_path)


def test_only_a_finite_value_that_is_better_than_all_before_is_a_new_best(tmp_path):
    scores = {2: math.nan, 4: 0.5, 6: 0.5, 8: math.inf, 10: -math.inf, 12: 0.5}
    finished = train_alone(Scored(scores), ONLY_BEST, folder=tmp_path)
    assert [c.step for c in finished.checkpoints] == [4]


def test_as_many_best_ones_are_saved_as_are_kept(tmp_path):
    finished = train_alone(Scored(RISE_AND_FALL), {**ONLY_BEST, "checkpoint.keep_best": 2}, folder=tmp_path)
    assert [c.step for c in finished.checkpoints] == [2, 4, 6, 8]
    assert set(stored(tmp_path)) == {4, 8}
    none = train_alone(Scored(RISE_AND_FALL), {**ONLY_BEST, "checkpoint.keep_best": 0}, folder=tmp_path / "none")
    assert none.checkpoints == [] and "checkpoint.best has no effect with checkpoint.keep_best 0" in none.events


def test_a_best_state_that_could_not_be_written_is_no_rival(tmp_path, monkeypatch):
    publish = Catalog.publish

    def full_disk(self, manifest):
        if manifest.step == 4:
            raise OSError("no space left on device")
        return publish(self, manifest)

    monkeypatch.setattr(Catalog, "publish", full_disk)
    train_alone(Scored(RISE_AND_FALL), FLAGS, folder=tmp_path)
    assert set(stored(tmp_path)) == {8, 12}, "the best of those that exist"


def with_other_numbers(place, workload, flags, folder):
    """A run in which rank 1 believes that every evaluation is the best of all."""
    before = Checkpointing.evaluated

    def evaluated(self, step, metrics, **more):
        return before(self, step, {"val/score": float(step)} if place.rank else metrics, **more)

    Checkpointing.evaluated = evaluated
    try:
        return train(place, workload, flags, folder=folder)
    finally:
        Checkpointing.evaluated = before


@pytest.mark.parametrize("strategy", ["ddp", "local_sgd"])
def test_all_ranks_decide_alike_what_is_a_new_best(gloo, tmp_path, strategy):
    flags = {**ONLY_BEST, "strategy.name": strategy, "batch.micro_size": 4, "local_sgd.sync_every": 3}
    finished = gloo.run(2, with_other_numbers, Scored(RISE_AND_FALL), flags, str(tmp_path))[0]
    assert [c.step for c in finished.checkpoints] == [2, 4]
    manifest = Catalog.of_run(str(tmp_path)).read(4)
    assert manifest.own_metrics["val/score"] == pytest.approx(0.9) and manifest.world_size == 2
    assert step_in(tmp_path, 4) == 4


def test_a_metric_of_no_split_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoint.best is 'test/score'.*\n  there are: val/loss") as caught:
        train_alone(Scored({}), {**FLAGS, "checkpoint.best": "test/score max"}, folder=tmp_path)
    assert caught.value.key == "checkpoint.best"
    with pytest.raises(ConfigError, match="no splits to evaluate"):
        train_alone(Classify(), FLAGS, folder=tmp_path)


def test_a_metric_that_no_evaluation_measures_is_refused_at_the_first_one(tmp_path):
    workload = Scored(RISE_AND_FALL)
    with pytest.raises(ConfigError, match=r"no evaluation measures this metric.*\n  there are: val/loss, val/score"):
        train_alone(workload, {**FLAGS, "checkpoint.best": "val/scores max"}, folder=tmp_path)
    assert not stored(tmp_path), "after 2 steps"


def test_a_wrong_metric_does_not_cost_the_training_that_the_only_evaluation_comes_after(tmp_path):
    flags = {**FLAGS, "checkpoint.best": "val/scores max", "evaluation.every": None}
    finished = train_alone(Scored({12: 0.5}), flags, folder=tmp_path)
    assert finished.summary.verdict == "done" and finished.weights
    assert sum("there are: val/loss, val/score" in event for event in finished.events) == 1


class Sometimes(Classify):
    """A metric that only the first evaluation has, as one of a rare class may be."""

    evaluations = 0

    def metrics(self, model, batch):
        self.evaluations += 1
        return {"rare": (torch.tensor(1.0), 1)} if self.evaluations == 1 else {}


def test_a_metric_that_is_missing_later_is_not_that_of_an_older_step(tmp_path):
    flags = {**FLAGS, "checkpoint.best": "val/rare max", "checkpoint.keep_last": 10}
    finished = train_alone(Sometimes(num_val=4), flags, folder=tmp_path)
    assert [set(e.metrics) for e in finished.evaluations[:2]] == [{"val/loss", "val/rare"}, {"val/loss"}]
    named = [m for m in Catalog.of_run(str(tmp_path)).complete() if "val/rare" in m.metrics]
    assert [(m.step, m.evaluated_at) for m in named] == [(3, 2), (2, 2)], "3 lies between the first two evaluations"
