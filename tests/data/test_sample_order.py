"""The order of the samples: a pure function of seed, epoch and step, the same for every number of workers."""

import collections
import hashlib
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaleray.data import StepPlan
from scaleray.data.sample_order import Permutation, stream_key

WORLD_SIZES = [1, 2, 3, 6, 9, 18]  # the divisors of a global batch of 18
ORDERS = {
    "global permutation": {},
    "file order": {"shuffle": False},
    "row groups in windows": {"group_sizes": (7, 0, 30, 1, 0, 12, 49, 4), "window_rows": 20},
    "row groups in file order": {"group_sizes": (7, 0, 30, 1, 0, 12, 49, 4), "window_rows": 20, "shuffle": False},
}
NUM_SAMPLES = 103  # 5 full batches of 18 and one of 13, which most of these world sizes do not divide

group_lists = st.lists(st.one_of(st.just(0), st.integers(0, 40)), min_size=1, max_size=12).filter(sum)


def all_indices(plan, steps):
    return np.concatenate([plan.global_indices(step) for step in steps])


def joined_ranks(plan, step, world_size):
    return np.concatenate([plan.rank_indices(step, rank, world_size) for rank in range(world_size)])


# the permutation


@given(
    size=st.one_of(st.integers(1, 300), st.sampled_from([1023, 1024, 1025, 9_973, 20_000])),
    key=st.integers(0, 2**64 - 1),
)
def test_a_permutation_gives_every_element_once(size, key):
    order = Permutation(size, key)(np.arange(size, dtype=np.int64))
    assert np.array_equal(np.sort(order), np.arange(size))


@given(size=st.integers(2, 2**40), key=st.integers(0, 2**64 - 1), data=st.data())
def test_a_permutation_of_a_huge_range_stays_inside_it_and_tells_positions_apart(size, key, data):
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=20, unique=True)))
    order = Permutation(size, key)(positions)
    assert order.dtype == np.int64
    assert ((order >= 0) & (order < size)).all()
    assert len(set(order.tolist())) == len(positions)


@given(key=st.integers(0, 2**64 - 1), size=st.integers(1, 1000))
def test_a_permutation_does_not_depend_on_which_positions_are_asked_together(key, size):
    permutation = Permutation(size, key)
    whole = permutation(np.arange(size))
    positions = np.random.default_rng(0).integers(0, size, 50)
    assert np.array_equal(permutation(positions), whole[positions])


def test_a_permutation_leaves_the_positions_it_is_given_unchanged():
    positions = np.arange(100)
    Permutation(100, 3)(positions)
    assert np.array_equal(positions, np.arange(100))


def test_permutations_look_random():
    """Rank correlation with the identity and between neighbours stays within 5 standard deviations of chance."""
    size = 10_000
    for key in range(5):
        order = Permutation(size, stream_key(key, "test"))(np.arange(size))
        for left, right in ((order, np.arange(size)), (order[:-1], order[1:])):
            assert abs(np.corrcoef(left, right)[0, 1]) < 5 / math.sqrt(size)
    firsts = collections.Counter(int(Permutation(10, stream_key(s, "x"))(np.array([0]))[0]) for s in range(2000))
    assert len(firsts) == 10 and max(abs(n - 200) for n in firsts.values()) < 5 * math.sqrt(200)


def test_streams_of_different_names_differ():
    keys = {
        stream_key(seed, "data", name, epoch) for seed in range(3) for name in ("train", "val") for epoch in range(3)
    }
    assert len(keys) == 18


# the same order for every number of workers


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_global_batch_18_has_one_order_on_1_2_3_6_9_and_18_workers(order):
    plan = StepPlan(NUM_SAMPLES, 18, seed=4, **order)
    for step in range(3 * plan.steps_per_epoch):
        whole = plan.global_indices(step)
        for world_size in WORLD_SIZES:
            assert np.array_equal(joined_ranks(plan, step, world_size), whole)


@given(
    groups=st.one_of(st.none(), group_lists),
    num_samples=st.integers(1, 200),
    per_rank=st.integers(1, 9),
    world_size=st.integers(1, 20),
    window_rows=st.integers(1, 60),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
)
def test_ranks_together_are_the_global_batch(groups, num_samples, per_rank, world_size, window_rows, shuffle, seed):
    num_samples = sum(groups) if groups else num_samples
    plan = StepPlan(
        num_samples,
        per_rank * world_size,
        seed=seed,
        shuffle=shuffle,
        window_rows=window_rows,
        group_sizes=tuple(groups) if groups else None,
    )
    for step in range(2 * plan.steps_per_epoch):
        shares = [len(plan.rank_indices(step, rank, world_size)) for rank in range(world_size)]
        assert max(shares) - min(shares) <= 1
        assert shares == sorted(shares, reverse=True)  # rank 0 has a row whenever any rank has one
        assert np.array_equal(joined_ranks(plan, step, world_size), plan.global_indices(step))


@settings(max_examples=300)
@given(
    groups=st.one_of(st.none(), group_lists),
    num_samples=st.integers(1, 200),
    batch=st.integers(1, 64),
    window_rows=st.integers(1, 100),
    shuffle=st.booleans(),
    epoch=st.integers(0, 5),
)
def test_every_sample_comes_once_an_epoch_the_partial_batch_included(
    groups, num_samples, batch, window_rows, shuffle, epoch
):
    num_samples = sum(groups) if groups else num_samples
    plan = StepPlan(
        num_samples, batch, shuffle=shuffle, window_rows=window_rows, group_sizes=tuple(groups) if groups else None
    )
    first = epoch * plan.steps_per_epoch
    steps = range(first, first + plan.steps_per_epoch)
    assert np.array_equal(np.sort(all_indices(plan, steps)), np.arange(num_samples))
    assert [plan.num_rows(step) for step in steps] == [len(plan.global_indices(step)) for step in steps]


