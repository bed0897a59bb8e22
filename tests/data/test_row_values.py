"""Random numbers drawn while rows are read: the same row has the same values wherever it is read, or that is named."""

from __future__ import annotations

import random
import threading
from unittest import mock

import numpy as np
import pytest
import torch
from random_rows import Augmented, DrawsForNothing, OwnGenerator, RarelyDraws, Unmoved

from scaleray.data import ArraySource, Part, StepPlan, StepStream, as_source, row_values
from scaleray.data.blocks import LocalBlocks, read_chunk
from scaleray.errors import InputStarvedError

PLAN = StepPlan(26, 8, seed=3)
STEPS = 9  # more than two epochs


def batches(source, *, plan=PLAN, world_size=1, rank=0, first_step=0, chunk_bytes=1000.0, **more):
    part = Part(plan, rank, world_size, first_step, STEPS)
    stream = StepStream(
        lambda part, demand: LocalBlocks(source, part, chunk_bytes=chunk_bytes, **more), part, timeout_s=30
    )
    return {batch.step: batch.columns["x"][: batch.num_rows] for batch in stream}


def together(source, world_size, **options):
    ranks = [batches(source, world_size=world_size, rank=rank, **options) for rank in range(world_size)]
    return {step: np.concatenate([rank[step] for rank in ranks]) for step in ranks[0]}


def noise(source, steps):
    """What was added to the rows, by (epoch, row)."""
    added = {}
    for step, values in steps.items():
        epoch, _ = PLAN.place(step)
        for row, value in zip(PLAN.global_indices(step).tolist(), values, strict=True):
            added[epoch, row] = value - source.dataset.rows["x"][row]
    return added


@pytest.fixture
def augmented():
    return as_source(Augmented(), split="train")


@pytest.mark.parametrize(("world_size", "first_step", "chunk_bytes"), [(1, 0, 1), (2, 0, 1000), (4, 2, 100), (3, 5, 1)])
def test_a_row_has_the_same_values_on_any_number_of_workers_from_any_step_in_any_chunks(
    augmented, world_size, first_step, chunk_bytes
):
    whole = batches(augmented)
    found = together(augmented, world_size, first_step=first_step, chunk_bytes=chunk_bytes)
    assert list(found) == list(range(first_step, STEPS))
    for step, values in found.items():
        assert np.array_equal(values, whole[step]), step


def test_a_task_reads_the_same_values_as_a_worker(augmented):
    part = Part(PLAN, 0, 1, 0, STEPS)
    task = read_chunk(augmented, part, range(STEPS), is_alone=True)
    assert np.array_equal(task["x"], np.concatenate(list(batches(augmented).values())))


def test_values_differ_between_epochs_rows_seeds_and_splits(augmented):
    first = noise(augmented, batches(augmented))
    assert len({value.tobytes() for value in first.values()}) == len(first) > 52
    for other in (StepPlan(26, 8, seed=4), StepPlan(26, 8, seed=3, name="val")):
        at = np.arange(26)
        assert not (PLAN.row_seeds(at) == other.row_seeds(at)).any()


def test_a_batch_of_another_size_leaves_a_rows_values_as_they_are(augmented):
    other = StepPlan(26, 5, seed=3)
    for plan in (PLAN, other):
        at = np.flatnonzero(plan.samples_at(np.arange(26)) == 7)
        assert (
            plan.row_seeds(at).tolist() == PLAN.row_seeds(np.flatnonzero(PLAN.samples_at(np.arange(26)) == 7)).tolist()
        )


def test_the_three_generators_give_numbers_of_their_own(augmented):
    added = np.stack(list(noise(augmented, batches(augmented)).values())).astype(np.float64)
    correlations = np.corrcoef(added.T)  # of 72 rows and more: chance stays far below
    assert np.abs(correlations - np.eye(len(correlations))).max() < 0.6


def test_reading_leaves_the_generators_of_the_process_as_they_were(augmented):
    source = as_source(DrawsForNothing(), split="train")
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    batches(augmented), source.read(np.arange(4)), as_source(Augmented(), split="train")
    read_chunk(augmented, Part(PLAN, 0, 1, 0, STEPS), range(3), is_alone=True)
    read_chunk(as_source(RarelyDraws(), split="train"), Part(PLAN, 0, 1, 0, STEPS), range(4), is_alone=True)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1] and random.getstate() == before[2]


