"""Trainings on ragged rows with a transform and a collation: spread, resumed and verified like any other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_runs import DEFAULTS, make_job, relative_differences, train, train_alone
from torch import nn
from verified import judge

from scaleray.data import Padding, Ragged, StepPlan, flattened, padded
from scaleray.errors import ConfigError, DataError, WorkloadError

pytestmark = pytest.mark.combination

FLAGS = {"stop.after": "9 steps", "batch.global_size": 6, "batch.micro_size": 1}


class Sequences:
    """Classes of sequences of unequal length, by the mean of what a linear layer makes of each real value."""

    collate = Padding(mask="real")

    def __init__(self, num_rows=26):
        self.num_rows = num_rows

    def build_model(self):
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))

    def datasets(self):
        return {"train": self.rows(self.num_rows, 0), "val": self.rows(11, 1)}

    def rows(self, num, seed):
        draw = np.random.default_rng(seed)
        lengths = draw.integers(1, 9, size=num)
        x = np.split(draw.normal(size=(lengths.sum(), 2)).astype(np.float32), np.cumsum(lengths)[:-1])
        return {"x": x, "y": lengths % 3}

    def transform(self, rows, rng, split):
        if split == "train":
            scale = np.repeat(rng.uniform(0.5, 1.5), rows["x"].lengths)[:, None]
            rows["x"] = Ragged((rows["x"].values * scale).astype(np.float32), rows["x"].offsets)
        return rows

    def loss(self, model, batch):
        each = model(batch["x"]) * batch["real"][..., None]
        means = each.sum(dim=1) / batch["real"].sum(dim=1, keepdim=True)
        return nn.functional.cross_entropy(means, batch["y"], reduction="sum"), len(batch["y"])


class OneAfterAnother(Sequences):
    """The same loss on values without padding, from a collate that is handed rows; the batch is a tuple."""

    def collate(self, rows):
        batch = flattened(rows)
        return batch["x"], (batch["x_offsets"], torch.stack([row["y"] for row in rows]))

    def loss(self, model, batch):
        x, (offsets, y) = batch
        of_row = torch.repeat_interleave(torch.arange(len(y)), offsets.diff())
        sums = torch.zeros(len(y), 3, dtype=x.dtype).index_add(0, of_row, model(x))
        return nn.functional.cross_entropy(sums / offsets.diff()[:, None], y, reduction="sum"), len(y)


def test_padded_and_flattened_batches_train_alike_on_one_worker_and_two(gloo):
    alone = train_alone(Sequences(), FLAGS)
    assert len(alone.losses) == 9 and alone.evaluations[-1].metrics["val/loss"] > 0
    for other in (
        train_alone(OneAfterAnother(), {**FLAGS, "batch.micro_size": 6}),
        gloo.run(2, train, OneAfterAnother(), FLAGS)[0],
        gloo.run(3, train, Sequences(), FLAGS)[0],
    ):
        assert max(relative_differences(other.losses, alone.losses)) < 1e-9
        assert other.evaluations[-1].metrics == pytest.approx(alone.evaluations[-1].metrics, rel=1e-9)


def test_a_resumed_run_transforms_and_collates_as_before_to_the_bit(tmp_path):
    flags = {**FLAGS, "deterministic": True, "checkpoint.every": "1 steps"}
    whole = train_alone(Sequences(), flags)
    train_alone(Sequences(), flags, folder=tmp_path, kill_at=6)
    assert train_alone(Sequences(), flags, folder=tmp_path).losses == whole.losses[6:]


@pytest.mark.parametrize("workload", [Sequences, OneAfterAnother])
def test_verify_finds_ragged_trainings_equal_on_two_workers(gloo, workload):
    assert gloo.run(2, judge, workload(), {})[0].verdict == "equal"


def without_collate(sources_of):
    return type("Given", (Sequences,), {"collate": None, "transform": None, "datasets": sources_of})()


class LateRagged(torch.utils.data.Dataset):
    """One length but for the rows that the first batch holds, which no look at a few rows sees."""

    def __init__(self):
        size = DEFAULTS["batch.global_size"]
        self.late = set(StepPlan(26, size, seed=0).global_indices(0).tolist()) - {0, 3, 7, 10, 14, 17, 21, 25}

    def __len__(self):
        return 26

    def __getitem__(self, index):
        return {"x": np.ones((3 if index in self.late else 2, 2), np.float32), "y": index % 3}


def test_rows_that_turn_out_ragged_in_the_first_batch_are_refused_with_the_way_out():
    workload = without_collate(lambda self: {"train": LateRagged()})
    with pytest.raises(DataError, match=r"column x of the data has rows of unequal length .2 to 3 values.[^$]*Padding"):
        train_alone(workload, {"seed": 0})


class Deep(Sequences):
    """Of three layers, for a pipeline, whose batches are as wide as their longest row."""

    def build_model(self):
        return nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 3))

    def blocks(self, model):
        return [model[0], model[1]]


class OtherColumns(Sequences):
    """Leaves out a column on one of the ranks."""

    def collate(self, rows):
        batch = padded(rows, mask="real")
        if torch.distributed.get_rank() == 1:
            del batch["real"]
        return batch


def test_a_collate_whose_batches_differ_between_ranks_is_one_clear_error(gloo):
    message = r"collate\(\) at .*\.py:\d+ is different on different workers: \['real'\]: bool"
    with pytest.raises(WorkloadError, match=message):
        gloo.run(2, train, OtherColumns(), {})


class OtherLengths(Deep):
    """As wide as the rank says."""

    def collate(self, rows):
        return padded(
            rows, mask="real", to=9 + torch.distributed.get_rank() if torch.distributed.is_initialized() else 9
        )


def test_a_collate_whose_lengths_differ_by_rank_is_one_clear_error_where_ranks_share_their_rows(gloo):
    flags = {**FLAGS, "batch.global_size": 8, "batch.micro_size": 2}
    message = r"\['real'\]: bool, 2 x 9; .* on rank 0, \['real'\]: bool, 2 x 10; .* on rank 1.*workers of a replica"
    with pytest.raises(WorkloadError, match=message):
        gloo.run(2, train, OtherLengths(), {**flags, "strategy.name": "pipeline", "parallel.pipeline": 2})
    alone = train_alone(OtherLengths(), flags)  # of other rows a batch may have other lengths
    assert max(relative_differences(gloo.run(2, train, OtherLengths(), flags)[0].losses, alone.losses)) < 1e-9


@pytest.mark.combination
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_pipeline_takes_batches_of_varying_width(gloo, world_size):
    flags = {**FLAGS, "batch.global_size": 8, "batch.micro_size": 2}
    alone = train_alone(Deep(), flags)
    piped = gloo.run(world_size, train, Deep(), {**flags, "strategy.name": "pipeline", "parallel.pipeline": 2})[0]
    assert max(relative_differences(piped.losses, alone.losses)) < 1e-9
    assert piped.evaluations[-1].metrics == pytest.approx(alone.evaluations[-1].metrics, rel=1e-9)


# order by length, and steps of tokens

BY_LENGTH = {
    "batch.unit": "tokens", "batch.global_size": 20, "batch.micro_size": 9, "data.bucket_by_length": 2,
    "stop.after": "3 epochs",
}  # fmt: skip


def test_steps_of_tokens_train_alike_on_any_number_of_workers(gloo):
    alone = train_alone(Sequences(), BY_LENGTH)
    assert "in whole rows" in alone.summary.sample_order
    assert len(alone.losses) == 3 * -(-sum(map(len, Sequences().datasets()["train"]["x"])) // 20)
    for world_size in (2, 3):
        spread = gloo.run(world_size, train, Sequences(), BY_LENGTH)[0]
        assert max(relative_differences(spread.losses, alone.losses)) < 1e-9
        assert spread.evaluations[-1].metrics == pytest.approx(alone.evaluations[-1].metrics, rel=1e-9)


class Measured(Sequences):
    """Notes the rows and tokens of each batch whose loss is computed."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def loss(self, model, batch):
        self.seen.append(batch["real"].sum(1).tolist())
        return super().loss(model, batch)


