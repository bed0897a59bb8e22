"""The learning rate of every step: warm-up, shapes and ends."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaleray.config.recipe.lr_rules import learning_rate_factor

shapes = st.sampled_from(["constant", "cosine", "linear"])


def factors(name, *, warmup_steps, schedule_steps, final_ratio, steps):
    return [
        learning_rate_factor(
            s, name=name, warmup_steps=warmup_steps, schedule_steps=schedule_steps, final_ratio=final_ratio
        )
        for s in range(steps)
    ]


@given(
    name=shapes, warmup=st.integers(0, 50), decay=st.integers(1, 100), final=st.floats(0, 1), extra=st.integers(0, 20)
)
def test_a_schedule_rises_to_1_and_then_never_rises_again(name, warmup, decay, final, extra):
    found = factors(
        name, warmup_steps=warmup, schedule_steps=warmup + decay, final_ratio=final, steps=warmup + decay + extra
    )
    rise, fall = found[:warmup], found[warmup:]
    assert all(b > a for a, b in itertools.pairwise(rise))
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(fall))
    assert fall[0] == pytest.approx(1)
    assert all(min(final, 1) - 1e-12 <= f <= 1 + 1e-12 for f in fall)


@given(warmup=st.integers(1, 50))
def test_the_first_step_moves_and_the_last_of_the_warmup_has_the_full_rate(warmup):
    found = factors("cosine", warmup_steps=warmup, schedule_steps=100, final_ratio=0, steps=warmup)
    assert found[0] == pytest.approx(1 / warmup) and found[-1] == 1


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_the_decay_ends_at_its_ratio_one_step_after_the_last(name):
    found = factors(name, warmup_steps=10, schedule_steps=110, final_ratio=0.2, steps=115)
    assert found[109] > 0.2
    assert found[110:] == [pytest.approx(0.2)] * 5


def test_half_way_cosine_and_linear_are_half_way_down():
    for name in ("cosine", "linear"):
        assert factors(name, warmup_steps=0, schedule_steps=100, final_ratio=0, steps=51)[50] == pytest.approx(0.5)
    assert factors("cosine", warmup_steps=0, schedule_steps=100, final_ratio=0, steps=26)[25] == pytest.approx(
        0.5 * (1 + math.cos(math.pi / 4))
    )


def test_constant_stays_whatever_the_end():
    assert set(factors("constant", warmup_steps=0, schedule_steps=5, final_ratio=0.1, steps=20)) == {1.0}
