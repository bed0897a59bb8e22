"""Which steps verify compares: epochs end among them, workers get unequal counts, and a resume changes the batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import Classify, make_job

from scaleray.config.recipe.lr_rules import learning_rate_factor
from scaleray.data import TRAIN, RankBatch
from scaleray.data.sample_order import StepPlan
from scaleray.training.step.micro_batches import micro_batches
from scaleray.verification.repeatable.repeatable_workload import Partition
from scaleray.verification.runs.compared_job import (
    DueRates,
    later_batch_size,
    later_part,
    position_after,
    rows_of_epoch,
    short_job,
    steps_before_resume,
    with_rows,
)

BATCHES = st.sampled_from([24, 32, 64, 96])
PLENTY = 10**6


def workers(world_size, *totals, accumulation=(1, 3)):
    """How so many workers cut batches of these totals."""
    return [Partition(world_size, -(-total // world_size // n)) for total in totals for n in accumulation]


@given(BATCHES, st.sampled_from([2, 4]), st.integers(8, 40))
def test_epochs_end_before_and_after_the_resume_with_batches_that_no_number_of_workers_divides(size, world, steps):
    later = later_batch_size(size, PLENTY, world_sizes=[1, 2, world], accumulation=3)
    assert later != size and later % world == 0
    cuts = workers(world, size, later)
    rows = rows_of_epoch(PLENTY, batch_size=size, later_batch_size=later, steps=steps, partitions=cuts)
    plan, half = StepPlan(rows.epoch, size), steps_before_resume(steps)
    assert plan.steps_per_epoch <= half  # the first epoch ends before
    assert plan.num_rows(plan.steps_per_epoch - 1) % 2  # and its last batch is uneven
    assert -(-(rows.epoch - plan.place(half)[1]) // later) <= steps - half  # so does one after it
    for cut, total in zip(cuts, (size, size, later, later), strict=True):
        part = StepPlan(rows.with_statistics, total)
        assert min(cut.smallest(part.num_rows(step)) for step in range(part.steps_per_epoch)) > 1


def test_half_a_batch_leaves_a_worker_without_a_row_at_the_end_of_an_epoch():
    rows = rows_of_epoch(PLENTY, batch_size=64, later_batch_size=32, steps=20, partitions=workers(4, 64, 32))
    assert rows.epoch == 3 * 64 + 32 + 3
    assert [len(StepPlan(rows.epoch, 32).rank_indices(7, rank, 4)) for rank in range(4)] == [1, 1, 1, 0]
    assert [len(StepPlan(rows.epoch, 64).rank_indices(3, rank, 4)) for rank in range(4)] == [9, 9, 9, 8]
    assert rows.with_statistics % 32 % 4  # uneven, with two rows at least in each micro-batch


def test_few_rows_stay_as_they_are_and_a_batch_that_cannot_be_halved_is_doubled():
    few = {"steps": 20, "partitions": workers(2, 8)}
    assert rows_of_epoch(9, batch_size=8, later_batch_size=8, **few).epoch == 9
    later = [
        later_batch_size(size, rows, world_sizes=[1, 2], accumulation=3) for size, rows in ((6, 100), (6, 12), (8, 100))
    ]
    assert later == [12, 6, 16]  # half of 8 would leave 2 rows for 3 micro-batches
    few = {"steps": 8, "partitions": workers(2, 6, 12)}
    assert rows_of_epoch(100, batch_size=6, later_batch_size=12, **few).epoch == 7


@given(st.integers(4, 40), st.integers(2, 20), st.integers(0, 90))
def test_where_partial_batches_are_left_out_an_epoch_has_a_batch_before_and_after_the_resume(size, steps, more):
    available = size + more
    later = later_batch_size(size, available, world_sizes=[1, 2], accumulation=3)
    cuts = workers(2, size, later)
    rows = rows_of_epoch(
        available, batch_size=size, later_batch_size=later, steps=steps, partitions=cuts, drop_last=True
    )
    for epoch in (rows.epoch, rows.with_statistics):
        assert all(StepPlan(epoch, batch, drop_last=True).steps_per_epoch for batch in (size, later)) and (
            epoch <= available
        )


@pytest.mark.parametrize("size", [4, 16])
def test_the_rest_of_a_training_ends_where_it_should_and_knows_its_position(size):
    job, _ = make_job(Classify(num_rows=60), {"schedule.name": "cosine"})
    other, _ = make_job(Classify(num_rows=60), {"schedule.name": "cosine", "batch.global_size": size})
    earlier, later = (with_rows(short_job(j, steps=20), 29) for j in (job, other))
    progress = {"step": 6, "epoch": 1, "sample_in_epoch": 16, "global_batch_size": 8}
    continued = later_part(later, earlier, first=6, last=13).continued(progress)
    assert continued.recipe.total_steps == 13
    assert position_after(earlier, 6, in_steps_of=later) == continued.steps_before()
    due = DueRates(later, 6, continued.steps_before())
    shape = {"name": "cosine", "warmup_steps": 0, "schedule_steps": other.recipe.schedule_steps, "final_ratio": 0.0}
    assert due.factor(8) == learning_rate_factor(continued.steps_before() + 1, **shape)


def test_other_splits_are_cut_and_row_groups_with_them():
    job, _ = make_job(Classify(num_rows=60, num_val=40))
    cut = with_rows(job, 29, evaluated=11)
    assert {name: split.num_rows for name, split in cut.splits.items()} == {TRAIN: 29, "val": 11}
    assert list(with_rows(job, 29).splits) == [TRAIN]


@given(st.integers(1, 40), st.sampled_from([1, 2, 3, 4]), st.integers(1, 9), st.booleans())
def test_one_process_cuts_a_batch_as_its_workers_do(num_rows, num_shares, micro_size, is_uneven):
    shares = tuple(range(1, num_shares + 1)) if is_uneven else None
    plan = StepPlan(num_rows, sum(shares) * 40 if shares else 40, shuffle=False)
    expected = []
    for rank in range(num_shares):
        part = np.arange(num_rows)[plan.rank_slice(0, rank, num_shares, shares)]
        batch = RankBatch(0, {"row": part}, len(part))
        expected += [
            (rows["row"].tolist(), rank == 0) for rows, weight in micro_batches(batch, micro_size, at_least=0) if weight
        ]
    found = Partition(num_shares, micro_size, shares).pieces(num_rows)
    assert [(np.arange(num_rows)[rows].tolist(), is_first) for rows, is_first in found] == expected
