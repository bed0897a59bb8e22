"""Tests of two means against scipy's own, and their error rates by simulation."""

import numpy as np
import pytest
from scipy import stats

from scaleray.gates.noisy_means import (
    ALPHA,
    MOST_RUNS,
    Margin,
    Runs,
    equal,
    not_worse,
    power,
    power_of_both,
    runs_needed,
)


def samples(mean: float, number: int, seed: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(mean, scale, number)


def test_an_absolute_margin_is_welchs_test_of_the_shifted_baseline():
    candidate, baseline = samples(10.2, 7, 1), samples(10.0, 5, 2, 2.0)
    found = not_worse(Runs.of(candidate), Runs.of(baseline), Margin(1.5, is_relative=False), better="lower")
    theirs = stats.ttest_ind(candidate, baseline + 1.5, equal_var=False, alternative="less")
    assert found is not None and found.p_value == pytest.approx(theirs.pvalue, rel=1e-9)
    interval = stats.ttest_ind(candidate, baseline, equal_var=False).confidence_interval(1 - 2 * ALPHA)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_a_relative_margin_is_welchs_test_of_the_scaled_baseline_so_that_its_noise_counts_too():
    candidate, baseline = samples(102, 6, 3, 4.0), samples(100, 6, 4, 3.0)
    found = not_worse(Runs.of(candidate), Runs.of(baseline), Margin(0.05, is_relative=True), better="lower")
    theirs = stats.ttest_ind(candidate, 1.05 * baseline, equal_var=False, alternative="less")
    assert found is not None and found.p_value == pytest.approx(theirs.pvalue, rel=1e-9)


def test_where_more_is_better_the_margin_lies_below_the_baseline():
    candidate, baseline = samples(0.97, 6, 5, 0.004), samples(0.98, 6, 6, 0.004)
    found = not_worse(Runs.of(candidate), Runs.of(baseline), Margin(0.03, is_relative=False), better="higher")
    theirs = stats.ttest_ind(candidate, baseline - 0.03, equal_var=False, alternative="greater")
    assert found is not None and found.p_value == pytest.approx(theirs.pvalue, rel=1e-9) and found.answer == "pass"


def test_what_is_shown_to_be_beyond_the_margin_fails_and_what_is_not_shown_is_inconclusive():
    margin = Margin(1.0, is_relative=False)
    far, near = Runs(13.0, 1.0, 6), Runs(10.6, 1.0, 6)
    base = Runs(10.0, 1.0, 6)
    answers = [not_worse(one, base, margin, better="lower") for one in (far, near, Runs(8.0, 1.0, 6))]
    assert [one.answer for one in answers if one] == ["fail", "inconclusive", "pass"]


def test_equality_refuses_what_is_better_by_the_margin():
    margin, base = Margin(1.0, is_relative=False), Runs(10.0, 0.1, 6)
    better = equal(Runs(8.0, 0.1, 6), base, margin, better="lower")
    same = equal(Runs(10.0, 0.1, 6), base, margin, better="lower")
    assert better is not None and better.answer == "fail"
    assert same is not None and same.answer == "pass"


@pytest.mark.parametrize("number", [0, 1])
def test_fewer_than_two_runs_say_nothing(number):
    few = Runs(10.0, float("nan"), number)
    assert not_worse(few, Runs(10.0, 1.0, 5), Margin(1.0, is_relative=False), better="lower") is None


def test_runs_that_fall_into_one_step_of_the_evaluations_differ_by_its_rounding():
    runs = Runs.of([1000.0] * 5, resolution=100.0)
    assert runs.stdev == pytest.approx(100 / 12**0.5)
    assert Runs.of([1000.0] * 5).stdev == 0
    exact = not_worse(Runs(10, 0, 5), Runs(10, 0, 5), Margin(0.1, is_relative=False), better="lower")
    assert exact is not None and exact.answer == "pass"


def test_the_power_and_the_needed_runs_are_those_of_a_simulation():
    base, margin = Runs(100.0, 5.0, 6), Margin(0.08, is_relative=True)
    random = np.random.default_rng(0)

    def told(number: int) -> float:
        return power(base.repeated(number), base.repeated(number), margin, better="lower")

    def simulated(number: int) -> float:
        draws = random.normal(100.0, 5.0, (20_000, 2, number))
        found = stats.ttest_ind(draws[:, 0], 1.08 * draws[:, 1], axis=1, equal_var=False, alternative="less")
        return float(np.mean(found.pvalue <= ALPHA))

    needed = runs_needed(lambda number: told(number) >= 0.9)
    assert needed is not None and told(needed - 1) < 0.9 <= told(needed)
    for number in (4, 6, needed):  # of few runs a little too high: Welch's degrees of freedom are estimated as well
        assert simulated(number) == pytest.approx(told(number), abs=0.04)


def test_the_power_of_two_tests_is_below_that_of_one():
    base, margin = Runs(10.0, 1.0, 8), Margin(1.5, is_relative=False)
    one, both = (test(base, base, margin, better="lower") for test in (power, power_of_both))
    assert both == pytest.approx(2 * one - 1)


def test_what_no_number_of_runs_can_show_needs_none():
    assert runs_needed(lambda number: number > MOST_RUNS) is None
    assert runs_needed(lambda number: number >= 7) == 7


@pytest.mark.parametrize(("few", "many"), [(2, 10), (3, 30)])
def test_few_runs_beside_many_pass_at_the_margin_no_more_often_than_alpha_says(few, many):
    random, trials = np.random.default_rng(few * many), 3000
    sides = [random.normal(mean, 1.0, (trials, number)) for mean, number in ((11.0, few), (10.0, many))]
    means, stdevs = [side.mean(axis=1) for side in sides], [side.std(axis=1, ddof=1) for side in sides]
    margin, passed = Margin(1.0, is_relative=False), 0
    for one in range(trials):
        runs = [Runs(float(means[k][one]), float(stdevs[k][one]), (few, many)[k]) for k in range(2)]
        found = not_worse(runs[0], runs[1], margin, better="lower")
        passed += found is not None and found.answer == "pass"
    assert passed <= trials * ALPHA  # by Welch's degrees of freedom alone 7.4 and 6.1 % of them


@pytest.mark.parametrize(("number", "scales"), [(5, (1.0, 1.0)), (5, (1.0, 3.0)), (12, (2.0, 0.5))])
def test_a_candidate_at_the_margin_passes_at_most_as_often_as_alpha_says(number, scales):
    random, margin, trials = np.random.default_rng(number), Margin(1.0, is_relative=False), 2000
    passed = failed = 0
    for _ in range(trials):
        found = not_worse(
            Runs.of(random.normal(11.0, scales[0], number)), Runs.of(random.normal(10.0, scales[1], number)), margin,
            better="lower",
        )  # fmt: skip
        assert found is not None
        passed, failed = passed + (found.answer == "pass"), failed + (found.answer == "fail")
    assert passed <= trials * ALPHA + 3 * (trials * ALPHA * (1 - ALPHA)) ** 0.5
    assert failed <= trials * ALPHA + 3 * (trials * ALPHA * (1 - ALPHA)) ** 0.5
