"""Steps of rows of unequal length: every row once an epoch, the same steps for everybody, and what each step holds."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaleray.data import Part
from scaleray.data.length_order import LengthPlan, Lengths

LENGTHS = st.lists(st.integers(1, 40), min_size=5, max_size=120)
BUCKETS = st.sampled_from([None, 1, 3, 100])


def plan_of(lengths, *, batch=4, bucket=3, tokens=None, **more):
    return LengthPlan(
        len(lengths), batch, lengths=Lengths(lengths), bucket_batches=bucket, tokens_per_step=tokens, **more
    )


def epoch_rows(plan, epoch=0):
    steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
    return [plan.global_indices(step) for step in steps]


@given(LENGTHS, BUCKETS, st.booleans(), st.integers(1, 3), st.integers(0, 3))
def test_every_row_comes_once_an_epoch_in_steps_that_hold_what_they_say(lengths, bucket, in_tokens, seed, epoch):
    tokens = max(2 * max(lengths), 60) if in_tokens else None
    plan = plan_of(lengths, bucket=bucket, tokens=tokens, seed=seed)
    steps = epoch_rows(plan, epoch)
    assert sorted(np.concatenate(steps).tolist()) == list(range(len(lengths)))
    first = epoch * plan.steps_per_epoch
    before = 0
    for number, rows in enumerate(steps):
        assert plan.num_rows(first + number) == len(rows) > 0
        assert plan.place(first + number) == (epoch, before)
        before += len(rows)


@given(LENGTHS, BUCKETS, st.integers(0, 2))
def test_a_step_of_tokens_has_its_piece_of_the_epoch_but_for_less_than_a_row(lengths, bucket, epoch):
    tokens = 2 * max(lengths)
    plan = plan_of(lengths, bucket=bucket, tokens=tokens)
    share = sum(lengths) / plan.steps_per_epoch
    assert share <= tokens
    for rows in epoch_rows(plan, epoch):
        assert abs(sum(lengths[row] for row in rows) - share) < max(lengths) + 1


@given(LENGTHS, BUCKETS, st.booleans(), st.integers(1, 7))
def test_any_number_of_workers_sees_the_same_steps_from_any_place(lengths, bucket, in_tokens, world_size):
    plan = plan_of(lengths, bucket=bucket, tokens=2 * max(lengths) if in_tokens else None)
    first, last = plan.steps_per_epoch // 2, 2 * plan.steps_per_epoch
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan and hash(again) == hash(plan)
    for step in range(first, last):
        parts = [Part(again, rank, world_size, first, last) for rank in range(world_size)]
        rows = [again.samples_at(p.positions(range(step, step + 1)))[: p.num_rows(step)] for p in parts]
        assert np.concatenate(rows).tolist() == plan.global_indices(step).tolist()


def test_bucketing_leaves_little_to_pad_and_no_order_of_lengths():
    lengths = np.random.default_rng(0).integers(1, 200, size=4000)

    def padded(bucket):
        plan = plan_of(lengths, batch=20, bucket=bucket)
        longest = [lengths[rows].max() for rows in epoch_rows(plan)]
        return 1 - lengths.sum() / (20 * np.sum(longest)), longest

    (without, _), (with_buckets, longest) = padded(None), padded(50)
    assert without > 0.45 and with_buckets < 0.04
    assert abs(np.corrcoef(longest[:-1], longest[1:])[0, 1]) < 0.2


def test_epochs_seeds_and_windows_give_other_orders():
    lengths = np.random.default_rng(1).integers(1, 30, size=200)
    plan = plan_of(lengths)
    orders = [np.concatenate(epoch_rows(p, e)) for p, e in [
        (plan, 0), (plan, 1), (dataclasses.replace(plan, seed=1), 0), (dataclasses.replace(plan, bucket_batches=9), 0),
    ]]  # fmt: skip
    assert len({order.tobytes() for order in orders}) == 4


def test_row_groups_stay_in_their_windows():
    lengths = np.random.default_rng(2).integers(1, 30, size=120)
    plan = plan_of(lengths, batch=5, bucket=4, group_sizes=(20,) * 6, window_rows=20)
    rows = np.concatenate(epoch_rows(plan))
    for start in range(0, 120, 20):
        assert len(set(rows[start : start + 20] // 20)) == 1


def test_the_promise_says_what_was_done():
    promise = plan_of([3, 4, 5, 6], tokens=9, bucket=2).promise
    assert promise.startswith("exact: ") and "sorted within 2 global batches" in promise
    assert "steps of about 9 tokens, in whole rows" in promise


@pytest.mark.parametrize("values", [[1, 2], [2, 1]])
def test_lengths_are_equal_where_their_values_are(values):
    assert Lengths(values) == Lengths(np.array(values, np.int32))
    assert (Lengths(values) == Lengths([1, 2])) is (values == [1, 2])