def test_micro_batches_of_tokens_are_as_many_rows_in_order_as_fit():
    cut = Measured()
    by_tokens = train_alone(cut, BY_LENGTH)
    whole = train_alone(Sequences(), {**BY_LENGTH, "batch.micro_size": None})
    assert max(relative_differences(by_tokens.losses, whole.losses)) < 1e-9
    plan = make_job(Sequences(), BY_LENGTH)[0].train_plan()
    trained = iter(cut.seen)
    for step in range(len(whole.losses)):
        lengths = plan.lengths.values[plan.global_indices(step)].tolist()
        while lengths:
            most = max(n for n in range(1, len(lengths) + 1) if sum(lengths[:n]) <= 9)
            assert lengths[:most] in trained  # in this order; looks at the first batch and evaluations lie between
            del lengths[:most]


def test_micro_batches_of_tokens_are_equally_many_where_passes_communicate(gloo):
    alone = train_alone(Sequences(), BY_LENGTH)
    sharded = gloo.run(2, train, Sequences(), {**BY_LENGTH, "strategy.name": "fsdp"})[0]
    assert max(relative_differences(sharded.losses, alone.losses)) < 1e-9


def test_a_resumed_run_goes_on_with_its_steps_of_tokens_to_the_bit(tmp_path):
    flags = {**BY_LENGTH, "deterministic": True, "checkpoint.every": "1 steps"}
    whole = train_alone(Sequences(), flags)
    train_alone(Sequences(), flags, folder=tmp_path, kill_at=8)
    assert train_alone(Sequences(), flags, folder=tmp_path).losses == whole.losses[8:]
    train_alone(Sequences(), flags, folder=tmp_path / "other", kill_at=8)
    with pytest.raises(ConfigError, match="must keep its original batches"):
        train_alone(Sequences(), {**flags, "batch.global_size": 24}, folder=tmp_path / "other")


