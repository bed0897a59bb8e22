"""A training on a number of workers that changes: the global batch is kept, or rescaled with the workers."""

from __future__ import annotations

import numpy as np
import pytest
from small_runs import Classify, largest_difference, relative_differences, rows, train, train_alone

from scaleray.data import StepPlan
from scaleray.data.sample_order import Origin

pytestmark = pytest.mark.combination  # a feature that few commits touch: its tests take turns

FLAGS = {
    "scale.workers": {"min": 1, "max": 4},
    "batch.global_size": 12,
    "stop.after": "4 epochs",
    "optimizer.reference_batch_size": 12,
    "optimizer.rule": "linear",
    "schedule.name": "cosine",
    "schedule.warmup": "3 steps",
    "checkpoint.every": "2 steps",
    "deterministic": True,
}


class WithIds(Classify):
    """Remembers which rows each training step used."""

    def __init__(self, num_rows: int = 50) -> None:
        super().__init__(num_rows)
        self.seen: list[np.ndarray] = []

    def datasets(self):
        return {"train": {**rows(self.num_rows), "id": np.arange(self.num_rows)}}

    def loss(self, model, batch):
        if model.training:
            self.seen.append(batch["id"].numpy().copy())
        return super().loss(model, batch)


def run(place, flags, folder, kill_at):
    workload = WithIds()
    finished = train(place, workload, flags, folder=folder, kill_at=kill_at)
    return finished, workload.seen


def test_the_batch_is_kept_by_accumulation_whatever_the_number_of_workers(gloo, tmp_path):
    whole = train_alone(WithIds(), {**FLAGS, "scale.workers": 1})
    gloo.run(4, run, FLAGS, str(tmp_path), 6)
    middle, _ = gloo.run(3, run, FLAGS, str(tmp_path), 11)[0]
    last, seen = gloo.run(1, run, FLAGS, str(tmp_path), None)[0]
    assert [s.step for s in middle.steps] == list(range(7, 12)) and [s.step for s in last.steps] == list(range(11, 21))
    assert max(relative_differences(whole.losses[10:], last.losses)) < 1e-12
    assert largest_difference(whole.weights, last.weights) < 1e-11
    assert len(seen[0]) == 3, "a micro-batch as large as a worker's share at most workers"
    assert any("on 1 worker instead of 3" in event for event in last.events)


def test_a_rescaled_batch_goes_on_in_the_epoch_and_follows_the_rule(gloo, tmp_path):
    flags = {**FLAGS, "scale.on_resize": "rescale"}
    gloo.run(4, run, flags, str(tmp_path), 6)  # 50 rows in batches of 12: 5 steps an epoch, and one more
    finished, _ = gloo.run(2, run, flags, str(tmp_path), None)[0]
    assert finished.steps[0].step == 7 and finished.steps[0].num_samples == 6, "half the workers, half the batch"
    # the rest of the second epoch is 38 rows, then two epochs of 50, in batches of 6
    assert len(finished.steps) == 7 + 9 + 9
    assert finished.steps[-1].step == 6 + 25
    assert finished.steps[-1].epoch == pytest.approx(4.0)
    assert any("global batch 12 -> 6, learning rate 0.1 -> 0.05" in event for event in finished.events)
    assert max(s.learning_rate for s in finished.steps) <= 0.05
    assert finished.steps[-1].learning_rate < 0.002, "the cosine ends where the training does"


def test_after_a_change_of_the_batch_every_step_has_the_learning_rate_of_its_place_in_the_training(gloo, tmp_path):
    flags = {**FLAGS, "scale.on_resize": "rescale"}
    gloo.run(4, run, flags, str(tmp_path), 6)
    finished, _ = gloo.run(2, run, flags, str(tmp_path), None)[0]
    # the same training at the smaller batch from its start: 3 steps of warm-up on 4 workers are 6 on 2
    small = {**FLAGS, "scale.workers": 1, "batch.global_size": 6, "schedule.warmup": "6 steps"}
    whole = train_alone(WithIds(), small)
    # 50 rows and 12 more lay behind: 9 steps of 6 in the first epoch, 2 in the second
    expected = [s.learning_rate for s in whole.steps[9 + 2 :]]
    assert [s.learning_rate for s in finished.steps] == pytest.approx(expected, rel=1e-12)


def test_a_plan_with_an_origin_goes_on_where_the_other_stopped():
    first = StepPlan(50, 12, seed=3)
    epoch, sample = first.place(7)
    assert (epoch, sample) == (1, 24)
    second = StepPlan(50, 5, seed=3, origin=Origin(7, epoch, sample))
    used = [first.global_indices(step) for step in range(7)] + [
        second.global_indices(step) for step in range(7, 7 + 6 + 10)
    ]
    everything = np.concatenate(used)
    assert len(everything) == 150
    for epoch in range(3):
        assert sorted(everything[epoch * 50 : (epoch + 1) * 50]) == list(range(50))
    assert second.epochs(7 + 6) == 2.0


@pytest.mark.parametrize("kill_at", [9, pytest.param(14, marks=pytest.mark.combination)])
def test_a_rescaled_run_resumes_to_the_bit_on_the_same_workers(gloo, tmp_path, kill_at):
    flags = {**FLAGS, "scale.on_resize": "rescale"}
    for folder in ("whole", "broken"):
        gloo.run(4, run, flags, str(tmp_path / folder), 6)
    whole, _ = gloo.run(2, run, flags, str(tmp_path / "whole"), None)[0]
    gloo.run(2, run, flags, str(tmp_path / "broken"), kill_at)
    resumed, _ = gloo.run(2, run, flags, str(tmp_path / "broken"), None)[0]
    assert resumed.losses == whole.losses[-len(resumed.losses) :]
    assert [s.learning_rate for s in resumed.steps] == [s.learning_rate for s in whole.steps[-len(resumed.steps) :]]
    assert resumed.steps[-1].step == whole.steps[-1].step