# epochs, starts and ends


@pytest.mark.parametrize("order", [ORDERS["global permutation"], ORDERS["row groups in windows"]])
def test_epochs_and_seeds_have_orders_of_their_own(order):
    plan = StepPlan(NUM_SAMPLES, 18, seed=4, **order)
    per_epoch = plan.steps_per_epoch
    epochs = [tuple(all_indices(plan, range(e * per_epoch, (e + 1) * per_epoch))) for e in range(4)]
    other_seed = StepPlan(NUM_SAMPLES, 18, seed=5, **order)
    other_split = StepPlan(NUM_SAMPLES, 18, seed=4, name="val", **order)
    epochs += [tuple(all_indices(p, range(per_epoch))) for p in (other_seed, other_split)]
    assert len(set(epochs)) == 6


def test_without_shuffling_every_epoch_is_in_file_order():
    plan = StepPlan(NUM_SAMPLES, 18, shuffle=False)
    assert np.array_equal(all_indices(plan, range(6)), np.arange(NUM_SAMPLES))
    assert np.array_equal(all_indices(plan, range(6, 12)), np.arange(NUM_SAMPLES))


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_start_in_the_middle_of_an_epoch_equals_the_continuing_plan(order):
    continuing = StepPlan(NUM_SAMPLES, 18, seed=1, **order)
    all_steps = [continuing.global_indices(step) for step in range(20)]
    fresh = pickle.loads(pickle.dumps(continuing))  # as another process would see it
    for step in (15, 8, 19, 0):
        assert np.array_equal(fresh.global_indices(step), all_steps[step])


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_drop_last_leaves_out_the_partial_batch_of_every_epoch(order):
    plan = StepPlan(NUM_SAMPLES, 18, drop_last=True, **order)
    assert plan.steps_per_epoch == 5
    for epoch in range(3):
        seen = all_indices(plan, range(5 * epoch, 5 * epoch + 5))
        assert len(seen) == len(set(seen)) == 90
    assert {plan.num_rows(step) for step in range(30)} == {18}


def test_drop_last_changes_nothing_where_the_batch_divides_the_samples():
    kept, dropped = (StepPlan(36, 18, drop_last=drop) for drop in (False, True))
    assert kept.steps_per_epoch == dropped.steps_per_epoch == 2
    assert np.array_equal(all_indices(kept, range(6)), all_indices(dropped, range(6)))


@pytest.mark.combination
@settings(max_examples=60)
@given(groups=group_lists, window_rows=st.integers(1, 100), epoch=st.integers(0, 3))
def test_windows_hold_whole_row_groups_that_follow_one_another(groups, window_rows, epoch):
    """Reading a window touches each of its groups once, and a window exceeds its size only for one large group."""
    plan = StepPlan(sum(groups), 1, window_rows=window_rows, group_sizes=tuple(groups))
    group_of_row = np.repeat(np.arange(len(groups)), groups)
    visited = group_of_row[all_indices(plan, range(epoch * sum(groups), (epoch + 1) * sum(groups)))]
    span = {int(g): (np.flatnonzero(visited == g)[0], np.flatnonzero(visited == g)[-1]) for g in set(visited.tolist())}
    for group, (first, last) in span.items():
        assert last - first < max(window_rows, groups[group])


def test_rows_are_shuffled_inside_a_window_and_groups_among_each_other():
    plan = StepPlan(40, 40, group_sizes=(10, 10, 10, 10), window_rows=20)
    order = plan.global_indices(0)
    assert set(order[:20] // 10) & set(order[20:] // 10) == set()
    assert not np.array_equal(order[:20], np.sort(order[:20]))
    one_window = StepPlan(40, 40, group_sizes=(10, 10, 10, 10), window_rows=40).global_indices(0)
    assert len(set(one_window[:10] // 10)) > 1


@pytest.mark.parametrize(
    ("facts", "promise"),
    [
        ({}, "global permutation"),
        ({"shuffle": False}, "file order"),
        ({"group_sizes": (4, 6), "window_rows": 7}, "windows of about 7"),
        ({"is_streamed": True}, "weak"),
    ],
)
def test_the_promise_says_which_order_it_is(facts, promise):
    assert promise in StepPlan(10, 2, **facts).promise


@pytest.mark.parametrize(
    ("plans", "digest"),
    [
        ([StepPlan(n, max(1, n // 3), seed=n) for n in (*range(1, 60), 99, 100, 101, 1000, 4097)], "5489ac05c60db01e"),
        ([StepPlan(n, 7, seed=3, group_sizes=(5,) * (n // 5), window_rows=w) for n in (20, 45, 100) for w in (1, 12, 1000)], "b621e8d9bc401cca"),
    ],
    ids=["rows", "groups"],
)  # fmt: skip
def test_the_order_is_that_of_the_checkpoints_that_were_written_before(plans, digest):
    # a run that goes on from one takes the samples that are left, in the order in which it began
    found = hashlib.sha256()
    for plan in plans:
        for step in range(2 * plan.steps_per_epoch):
            found.update(plan.global_indices(step).astype("<i8").tobytes())
    assert found.hexdigest()[:16] == digest
    assert StepPlan(10, 4, seed=0).global_indices(0).tolist() == [0, 7, 2, 4]