def test_verify_finds_steps_of_tokens_equal_on_two_workers(gloo):
    flags = {"batch.unit": "tokens", "batch.global_size": 40, "data.bucket_by_length": 2}
    assert gloo.run(2, judge, Sequences(), flags)[0].verdict == "equal"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"scale.workers": {"min": 1, "max": 2}}, "the order by length depends on the global batch"),
        ({"shares.by": "speed", "scale.workers": 2}, "steps differ in rows"),
        ({"data.shuffle": False}, "it needs shuffled rows"),
        ({"batch.drop_last": True}, "no partial batch to drop"),
        ({"batch.global_size": 7}, "the longest row has 8, so some steps would get no row"),
        ({"batch.micro_size": 7}, "is in tokens, by batch.unit, and the longest row has 8"),
        ({"batch.micro_size": 9, "memory.on_out_of_memory": "halve"}, "the search tries numbers of rows"),
    ],
)
def test_what_steps_of_tokens_cannot_be_combined_with_is_refused_by_name(flags, words):
    with pytest.raises(ConfigError, match=words):
        make_job(Sequences(), {**BY_LENGTH, "batch.micro_size": None, **flags})


def test_an_order_by_length_needs_lengths():
    class Even(Sequences):
        transform = None

        def datasets(self):
            return {"train": {"x": np.ones((26, 3, 2), np.float32), "y": np.zeros(26, int)}}

    with pytest.raises(ConfigError, match="it needs the lengths of the training rows"):
        make_job(Even(), {"data.bucket_by_length": 2})
    with pytest.raises(ConfigError, match="no fixed number of tokens per sample, and no lengths"):
        make_job(Even(), {"batch.unit": "tokens"})
