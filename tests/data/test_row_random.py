"""Random numbers by the row: the same for a row in any block, and spread as they should be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaleray.data import RowRandom, StepPlan

SEEDS = StepPlan(20_000, 64, seed=3).row_seeds(np.arange(20_000))


def draws(rng):
    return [
        rng.random((2, 3)), rng.uniform(-1, 2), rng.integers(7, shape=4), rng.integers(-3, 1), rng.normal(5),
        rng.permutation(6), np.array([g.random() for g in rng.generators()]), rng.random(),
    ]  # fmt: skip


@given(st.lists(st.integers(0, 199), min_size=1, max_size=40))
def test_a_row_draws_the_same_bits_in_any_block(index):
    whole, block = draws(RowRandom(SEEDS[:200])), draws(RowRandom(SEEDS[:200][index]))
    for all_rows, some in zip(whole, block, strict=True):
        assert all_rows[index].tobytes() == some.tobytes()


def test_calls_and_rows_draw_other_numbers():
    rng = RowRandom(SEEDS)
    drawn = np.concatenate([rng.random(3), rng.random(3)], axis=1)
    assert len(np.unique(drawn)) == drawn.size


def test_numbers_are_spread_as_their_names_say():
    rng = RowRandom(SEEDS)
    uniform, normal, whole = rng.uniform(2, 6), rng.normal(), rng.integers(3, 8)
    assert uniform.min() >= 2 and uniform.max() < 6
    assert uniform.mean() == pytest.approx(4, abs=0.04) and uniform.std() == pytest.approx(4 / 12**0.5, abs=0.03)
    assert normal.mean() == pytest.approx(0, abs=0.03) and normal.std() == pytest.approx(1, abs=0.03)
    assert (np.bincount(whole) / len(rng))[3:] == pytest.approx([0.2] * 5, abs=0.015) and whole.max() == 7
    assert (np.sort(rng.permutation(5)) == np.arange(5)).all()
    assert abs(np.corrcoef(rng.random(), rng.random())[0, 1]) < 0.03


def test_limits_may_differ_by_row_and_must_leave_something_to_draw():
    rng = RowRandom(SEEDS[:1000])
    limits = np.arange(1, 1001)
    drawn = rng.integers(limits)
    assert (drawn >= 0).all() and (drawn < limits).all()
    with pytest.raises(ValueError, match="upper limit must be above"):
        rng.integers(3, 3)