def test_a_source_that_draws_is_read_only_while_somebody_waits_for_it(augmented):
    part = Part(PLAN, 0, 1, 0, STEPS)
    before = augmented.dataset.reads
    stream = StepStream(lambda part, demand: LocalBlocks(augmented, part, chunk_bytes=1000), part, timeout_s=30)
    for number in (1, 2):
        next(stream)
        assert augmented.dataset.reads == before + 8 * number
    stream.close(wait_s=30)
    assert augmented.dataset.reads == before + 16


def test_a_row_that_never_comes_ends_the_wait_where_rows_are_read_one_by_one_too(augmented):
    release = threading.Event()
    part = Part(PLAN, 0, 1, 0, STEPS)
    stream = StepStream(lambda part, demand: LocalBlocks(augmented, part, chunk_bytes=1000), part, timeout_s=0.01)
    with (
        mock.patch.object(Augmented, "noise", side_effect=lambda index: release.wait(30)),
        pytest.raises(InputStarvedError),
    ):
        next(stream)
    release.set()
    stream.close(wait_s=30)


def test_a_dataset_that_draws_nothing_is_read_ahead_and_seeds_nothing():
    with mock.patch.object(row_values, "READS", 1):
        source = as_source(Unmoved(), split="train")
    assert source.row_values == row_values.AS_STORED and source.row_values.promise == ""
    with mock.patch("scaleray.data.sources.seed_row", side_effect=AssertionError):
        blocks = LocalBlocks(source, Part(PLAN, 0, 1, 0, STEPS), chunk_bytes=1)
        assert not blocks.is_read_alone
        assert len(list(blocks)) == STEPS


def test_a_row_that_draws_unseen_is_seeded_where_it_can_be_noticed():
    source = as_source(RarelyDraws(), split="train")
    assert source.row_values == row_values.AS_STORED, "the first look passes it over"
    first, second = (batches(source, may_draw=True), together(source, 2, may_draw=True))
    assert all(np.array_equal(values, second[step]) for step, values in first.items())
    assert np.array_equal(
        read_chunk(source, Part(PLAN, 0, 1, 0, STEPS), range(STEPS), is_alone=True)["x"],
        np.concatenate(list(first.values())),
    )
    assert len({value.tobytes() for (_, row), value in noise(source, first).items() if row == 5}) >= 2


def test_rows_that_cannot_be_had_again_are_named():
    for dataset in (OwnGenerator(), OwnGenerator(only=25)):
        found = as_source(dataset, split="train").row_values
        assert (
            not found.are_repeatable
            and "differs in column x when it is read again under the same seed" in found.promise
        )
    assert as_source(Augmented(), split="train").row_values.are_repeatable


def test_rows_that_are_not_numbers_are_told_apart_from_rows_that_differ():
    class Holes(Unmoved):
        def noise(self, index):
            return np.full(6, np.nan, np.float32)

    assert as_source(Holes(), split="train").row_values == row_values.AS_STORED


# sources of the user's own


class Noisy:
    """Reads many rows at once and adds noise to each."""

    num_rows, row_bytes, tokens_per_row = 26, 8, None

    def __init__(self, group_sizes=None):
        self.group_sizes = group_sizes

    def read(self, indices):
        return {"x": np.asarray(indices) + np.random.random(len(indices))}

    def describe(self):
        return {"kind": "noisy"}


def test_a_source_of_the_users_own_that_draws_is_seeded_row_by_row():
    source = as_source(Noisy(), split="train")
    assert source.row_values.draw_random_numbers and source.row_values.are_repeatable
    assert source.describe() == {"kind": "noisy"} and source.num_rows == 26
    whole, shared = batches(source), together(source, 3)
    assert all(np.array_equal(values, shared[step]) for step, values in whole.items())
    assert len(np.unique(np.concatenate(list(whole.values())) % 1)) == sum(map(len, whole.values()))


def test_a_source_that_draws_and_is_read_in_groups_is_named_as_not_repeatable():
    source = as_source(Noisy(group_sizes=(13, 13)), split="train")
    assert "Noisy draws random numbers, and is read in groups of rows" in source.row_values.promise
    assert len(source.read(np.arange(5))["x"]) == 5


def test_what_scaleray_stores_itself_is_not_looked_at():
    source = ArraySource({"x": np.arange(26)})
    with mock.patch.object(row_values, "look_at_rows", side_effect=AssertionError):
        assert as_source(source, split="train") is source
    assert not LocalBlocks(source, Part(PLAN, 0, 1, 0, STEPS), chunk_bytes=1, may_draw=True).is_read_alone


def test_the_first_look_passes_over_a_row_that_cannot_be_read():
    class Broken(Unmoved):
        def noise(self, index):
            if index == 25:
                raise OSError("a broken file")
            return super().noise(index)

    assert as_source(Broken(), split="train").row_values == row_values.AS_STORED
