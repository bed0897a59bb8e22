"""Goodput: AdaScale's gain, what samples of a larger batch are worth, step times, and the published figures."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scaleray.errors import ConfigError
from scaleray.records.study_record import Estimate
from scaleray.training.noise.guidance import adascale_gain
from scaleray.training.noise.statistical_efficiency import (
    MeasuredStep,
    Noise,
    ThroughputModel,
    TradeOff,
    fit_throughput,
    fit_trade_off,
    goodput_point,
    is_trusted,
    predict_samples,
    statistical_efficiency,
)

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
    trade_off = TradeOff(least_steps, least_steps * critical)
    steps, samples = trade_off.steps(size), trade_off.samples(size)
    assert steps * size == pytest.approx(samples)
    assert (steps / least_steps - 1) * (samples / trade_off.least_samples - 1) == pytest.approx(1, rel=1e-6)


def test_at_the_critical_batch_both_are_twice_their_least():
    trade_off = TradeOff(40, 20_000)
    assert trade_off.critical_batch_size == 500 and trade_off.steps(500) == 80 and trade_off.samples(500) == 40_000


@given(least_steps=st.floats(10, 1e3), critical=st.floats(20, 5e3))
def test_the_trade_off_is_found_from_trainings_to_a_target(least_steps, critical):
    made, sizes = TradeOff(least_steps, least_steps * critical), [32, 64, 256, 1024]
    found = fit_trade_off(sizes, [made.steps(b) for b in sizes])
    assert found.least_steps == pytest.approx(least_steps, rel=1e-6)
    assert found.critical_batch_size == pytest.approx(critical, rel=1e-6)


def test_one_batch_size_shows_no_trade_off_and_sizes_that_need_the_same_steps_show_only_steps():
    assert fit_trade_off([64, 64], [100, 110]) is None
    flat = fit_trade_off([64, 128, 256], [100, 100, 100])
    assert flat.least_steps == pytest.approx(100) and flat.critical_batch_size < 1


# step times


@given(
    pass_s=st.floats(1e-4, 1),
    row_s=st.floats(1e-6, 1e-2),
    net_s=st.floats(0, 1),
    gamma=st.floats(1, 10),
    size=st.integers(1, 4096),
    workers=st.integers(1, 8),
    parts=st.integers(1, 8),
)
def test_a_step_takes_at_least_its_parts_and_at_most_their_sum(pass_s, row_s, net_s, gamma, size, workers, parts):
    time = ThroughputModel(pass_s, row_s, net_s, gamma)
    share = size / workers
    micro = share / parts
    compute_s = parts * (pass_s + row_s * micro)
    step_s = time.step_time_s(size, workers=workers, micro_size=micro)
    assert max(compute_s, net_s) * (1 - 1e-9) <= step_s <= (compute_s + net_s) * (1 + 1e-9)
    assert ThroughputModel(pass_s, row_s, net_s).step_time_s(size, workers=workers, micro_size=micro) == pytest.approx(
        compute_s + net_s
    )


@given(pass_s=st.floats(1e-3, 1e-1), row_s=st.floats(1e-5, 1e-3), workers=st.sampled_from([1, 2, 4]))
def test_step_times_of_three_batch_sizes_give_back_what_made_them(pass_s, row_s, workers):
    made = ThroughputModel(pass_s, row_s)
    measured = [MeasuredStep(b, made.step_time_s(b, workers=workers)) for b in (32, 128, 1024)]
    found = fit_throughput(measured, workers=workers)
    assert found.step_time_s(512, workers=workers) == pytest.approx(made.step_time_s(512, workers=workers), rel=1e-4)


def test_accumulation_counts_a_pass_for_every_micro_batch():
    made = ThroughputModel(0.01, 0.001)
    measured = [
        MeasuredStep(64, made.step_time_s(64, micro_size=16), 16),
        MeasuredStep(64, made.step_time_s(64)),
        MeasuredStep(256, made.step_time_s(256)),
    ]
    found = fit_throughput(measured)
    assert found.step_time_s(64, micro_size=16) == pytest.approx(4 * 0.01 + 0.064, rel=1e-4)


def test_one_batch_size_scales_in_proportion_and_none_is_refused():
    assert fit_throughput([MeasuredStep(64, 0.2), MeasuredStep(64, 0.4)]).step_time_s(128) == pytest.approx(0.6)
    with pytest.raises(ConfigError, match="at one batch size or more"):
        fit_throughput([])


def test_times_that_fall_with_the_batch_do_not_give_a_negative_cost():
    found = fit_throughput([MeasuredStep(32, 0.02), MeasuredStep(64, 0.019), MeasuredStep(128, 0.018)])
    assert found.pass_s > 0 and found.row_s > 0
    assert found.step_time_s(4096) >= found.step_time_s(32)


# goodput


def noise(batch_size, value, low=None, high=None):
    return Noise(batch_size, Estimate(value, low or value, high or value))


def points_of(sizes, *, noises, rates, known=None, reference=64):
    """From what one training at the reference took, if nothing else is known."""
    known = known or {reference: 700.0 * reference}
    base = predict_samples(reference, known=known, noises=noises).value
    return [
        goodput_point(
            size,
            samples_per_s=rate,
            to_target=predict_samples(size, known=known, noises=noises),
            reference_to_target=base,
            is_trusted=is_trusted(size, noises),
            is_measured=size in known,
        )
        for size, rate in zip(sizes, rates, strict=True)
    ]


@given(phi=st.floats(10, 1e4), pass_s=st.floats(1e-3, 1e-1), row_s=st.floats(1e-5, 1e-3))
def test_the_best_batch_of_a_fine_grid_is_the_square_root_rule(phi, pass_s, row_s):
    # B / (a + c B) x 1 / (phi + B) has its highest point at sqrt(phi a / c)
    best = math.sqrt(phi * pass_s / row_s)
    sizes = [max(1, round(best * 1.02**n)) for n in range(-60, 61)]
    assume(sizes[0] > 40)
    time = ThroughputModel(pass_s, row_s)
    points = points_of(sizes, noises=[noise(64, phi)], rates=[exactly(time.samples_per_s(b)) for b in sizes])
    assert max(points, key=lambda p: p.goodput.value).batch_size == pytest.approx(best, rel=0.04)


def test_goodput_is_throughput_times_worth_and_steps_follow_from_the_reference():
    small, large = points_of([64, 256], noises=[noise(64, 192)], rates=[exactly(1000), exactly(3000)])
    assert small.goodput.value == 1000 and small.predicted_steps == 700 and small.is_measured
    assert large.statistical_efficiency.value == pytest.approx(256 / 448)
    assert large.goodput.value == pytest.approx(3000 * 256 / 448)
    assert large.predicted_samples == pytest.approx(700 * 64 * 448 / 256)
    assert large.predicted_steps == pytest.approx(large.predicted_samples / 256)
    assert not large.is_measured


@given(phi=positive, size=st.integers(1, 4096), least=st.floats(1e3, 1e6))
def test_samples_follow_the_trade_off_when_the_noise_scale_is_the_critical_batch_size(phi, size, least):
    made = TradeOff(least / phi, least)
    found = predict_samples(size, known={64: made.samples(64)}, noises=[noise(64, phi)])
    assert found.value == pytest.approx(made.samples(size))


def test_between_known_sizes_samples_are_interpolated_and_beyond_them_the_nearest_noise_counts():
    known, noises = {64: 1000.0, 1024: 4000.0}, [noise(64, 100.0), noise(1024, 1000.0)]
    assert predict_samples(64, known=known, noises=noises) == exactly(1000.0)
    assert predict_samples(256, known=known, noises=noises) == Estimate(pytest.approx(2000.0), 1000.0, 4000.0)
    assert predict_samples(2048, known=known, noises=noises).value == pytest.approx(4000 * 3048 / 2024)
    assert predict_samples(16, known=known, noises=noises).value == pytest.approx(1000 * 116 / 164)
    unknown = predict_samples(2048, known=known, noises=[])
    assert (unknown.low, unknown.high) == (4000.0, pytest.approx(8000.0))


def test_sizes_beyond_four_times_a_measured_one_are_not_trusted():
    noises = [noise(64, 100.0), noise(512, 200.0)]
    trusted = {b: is_trusted(b, noises) for b in (8, 16, 64, 256, 2048, 4096)}
    assert trusted == {8: False, 16: True, 64: True, 256: True, 2048: True, 4096: False}
    assert not is_trusted(64, [])


def test_an_interval_of_the_noise_widens_the_goodput_away_from_the_reference_only():
    near, far = points_of([64, 512], noises=[noise(64, 200.0, 100.0, math.inf)], rates=[Estimate(10, 9, 11)] * 2)
    assert (near.goodput.low, near.goodput.value, near.goodput.high) == (9, 10, 11)
    assert far.statistical_efficiency.high == 1.0 and far.goodput.high == 11
    assert far.statistical_efficiency.low == pytest.approx(164 / 612)
