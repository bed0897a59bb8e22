"""Goodput: AdaScale's gain, what samples of a larger batch are worth, step times, and the published figures."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scaleray.errors import ConfigError
from scaleray.scaling.goodput import (
    MeasuredStep,
    Noise,
    StepTime,
    adascale_gain,
    best_point,
    fit_step_time,
    fit_trade_off,
    goodput_points,
    is_trusted,
    noise_at,
    samples_to_target,
    statistical_efficiency,
    steps_to_target,
)
from scaleray.study_records import Estimate

positive = st.floats(1e-3, 1e4)
kappas = st.floats(1, 1e4)


def exactly(value):
    return Estimate(value, value, value)


# published figures


def test_the_gain_is_that_of_polluxs_cifar_trace():
    # ResNet-18 on CIFAR-10, B = 256 over a reference of 128, epoch 1: progress of 300 steps; 390.7 were recorded
    gain = adascale_gain(2, square=17.37946, trace=13.93776)
    assert gain == pytest.approx(1.2862, abs=5e-5)
    assert 300 * gain == pytest.approx(385.9, abs=0.05)


@pytest.mark.parametrize(("square", "trace", "noise_scale"), [(8.947308, 5.066593, 72), (1.8952, 1.592491, 108)])
def test_the_noise_scale_of_polluxs_cifar_trace_is_the_reference_batch_times_trace_over_square(
    square, trace, noise_scale
):
    phi = 128 * trace / square
    assert phi == pytest.approx(noise_scale, abs=0.5)
    gain = adascale_gain(2, square=square, trace=trace)
    assert gain / 2 == pytest.approx(statistical_efficiency(256, reference=128, noise_scale=phi), rel=1e-12)


# laws of gain and efficiency


@given(kappa=kappas, square=st.floats(0, 1e4), trace=st.floats(0, 1e4))
def test_a_gain_lies_between_one_step_and_all_of_them(kappa, square, trace):
    assert 1 - 1e-9 <= adascale_gain(kappa, square=square, trace=trace) <= kappa * (1 + 1e-9)


@given(square=positive, trace=positive, kappa=kappas)
def test_one_reference_batch_gains_itself_noise_gains_all_and_signal_nothing(square, trace, kappa):
    assert adascale_gain(1, square=square, trace=trace) == 1
    assert adascale_gain(kappa, square=0, trace=trace) == pytest.approx(kappa)
    assert adascale_gain(kappa, square=-1, trace=trace) == pytest.approx(kappa)
    assert adascale_gain(kappa, square=square, trace=0) == 1


@given(size=positive, larger=st.floats(1.01, 100), reference=positive, phi=positive)
def test_samples_of_a_larger_batch_are_worth_less_and_all_the_same_where_noise_has_no_end(size, larger, reference, phi):
    worth = statistical_efficiency(size, reference=reference, noise_scale=phi)
    assert 0 < statistical_efficiency(size * larger, reference=reference, noise_scale=phi) < worth
    assert statistical_efficiency(reference, reference=reference, noise_scale=phi) == 1
    assert statistical_efficiency(size, reference=reference, noise_scale=math.inf) == 1
    assert statistical_efficiency(size, reference=reference, noise_scale=1e15) == pytest.approx(1, abs=1e-8)


# steps against samples


@given(size=positive, least_steps=positive, critical=positive)
def test_the_trade_off_of_steps_and_samples_is_the_published_hyperbola(size, least_steps, critical):
    least_samples = least_steps * critical
    steps = steps_to_target(size, least_steps=least_steps, critical_batch_size=critical)
    samples = samples_to_target(size, least_samples=least_samples, critical_batch_size=critical)
    assert steps * size == pytest.approx(samples)
    assert (steps / least_steps - 1) * (samples / least_samples - 1) == pytest.approx(1, rel=1e-6)


def test_at_the_critical_batch_both_are_twice_their_least():
    assert steps_to_target(500, least_steps=40, critical_batch_size=500) == 80
    assert samples_to_target(500, least_samples=20_000, critical_batch_size=500) == 40_000


@given(least_steps=st.floats(10, 1e3), critical=st.floats(20, 5e3))
def test_the_trade_off_is_found_from_trainings_to_a_target(least_steps, critical):
    sizes = [32, 64, 256, 1024]
    steps = [steps_to_target(b, least_steps=least_steps, critical_batch_size=critical) for b in sizes]
    found = fit_trade_off(sizes, steps)
    assert found.least_steps == pytest.approx(least_steps, rel=1e-6)
    assert found.critical_batch_size == pytest.approx(critical, rel=1e-6)


def test_one_batch_size_shows_no_trade_off_and_sizes_that_need_the_same_steps_show_only_steps():
    assert fit_trade_off([64, 64], [100, 110]) is None
    flat = fit_trade_off([64, 128, 256], [100, 100, 100])
    assert flat.least_steps == pytest.approx(100) and flat.critical_batch_size < 1


# step times


@given(
    pass_s=st.floats(1e-4, 1), row_s=st.floats(1e-6, 1e-2), net_s=st.floats(0, 1), gamma=st.floats(1, 10),
    size=st.integers(1, 4096), workers=st.integers(1, 8), parts=st.integers(1, 8),
)  # fmt: skip
def test_a_step_takes_at_least_its_parts_and_at_most_their_sum(pass_s, row_s, net_s, gamma, size, workers, parts):
    time = StepTime(pass_s, row_s, net_s, gamma)
    share = size / workers
    micro = share / parts
    compute_s = parts * (pass_s + row_s * micro)
    step_s = time(size, workers=workers, micro_size=micro)
    assert max(compute_s, net_s) * (1 - 1e-9) <= step_s <= (compute_s + net_s) * (1 + 1e-9)
    assert StepTime(pass_s, row_s, net_s)(size, workers=workers, micro_size=micro) == pytest.approx(compute_s + net_s)


@given(pass_s=st.floats(1e-3, 1e-1), row_s=st.floats(1e-5, 1e-3), workers=st.sampled_from([1, 2, 4]))
def test_step_times_of_three_batch_sizes_give_back_what_made_them(pass_s, row_s, workers):
    made = StepTime(pass_s, row_s)
    measured = [MeasuredStep(b, made(b, workers=workers)) for b in (32, 128, 1024)]
    found = fit_step_time(measured, workers=workers)
    assert found(512, workers=workers) == pytest.approx(made(512, workers=workers), rel=1e-4)


def test_accumulation_counts_a_pass_for_every_micro_batch():
    made = StepTime(0.01, 0.001)
    measured = [MeasuredStep(64, made(64, micro_size=16), 16), MeasuredStep(64, made(64)), MeasuredStep(256, made(256))]
    found = fit_step_time(measured)
    assert found(64, micro_size=16) == pytest.approx(4 * 0.01 + 0.064, rel=1e-4)


def test_one_batch_size_scales_in_proportion_and_none_is_refused():
    assert fit_step_time([MeasuredStep(64, 0.2), MeasuredStep(64, 0.4)])(128) == pytest.approx(0.6)
    with pytest.raises(ConfigError, match="at least"):
        fit_step_time([])


def test_times_that_fall_with_the_batch_do_not_give_a_negative_cost():
    found = fit_step_time([MeasuredStep(32, 0.02), MeasuredStep(64, 0.019), MeasuredStep(128, 0.018)])
    assert found.pass_s > 0 and found.row_s > 0
    assert found(4096) >= found(32)


# goodput


def noise(batch_size, value, low=None, high=None):
    return Noise(batch_size, Estimate(value, low or value, high or value))


@given(phi=st.floats(10, 1e4), pass_s=st.floats(1e-3, 1e-1), row_s=st.floats(1e-5, 1e-3))
def test_the_best_batch_of_a_fine_grid_is_the_square_root_rule(phi, pass_s, row_s):
    # B / (a + c B) x 1 / (phi + B) has its highest point at sqrt(phi a / c)
    best = math.sqrt(phi * pass_s / row_s)
    sizes = [max(1, round(best * 1.02**n)) for n in range(-60, 61)]
    assume(sizes[0] > 40)
    time = StepTime(pass_s, row_s)
    points = goodput_points(
        sizes, reference=64, noises=[noise(64, phi)], throughputs=[exactly(time.samples_per_s(b)) for b in sizes]
    )
    assert best_point(points).batch_size == pytest.approx(best, rel=0.04)


def test_goodput_is_throughput_times_worth_and_steps_follow_from_the_reference():
    points = goodput_points(
        [64, 256], reference=64, noises=[noise(64, 192)], throughputs=[exactly(1000), exactly(3000)],
        measured=[64], steps_at_reference=700,
    )  # fmt: skip
    small, large = points
    assert small.goodput.value == 1000 and small.predicted_steps == 700 and small.is_measured
    assert large.statistical_efficiency.value == pytest.approx(256 / 448)
    assert large.predicted_samples == pytest.approx(700 * 64 * 448 / 256)
    assert large.predicted_steps == pytest.approx(large.predicted_samples / 256)
    assert not large.is_measured


def test_sizes_beyond_four_times_a_measured_one_are_marked():
    noises = [noise(64, 100.0), noise(512, 200.0)]
    trusted = {b: is_trusted(b, noises) for b in (8, 16, 64, 256, 2048, 4096)}
    assert trusted == {8: False, 16: True, 64: True, 256: True, 2048: True, 4096: False}
    points = goodput_points([64, 4096], reference=64, noises=noises, throughputs=[exactly(1), exactly(1000)])
    assert best_point(points).batch_size == 4096 and best_point(points, trusted_only=True).batch_size == 64


def test_an_interval_of_the_noise_widens_the_goodput_away_from_the_reference_only():
    points = goodput_points(
        [64, 512], reference=64, noises=[noise(64, 200.0, 100.0, math.inf)], throughputs=[Estimate(10, 9, 11)] * 2
    )
    near, far = points
    assert (near.goodput.low, near.goodput.value, near.goodput.high) == (9, 10, 11)
    assert far.statistical_efficiency.high == 1.0 and far.goodput.high == 11
    assert far.statistical_efficiency.low == pytest.approx(164 / 612)


def test_between_two_measured_sizes_the_noise_is_interpolated_and_beyond_them_it_stays():
    noises = [noise(64, 100.0), noise(1024, 400.0, 200.0, math.inf)]
    assert noise_at(256, noises).value == pytest.approx(200.0)
    assert noise_at(16, noises).value == 100.0 and noise_at(4096, noises).high == math.inf
    assert noise_at(64, noises) == exactly(100.0)
