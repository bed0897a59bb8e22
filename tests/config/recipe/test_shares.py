"""Shares of a global batch by speed: whole samples, a fixed sum, and the earliest end that there can be."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scaleray.config import load_config
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.shares import (
    described,
    equal_shares,
    is_worth_it,
    share_of,
    shares_by_speed,
    smoothed,
    step_time,
)
from scaleray.config.recipe.values import DataSize
from scaleray.errors import UsageError

speed_lists = st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=8)
fractions = st.floats(0.01, 1)


def compositions(total, parts, least):
    """Every way to cut `total` into `parts` of at least `least`."""
    cuts = itertools.combinations_with_replacement(range(total - parts * least + 1), parts - 1)
    for cut in cuts:
        edges = [0, *cut, total - parts * least]
        yield tuple(b - a + least for a, b in itertools.pairwise(edges))


# the arithmetic


@given(speeds=speed_lists, extra=st.integers(0, 5000), smallest=fractions)
def test_shares_are_whole_add_up_and_leave_nobody_with_less_than_the_smallest(speeds, extra, smallest):
    total = len(speeds) + extra
    shares = shares_by_speed(speeds, total=total, smallest=smallest)
    assert sum(shares) == total and all(isinstance(share, int) for share in shares)
    assert min(shares) >= max(1, int(smallest * total / len(speeds)))


@given(speeds=st.lists(st.floats(0.1, 10), min_size=1, max_size=4), extra=st.integers(0, 12), smallest=fractions)
def test_no_other_whole_shares_end_a_step_earlier(speeds, extra, smallest):
    total = len(speeds) + extra
    least = max(1, int(smallest * total / len(speeds)))
    best = min(step_time(shares, speeds) for shares in compositions(total, len(speeds), least))
    assert step_time(shares_by_speed(speeds, total=total, smallest=smallest), speeds) == pytest.approx(best, rel=1e-9)


@given(workers=st.integers(1, 20), extra=st.integers(0, 1000), smallest=fractions, speed=st.floats(0.1, 100))
def test_equal_speeds_have_equal_shares(workers, extra, smallest, speed):
    shares = shares_by_speed([speed] * workers, total=workers + extra, smallest=smallest)
    assert shares == equal_shares(workers, total=workers + extra)


@given(speeds=speed_lists, extra=st.integers(0, 5000), smallest=fractions, power=st.integers(-8, 8))
def test_only_the_ratio_of_speeds_counts_and_the_faster_never_has_less(speeds, extra, smallest, power):
    total = len(speeds) + extra
    shares = shares_by_speed(speeds, total=total, smallest=smallest)
    assert shares == shares_by_speed([s * 2.0**power for s in speeds], total=total, smallest=smallest)
    for (a, fast), (b, slow) in itertools.permutations(zip(shares, speeds, strict=True), 2):
        assert a >= b or fast <= slow * (1 + 1e-9)


@given(speeds=speed_lists, smallest=fractions)
def test_without_a_bound_large_batches_come_as_close_to_the_ideal_as_rounding_lets_them(speeds, smallest):
    total = 10**7
    ideal = total / sum(speeds)
    assume(min(speeds) * ideal > total / len(speeds) * smallest + 1)
    assert step_time(shares_by_speed(speeds, total=total, smallest=smallest), speeds) <= ideal * (
        1 + len(speeds) / (min(speeds) * ideal)
    )


def test_a_worker_slowed_by_two_has_half_the_share_of_the_others():
    assert shares_by_speed([2, 1], total=48, smallest=0.25) == (32, 16)
    assert shares_by_speed([2, 2, 2, 1], total=56, smallest=0.25) == (16, 16, 16, 8)
    assert shares_by_speed([100, 1], total=48, smallest=0.25) == (42, 6)  # a quarter of an equal share
    assert shares_by_speed([100, 1], total=48, smallest=1.0) == (24, 24)


@given(extra=st.lists(st.integers(0, 30), min_size=1, max_size=8), num_rows=st.integers(0, 300))
def test_parts_of_a_batch_are_the_batch_in_order_whatever_its_size(extra, num_rows):
    shares = [1 + more for more in extra]
    rows = list(range(num_rows))
    parts = [rows[share_of(shares, rank, num_rows=num_rows)] for rank in range(len(shares))]
    assert [row for part in parts for row in part] == rows
    if num_rows == sum(shares):
        assert [len(part) for part in parts] == shares


# when they change


def test_a_change_must_be_worth_what_it_costs():
    assert is_worth_it((32, 16), (24, 24), [2.0, 1.0])
    assert is_worth_it((24, 24), (25, 23), [1.0, 1.0])  # 4 %
    assert not is_worth_it((25, 23), (24, 24), [1.03, 0.97])  # 2 %
    assert not is_worth_it((500, 500), (510, 490), [1.0, 1.0])


def test_a_single_measurement_moves_a_speed_by_half():
    assert smoothed([4.0, 2.0], None) == (4.0, 2.0)
    assert smoothed([2.0, 2.0], [4.0, 2.0]) == (3.0, 2.0)


def test_a_worker_without_a_measurement_keeps_its_speed_or_counts_as_one_of_the_others():
    assert smoothed([4.0, 0.0, 2.0], None) == (4.0, 3.0, 2.0)
    assert smoothed([4.0, 0.0], [4.0, 1.0]) == (4.0, 1.0)
    assert smoothed([0.0, 0.0], None) is None
    assert smoothed([0.0, 0.0], [3.0, 1.0]) == (3.0, 1.0)


def test_the_event_says_shares_and_ratio():
    assert described((40, 24), (160.0, 100.0)) == "shares of 64 samples: 40 + 24, speeds 1.6 : 1"
    assert described((40, 24), None) == "shares of 64 samples: 40 + 24"
    many = described([1] * 99 + [3], [1.0] * 99 + [2.5])
    assert many == "shares of 102 samples: 1 to 3 on 100 workers, the fastest 2.5 times as fast as the slowest"


# what the recipe derives and refuses


def recipe(**flags):
    required = {
        "workload.name": "m:W",
        "batch.global_size": 48,
        "optimizer.learning_rate": 0.1,
        "stop.after": "3 epochs",
        "scale.workers": 2,
        "shares.by": "speed",
    }
    keys = {key.replace("__", "."): value for key, value in flags.items()}
    return derive(load_config(flags={**required, **keys}, environ={}), DataSize(1024))


def test_measured_shares_begin_equal_and_given_ones_hold_from_the_start():
    measured = recipe(shares__measure_every=7)
    assert (measured.worker_shares, measured.measure_shares_every_steps) == (None, 7)
    fixed = recipe(shares__by="given", shares__speeds=[2, 1])
    assert (fixed.worker_shares, fixed.measure_shares_every_steps) == ((32, 16), None)
    alone = recipe(scale__workers=1)
    assert (alone.worker_shares, alone.measure_shares_every_steps) == (None, None)
    for found in (measured, fixed, alone, recipe(shares__by="equal")):
        assert found.explanations["worker_shares"] and found.explanations["measure_shares_every_steps"]
    assert fixed.micro_batch_size == 24  # a larger share is more micro-batches, no larger ones


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"strategy__name": "fsdp"}, "every micro-batch gathers parameters"),
        ({"strategy__name": "pipeline"}, "one number of micro-batches"),
        ({"strategy__name": "tensor", "scale__workers": 4}, "the same samples together"),
        ({"strategy__name": "local_sgd"}, "have equal weight in the average"),
        ({"strategy__name": "gossip"}, "have equal weight in the average"),
        ({"strategy__static_graph": True}, "cannot accumulate"),
        ({"scale__workers": {"min": 1, "max": 2}}, "a fixed number of workers"),
        ({"shares__by": "given", "shares__speeds": [1, 2, 3]}, "there are 2 workers"),
        ({"shares__by": "given"}, "give both or neither"),
        ({"shares__speeds": [1, 2]}, "give both or neither"),
        ({"shares__by": "given", "shares__speeds": [1, 0]}, "shares.speeds"),
        ({"shares__smallest": 0}, "shares.smallest"),
    ],
)
def test_shares_that_cannot_work_are_refused_with_the_reason(flags, says):
    with pytest.raises(UsageError, match=says):
        recipe(**flags)
