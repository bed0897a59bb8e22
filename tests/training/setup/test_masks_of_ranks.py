"""Which random numbers ranks draw: the same within a replica, others in every other one, and none a second time after a resume."""

from __future__ import annotations

import pytest
import torch
from small_runs import (
    NUM_CLASSES,
    NUM_FEATURES,
    Classify,
    largest_difference,
    relative_differences,
    train,
    train_in_plain_torch,
)
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

pytestmark = pytest.mark.combination  # a feature that few commits touch: its tests take turns

NUM_STEPS, LATER = 6, 2
FLAGS = {
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 0.01,
    "checkpoint.every": "2 steps",
    "stop.after": f"{NUM_STEPS} steps",
}
TENSOR = {"strategy.name": "tensor", "parallel.tensor": 2}


class Masked(nn.Module):
    """Dropout that remembers its masks of training."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        mask = torch.rand(x.shape[1], dtype=torch.float64) < 0.5
        self.masks.append(tuple(mask.int().tolist()))
        return 2 * x * mask


class WithMasks(Classify):
    """Each pass has another mask over the hidden units, which every rank of a replica has whole."""

    def build_model(self):
        self.dropout = Masked()
        return nn.Sequential(nn.Linear(NUM_FEATURES, 48), self.dropout, nn.Linear(48, NUM_CLASSES))

    def tensor_plan(self, model, *, size, sequence_parallel):
        return {"0": ColwiseParallel(output_layouts=Replicate()), "2": RowwiseParallel(input_layouts=Replicate())}


def masks_of(place, flags, folder=None, kill_at=None, num_steps=NUM_STEPS):
    """The run, and the masks of this rank's passes in its last steps, one a step."""
    workload = WithMasks()
    finished = train(place, workload, {**FLAGS, **flags}, folder=folder, kill_at=kill_at)
    return finished, workload.dropout.masks[-num_steps:]


def test_ranks_of_a_replica_draw_the_masks_of_one_process(gloo):
    finished, masks = gloo.run(2, masks_of, TENSOR)[0]
    workload = WithMasks()
    plain = train_in_plain_torch(workload, FLAGS)
    assert masks == workload.dropout.masks
    assert max(relative_differences(plain.losses, finished.losses)) <= 1e-9
    assert largest_difference(plain.weights, finished.weights) <= 1e-9


def test_replicas_draw_masks_of_their_own(gloo):
    masks = [masks for _, masks in gloo.run(4, masks_of, TENSOR)]
    assert masks[0] == masks[1] and masks[2] == masks[3]
    assert not set(masks[0]) & set(masks[2])


def test_after_a_resume_on_other_workers_no_mask_is_drawn_by_two_replicas_or_a_second_time(gloo, tmp_path):
    for flags, before, after in (({}, 1, 2), (TENSOR, 2, 4)):
        folder = str(tmp_path / str(after))
        at = NUM_STEPS - LATER
        drawn = [m for _, masks in gloo.run(before, masks_of, flags, folder, at, at) for m in masks]
        per_replica = after // 2
        outcomes = gloo.run(after, masks_of, flags, folder, None, LATER)
        assert [step.step for step in outcomes[0][0].steps] == [5, 6]
        resumed = [masks for _, masks in outcomes]
        first, second = resumed[0], resumed[per_replica]
        assert resumed == [first] * per_replica + [second] * per_replica
        assert not set(first) & set(second)
        fresh = [m for _, masks in gloo.run(after, masks_of, flags) for m in masks]
        assert not {*first, *second} & {*drawn, *fresh}
