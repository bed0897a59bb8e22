"""Slower, faster, not to be told from noise, or inconclusive: launches are what is counted, not their steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from scaleray.errors import UsageError
from scaleray.records.study_record import Estimate
from scaleray.studies.curves.regression import LEAST_LAUNCHES, Change, change_of_launches, change_of_trials


def launches(
    step_time_s: float, number: int, *, seed: int, between: float = 0.01, within: float = 0.03, steps: int = 40
) -> list[list[list[float]]]:
    """Log-normal step times, a turn for each launch; between and within are standard deviations of launches and of steps."""
    draw = np.random.default_rng(seed)
    means = step_time_s * np.exp(between * draw.normal(size=number))
    return [[[float(t) for t in mean * np.exp(within * draw.normal(size=steps))]] for mean in means]


def pairs(times: Sequence[float], *, factor: float = 1.0, draw: np.random.Generator) -> dict[int, float]:
    """What a sweep measured, by setting."""
    return {n: factor * time * math.exp(0.005 * draw.normal()) for n, time in enumerate(times)}


def test_a_planted_slowdown_is_found_with_its_size():
    change = change_of_launches(launches(0.11, 5, seed=1), launches(0.1, 5, seed=2))
    assert change.verdict == "slower"
    assert change.time_ratio.low < 1.1 < change.time_ratio.high


def test_the_other_way_round_it_is_faster():
    change = change_of_launches(launches(0.1, 5, seed=2), launches(0.11, 5, seed=1))
    assert change.verdict == "faster"
    assert str(change).startswith("faster by ")


def test_two_single_launches_are_never_called_slower_however_far_apart():
    slow, fast = launches(0.21, 1, seed=1), launches(0.1, 1, seed=2)
    for change in (change_of_launches(slow, fast), change_of_launches(fast, slow)):
        assert (change.verdict, change.basis) == ("inconclusive", "steps")
        assert str(change).startswith("inconclusive: ") and "beyond noise" not in str(change)
    assert "at least 2 launches of each would decide" in str(change)


def test_launches_of_one_side_tell_their_spread_and_how_many_more_it_takes():
    change = change_of_launches(launches(0.13, 1, seed=1), launches(0.1, 30, seed=2, between=0.03, steps=8))
    assert (change.verdict, change.basis) == ("inconclusive", "one side's launches")
    assert change.spread == pytest.approx(0.03, rel=0.4)  # 3 standard errors of 30 draws
    assert f"about {change.repeats} launches of each would decide" in str(change)
    near = change_of_launches(launches(0.102, 1, seed=1), launches(0.1, 6, seed=2, between=0.03))
    assert near.verdict == "no difference"


def test_three_launches_of_the_same_show_the_spread_that_two_do_not():
    same = launches(0.1, 3, seed=5, between=0.3)
    assert change_of_launches(same[:1], same[1:2]).verdict == "inconclusive"
    change = change_of_launches(same[:1], same[1:2], alike=same)
    assert (change.verdict, change.basis) == ("no difference", "launches")


@pytest.mark.combination
def test_the_spread_between_launches_causes_no_more_false_alarms_than_nominal():
    # 5 %, and 3 standard errors of as many comparisons; of steps, which are resampled, few, and of sweeps, many
    found = [
        change_of_launches(*(launches(0.1, size, seed=100 * n + size, between=0.3, steps=8) for size in (2, 3))).verdict
        for n in range(100)
    ]
    assert 100 - found.count("no difference") <= 5 + 3 * math.sqrt(100 * 0.05 * 0.95)
    for sizes, spreads in (((2, 2), (0.3, 0.3)), ((2, 8), (0.3, 0.3)), ((2, 8), (0.8, 0.1)), ((4, 3), (0.3, 0.03))):
        draw = np.random.default_rng(0)
        found = []
        for _ in range(1000):
            sides = [
                [pairs([math.exp(spread * draw.normal())] * 3, draw=draw) for _ in range(size)]
                for size, spread in zip(sizes, spreads, strict=True)
            ]
            change = change_of_trials(*sides)
            assert change is not None
            found.append(change.verdict)
        alarms = 1000 - found.count("no difference")
        assert alarms <= 50 + 3 * math.sqrt(1000 * 0.05 * 0.95), (sizes, spreads)


def test_the_advised_number_of_launches_tells_the_difference_with_the_promised_probability():
    change = change_of_launches(launches(0.12, 3, seed=1, between=0.1), launches(0.1, 3, seed=2, between=0.1))
    number = Change(change.time_ratio, "launches", 0.1).repeats
    assert number is not None
    size = change.time_ratio.value
    found = [
        change_of_launches(
            launches(0.1 * size, number, seed=3000 + 2 * n, between=0.1, within=0.001, steps=8),
            launches(0.1, number, seed=3001 + 2 * n, between=0.1, within=0.001, steps=8),
        ).verdict
        for n in range(60)
    ]
    assert found.count("slower") >= 48 - 3 * math.sqrt(60 * 0.8 * 0.2)  # 80 %, and 3 standard errors below


def test_launches_that_lie_together_by_chance_are_not_known_better_than_their_steps():
    twice = launches(0.1, 1, seed=1) * LEAST_LAUNCHES
    change = change_of_launches(twice, launches(0.1, 1, seed=2) * LEAST_LAUNCHES)
    assert change.spread is not None and change.spread > 0.001
    assert change.verdict == "no difference"


def test_a_difference_that_would_take_too_many_launches_is_said_to():
    assert Change(Estimate(1.001, 1.0005, 1.0015), "steps", 0.2).repeats is None
    assert "more than 100 launches of each would decide" in str(Change(Estimate(1.001, 1.0005, 1.0015), "steps", 0.2))


def test_the_words():
    assert str(Change(Estimate(1.041, 1.029, 1.052))) == "slower by 4.1 % (2.9 to 5.2), beyond noise"
    assert str(Change(Estimate(0.959, 0.948, 0.971))) == "faster by 4.1 % (2.9 to 5.2), beyond noise"
    assert str(Change(Estimate(8.0, 7.0, 9.5))) == "takes 8 times as long (7 to 9.5), beyond noise"
    words = "no difference beyond noise (-1.2 to +2.3 %)"
    assert str(Change(Estimate(1.005, 0.988, 1.023))) == words
    assert str(Change(Estimate(2.1, 1.58, 3.19), "steps", 0.1)) == (
        "inconclusive: takes 2.1 times as long (1.58 to 3.19 from the noise of steps alone), but the spread "
        "between launches is unknown; at least 3 launches of each would decide"
    )


TIMES = [0.01, 0.1, 1.0, 10.0, 100.0]


def test_pairs_under_the_same_settings_cancel_what_the_settings_do():
    draw = np.random.default_rng(0)
    mine, base = ([pairs(TIMES, factor=factor, draw=draw) for _ in range(3)] for factor in (1.05, 1.0))
    change = change_of_trials(mine, base)
    assert change is not None
    assert change.verdict == "slower"
    assert change.time_ratio.value == pytest.approx(1.05, abs=0.01)


def test_one_sweep_beside_another_is_one_launch_beside_another():
    draw = np.random.default_rng(0)
    slow, fast = pairs(TIMES, factor=1.05, draw=draw), pairs(TIMES, draw=draw)
    change = change_of_trials([slow], [fast])
    assert change is not None
    assert (change.verdict, change.basis) == ("inconclusive", "steps")
    same = change_of_trials([fast], [fast])
    assert same is not None and same.verdict == "no difference"
    few = {n: fast[n] for n in range(2)}
    assert change_of_trials([few], [few]) is None


@pytest.mark.parametrize("times", [[0.0, 0.1], [-0.1], [math.nan], []])
def test_times_that_are_none_are_refused_on_either_side(times):
    for sides in ((([times],), ([[0.1, 0.1]],)), (([[0.1, 0.1]],), ([times],))):
        with pytest.raises(UsageError, match="positive seconds"):
            change_of_launches(*sides)
