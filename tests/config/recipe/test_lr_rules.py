"""Learning-rate rules against the numbers of their papers, and the laws that hold for every rule."""

import math
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scaleray.config.recipe.lr_rules import (
    RULES,
    Hyperparameters,
    adam_rule,
    legw_rule,
    linear_rule,
    none_rule,
    sqrt_rule,
)
from scaleray.errors import ConfigError

kappas = st.floats(0.01, 1000)
references = st.builds(
    Hyperparameters, st.floats(1e-6, 10), st.tuples(st.floats(0, 0.9999), st.floats(0, 0.9999)), st.floats(1e-12, 1e-3)
)


# numbers that were published


def test_linear_gives_goyals_rates():
    """lr = 0.1 * B / 256 (Goyal et al. 2017, arXiv:1706.02677, table 1)."""
    for batch, rate in ((256, 0.1), (512, 0.2), (1024, 0.4), (8192, 3.2), (16384, 6.4), (65536, 25.6)):
        assert linear_rule(Hyperparameters(0.1), batch / 256).learning_rate == pytest.approx(rate)


def test_sqrt_gives_goyals_rate_for_comparison():
    """The square-root rule at 8192 in the same paper, section 5.2: 0.566."""
    assert sqrt_rule(Hyperparameters(0.1), 8192 / 256).learning_rate == pytest.approx(0.566, abs=5e-4)


def test_sqrt_gives_lambs_rates_for_bert():
    """lr = 5 / (2^(3 - i/2) * 1000) at B = 512 * 2^i (You et al. 2019, arXiv:1904.00962): 0.000625 to 0.005 at 32k."""
    for i in range(7):
        expected = 5 / (2 ** (3 - i / 2) * 1000)
        assert sqrt_rule(Hyperparameters(0.000625), 2**i).learning_rate == pytest.approx(expected)


def test_adams_full_rule_at_kappa_4():
    """lr x 2, betas (0.9, 0.999) to (0.6, 0.996), epsilon 1e-8 to 5e-9 (Malladi et al. 2022, arXiv:2205.10287)."""
    scaled = adam_rule(Hyperparameters(1e-3, (0.9, 0.999), 1e-8), 4)
    assert scaled.learning_rate == pytest.approx(2e-3)
    assert scaled.betas == pytest.approx((0.6, 0.996))
    assert scaled.epsilon == pytest.approx(5e-9)


def test_legw_warms_up_over_as_many_epochs_as_the_batch_grew():
    """Square root and a warm-up kappa times as many epochs long (You et al. 2019, arXiv:1901.08256)."""
    scaled = legw_rule(Hyperparameters(0.1), 16)
    assert (scaled.learning_rate, scaled.warmup_factor) == (pytest.approx(0.4), 16)


# laws


@given(reference=references)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_at_the_reference_batch_no_rule_changes_anything(rule, reference):
    assert rule(reference, 1.0) == reference


@given(reference=references, kappa=kappas)
def test_none_changes_nothing_at_any_batch(reference, kappa):
    assert none_rule(reference, kappa) == reference


@given(reference=references, first=kappas, second=kappas)
@pytest.mark.parametrize("name", ["linear", "sqrt", "legw"])
def test_scaling_twice_is_scaling_once_by_the_product(name, reference, first, second):
    rule = RULES[name]
    twice, once = rule(rule(reference, first), second), rule(reference, first * second)
    assert twice.learning_rate == pytest.approx(once.learning_rate)


@given(kappa=st.floats(1.001, 1000))
@pytest.mark.parametrize("name", ["linear", "sqrt", "legw"])
def test_a_larger_batch_never_lowers_the_rate_and_never_by_more_than_linear_raises_it(name, kappa):
    rate = RULES[name](Hyperparameters(0.1), kappa).learning_rate
    assert 0.1 < rate <= 0.1 * kappa * (1 + 1e-12)


@given(beta_1=st.floats(0, 0.999), beta_2=st.floats(0, 0.9999), kappa=kappas)
def test_adams_rule_either_gives_betas_from_0_to_1_or_refuses(beta_1, beta_2, kappa):
    reference = Hyperparameters(1e-3, (beta_1, beta_2))
    limit = 1 / (1 - min(beta_1, beta_2))
    assume(kappa != 1)
    if kappa >= limit * (1 - 1e-9):
        with pytest.raises(ConfigError, match=re.escape(f"{limit:.4g} x the reference")):
            adam_rule(reference, kappa)
    else:
        scaled = adam_rule(reference, kappa)
        assert all(0 < beta < 1 for beta in scaled.betas)
        assert scaled.learning_rate == pytest.approx(1e-3 * math.sqrt(kappa))


@pytest.mark.parametrize("kappa", [10, 10.5, 100])
def test_adams_rule_with_the_usual_betas_ends_below_10(kappa):
    assert adam_rule(Hyperparameters(1e-3), 9.99).betas[0] > 0
    with pytest.raises(ConfigError, match="below 10 x the reference"):
        adam_rule(Hyperparameters(1e-3), kappa)
