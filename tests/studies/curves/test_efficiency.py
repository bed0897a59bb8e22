"""Step times, speed-ups and efficiency with their intervals."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_curves import planted, point, turns_around

from scaleray.errors import UsageError
from scaleray.studies.curves import efficiency
from scaleray.studies.curves.efficiency import curve_points, median_step_time, ratio, resampled, throughput, widening


def test_the_estimate_is_the_median_of_all_steps_within_its_interval():
    turns = turns_around(0.1, seed=1)
    found = median_step_time(turns)
    assert found.value == pytest.approx(statistics.median(t for turn in turns for t in turn))
    assert found.low < found.value < found.high


def test_equal_inputs_give_equal_intervals():
    assert median_step_time(turns_around(0.1, seed=1)) == median_step_time(turns_around(0.1, seed=1))


def test_one_slow_step_in_each_turn_changes_nothing_much():
    turns = turns_around(0.1, seed=2)
    slow = [[*turn[:-1], 10.0] for turn in turns]
    assert median_step_time(slow).value == pytest.approx(median_step_time(turns).value, rel=0.02)


@given(factor=st.floats(1e-3, 1e3), batch=st.integers(1, 4096))
@settings(max_examples=15, deadline=None)
def test_throughput_is_samples_over_the_step_time_in_any_unit(factor: float, batch: int):
    turns = [[factor * t for t in turn] for turn in turns_around(0.1, seed=3)]
    rate, time = throughput(turns, samples_per_step=batch), median_step_time(turns)
    assert rate.value == pytest.approx(batch / time.value)
    assert (rate.low, rate.high) == pytest.approx((batch / time.high, batch / time.low))


def test_turns_that_differ_widen_the_interval_although_their_steps_agree():
    alike = turns_around(0.1, seed=4, between=0.0, within=0.01)
    apart = turns_around(0.1, seed=4, between=0.05, within=0.01)
    width = [math.log(median_step_time(turns).high / median_step_time(turns).low) for turns in (alike, apart)]
    assert width[1] > 5 * width[0]


def test_few_turns_widen_the_interval_as_students_t_does():
    assert widening([resampled(turns_around(0.1, seed=5, num_turns=2))]) == pytest.approx(12.706 / 1.960, rel=1e-3)
    assert widening([resampled(turns_around(0.1, seed=5, num_turns=5))]) == pytest.approx(2.776 / 1.960, rel=1e-3)
    alike = resampled(turns_around(0.1, seed=5)), resampled(turns_around(0.1, seed=5), number=1)
    assert widening(alike) == pytest.approx(2.306 / 1.960, rel=0.01)  # Welch: 8 degrees of freedom for equal variances


@pytest.mark.parametrize(("num_turns", "steps"), [(5, 20), (3, 20), (1, 80)])
def test_intervals_hold_the_truth_about_as_often_as_they_say(
    num_turns: int, steps: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(efficiency, "NUM_DRAWS", 300)
    between = 0.02 if num_turns > 1 else 0.0  # what one turn has no sign of, no interval can hold
    held = {"median": 0, "ratio": 0}
    for seed in range(100):
        of = {"num_turns": num_turns, "steps": steps, "between": between}
        turns, base = turns_around(0.104, seed=2 * seed, **of), turns_around(0.1, seed=2 * seed + 1, **of)
        held["median"] += median_step_time(turns).low <= 0.104 <= median_step_time(turns).high
        held["ratio"] += ratio(turns, base).low <= 1.04 <= ratio(turns, base).high
    # 95 %, and 3 standard errors of 100 trials below
    assert min(held.values()) >= 88, held


def test_an_interval_says_something_too():
    found = ratio(turns_around(0.12, seed=6), turns_around(0.1, seed=7))
    assert found.low > 1.1
    assert found.high < 1.3


def test_steps_of_a_single_turn_that_resemble_their_neighbours_are_not_taken_for_independent():
    swing = [0.1 * (1 + 0.1 * math.sin(step / 6)) for step in range(60)]  # slow waves, few of them
    shuffled = sorted(swing, key=lambda t: math.sin(1e6 * t))
    slow, independent = median_step_time([swing]), median_step_time([shuffled])
    assert math.log(slow.high / slow.low) > 1.5 * math.log(independent.high / independent.low)


def test_the_base_has_the_efficiency_one_and_its_own_number_as_speedup():
    first, second = curve_points(planted(lambda n: n, [4, 8]))
    assert (first.speedup.value, first.efficiency.low, first.efficiency.high) == (4.0, 1.0, 1.0)
    assert second.speedup.value == pytest.approx(8 * second.efficiency.value)


def test_efficiency_is_that_of_the_definition_in_both_modes():
    times = {2: [[0.2] * 8], 8: [[0.08] * 8]}
    strong = curve_points([point(n, turns) for n, turns in times.items()])[1]
    assert strong.efficiency.value == pytest.approx(2 * 0.2 / (8 * 0.08))
    weak = curve_points([point(n, turns, mode="weak", batch=16 * n) for n, turns in times.items()])[1]
    assert weak.efficiency.value == pytest.approx(0.2 / 0.08)


def test_turns_of_unlike_length_and_thousands_of_steps_are_taken():
    turns = [[0.1] * 3, [0.2] * 5000, [0.3]]
    assert median_step_time(turns).value == 0.2


@pytest.mark.parametrize("turns", [[], [[]], [[0.1, 0.0]], [[0.1, -1.0]], [[math.nan]], [[math.inf]]])
def test_times_that_are_none_are_refused(turns: list[list[float]]):
    with pytest.raises(UsageError, match="step times of a point"):
        median_step_time(turns)
