"""Gradient noise: both estimates unbiased whatever the parts, averages kept apart, intervals that hold the planted value."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaleray.training.noise.noise_scale import NoiseAverages, NoiseSample, NoiseWindows, Parts, estimate, forgetting

finite = st.floats(-1e6, 1e6)


class Planted:
    """Mean gradients with |G|^2 = 1 and a covariance of this trace a sample, the same in every dimension."""

    def __init__(self, *, trace=1000.0, dims=1000, seed=0):
        self.trace, self.dims, self.draw = trace, dims, np.random.default_rng(seed)
        self.mean = np.zeros(dims)
        self.mean[0] = 1.0

    def gradients(self, sizes):
        noise = self.draw.normal(size=(len(sizes), self.dims)) * np.sqrt(self.trace / self.dims)
        return self.mean + noise / np.sqrt(np.asarray(sizes))[:, None]

    def sample(self, sizes, *, parts=None):
        """What a step with gradients of these sizes measures, from the first `parts` of them or all."""
        found = self.gradients(sizes)
        whole = np.average(found, axis=0, weights=sizes)
        seen = sum((Parts.of(n, g @ g) for n, g in list(zip(sizes, found, strict=True))[:parts]), Parts(0, 0, 0))
        return estimate(seen, whole_square=whole @ whole, whole_size=sum(sizes))


def averaged(samples, *, factor=1.0):
    averages = NoiseAverages()
    for sample in samples:
        averages.add(sample, factor=factor)
    return averages


# a planted noise scale


def test_a_planted_noise_scale_is_recovered_and_the_average_of_ratios_would_not_be():
    planted = Planted()
    samples = [planted.sample([8.0] * 8) for _ in range(2000)]
    averages = averaged(samples)
    # 2,000 steps leave a standard error of 2 % in |G|^2 and of 0.03 % in the trace
    assert averages.square == pytest.approx(1.0, rel=0.05) and averages.trace == pytest.approx(1000.0, rel=0.01)
    assert averages.noise_scale == pytest.approx(1000.0, rel=0.05)
    ratios = [sample.trace / sample.square for sample in samples]
    # their mean has no limit, as |G|^2 comes near 0 in some steps; their median has another one
    assert abs(np.mean(ratios) / 1000 - 1) > 0.2 and np.median(ratios) < 900


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [([8.0] * 2, None), ([3.0, 11.0, 2.0, 16.0], None), ([5.0] * 8, 1), ([20.0, 3.0, 3.0, 6.0], 2)],
    ids=["two workers", "unequal workers", "the first micro-batch", "the first two of unequal ones"],
)
def test_every_way_to_cut_a_batch_recovers_the_same_noise_scale(sizes, parts):
    planted = Planted(trace=40.0, dims=400, seed=1)
    averages = averaged(planted.sample(sizes, parts=parts) for _ in range(4000))
    # 4,000 steps leave a standard error of about 1 %
    assert averages.noise_scale == pytest.approx(40.0, rel=0.05)
    assert averages.trace == pytest.approx(40.0, rel=0.05)


def test_the_interval_holds_the_planted_value_as_often_as_it_says():
    held = 0
    for seed in range(120):
        planted = Planted(trace=60.0, dims=60, seed=seed)
        interval = averaged(planted.sample([4.0] * 4) for _ in range(60)).interval(confidence=0.9)
        held += interval.low <= 60.0 <= interval.high
    # 0.9 of 120 is 108 with a standard deviation of 3.3
    assert 97 <= held <= 119


def test_a_gradient_that_cannot_be_told_from_zero_has_an_endless_interval_and_a_lower_bound():
    planted = Planted(trace=1e5, dims=100, seed=3)
    averages = averaged(planted.sample([4.0] * 2) for _ in range(50))
    interval = averages.interval()
    assert interval.high == math.inf and 0 < interval.low < 1e5


def test_noise_without_a_gradient_is_infinite_and_no_error():
    averages = averaged(
        [NoiseSample(-0.5, 2.0), NoiseSample(-0.1, 3.0), NoiseSample(-0.4, 2.5), NoiseSample(-0.3, 2.6)]
    )
    assert averages.noise_scale == math.inf
    assert averages.interval().low > 0


def test_equal_gradients_have_no_noise():
    parts = Parts.of(4, 9.0) + Parts.of(4, 9.0)
    assert estimate(parts, whole_square=9.0, whole_size=8) == NoiseSample(9.0, 0.0)


# laws of one measurement


@given(sizes=st.lists(st.integers(1, 50), min_size=2, max_size=6), square=st.floats(1e-3, 1e3), trace=st.floats(0, 1e4))
def test_expected_norms_give_exactly_what_they_came_from(sizes, square, trace):
    parts = sum((Parts.of(n, square + trace / n) for n in sizes), Parts(0, 0, 0))
    sample = estimate(parts, whole_square=square + trace / sum(sizes), whole_size=sum(sizes))
    scale = square + trace
    assert sample.square == pytest.approx(square, rel=1e-9, abs=1e-9 * scale)
    assert sample.trace == pytest.approx(trace, rel=1e-9, abs=1e-9 * scale * sum(sizes))


@given(
    vectors=st.lists(st.lists(st.floats(-10, 10), min_size=3, max_size=3), min_size=2, max_size=5),
    factor=st.floats(0.1, 10),
)
def test_the_trace_of_parts_that_cover_the_batch_is_never_negative_and_scales_with_the_square(vectors, factor):
    def sample_of(scale):
        found = scale * np.array(vectors)
        sizes = np.arange(1, len(found) + 1)
        whole = np.average(found, axis=0, weights=sizes)
        parts = sum((Parts.of(n, g @ g) for n, g in zip(sizes, found, strict=True)), Parts(0, 0, 0))
        return estimate(parts, whole_square=whole @ whole, whole_size=sizes.sum())

    one, other = sample_of(1.0), sample_of(factor)
    assert one.trace >= -1e-9
    assert other.trace == pytest.approx(factor**2 * one.trace, rel=1e-6, abs=1e-6 * factor**2)
    assert other.square == pytest.approx(factor**2 * one.square, rel=1e-6, abs=1e-6 * factor**2)


def test_a_part_without_samples_counts_nothing():
    parts = Parts.of(4, 5.0) + Parts.of(0, math.nan) + Parts.of(4, 7.0)
    assert parts == Parts(48.0, 8.0, 2.0)


@pytest.mark.parametrize(
    ("parts", "whole"),
    [(Parts.of(4, math.inf), 1.0), (Parts.of(4, 1.0), math.nan), (Parts.of(8, 1.0), 1.0), (Parts.of(0, 1.0), 1.0)],
    ids=["infinite part", "NaN", "the part is the whole", "no part"],
)
def test_what_cannot_be_measured_gives_no_measurement(parts, whole):
    assert estimate(parts, whole_square=whole, whole_size=8) is None


# averages


def test_what_is_not_finite_is_counted_and_changes_nothing():
    averages = averaged([NoiseSample(1.0, 10.0), NoiseSample(2.0, 30.0)])
    before = averages.state()
    for bad in (None, NoiseSample(math.nan, 1.0), NoiseSample(1.0, math.inf), NoiseSample(1e200, 1.0)):
        assert not averages.add(bad, factor=0.5)
    assert averages.state() == {**before, "num_rejected": 4}


def test_averages_before_the_first_measurement_say_nothing():
    averages = NoiseAverages()
    assert math.isnan(averages.noise_scale) and math.isnan(averages.square) and averages.interval() is None


@given(square=st.floats(1e-3, 1e3), trace=st.floats(1e-3, 1e3), factor=st.floats(0, 1))
def test_the_first_measurement_counts_fully(square, trace, factor):
    averages = averaged([NoiseSample(square, trace)], factor=factor)
    assert averages.square == square and averages.trace == trace


def test_a_factor_forgets_old_measurements():
    samples = [NoiseSample(1.0, 1.0)] * 50 + [NoiseSample(1.0, 5.0)] * 50
    assert averaged(samples).trace == pytest.approx(3.0)
    assert averaged(samples, factor=0.8).trace == pytest.approx(5.0, rel=1e-3)


@given(samples=st.lists(st.tuples(finite, finite), max_size=6), rest=st.lists(st.tuples(finite, finite), max_size=6))
def test_averages_go_on_from_their_state_to_the_bit(samples, rest):
    whole = averaged([NoiseSample(*s) for s in samples + rest], factor=0.9)
    first = averaged([NoiseSample(*s) for s in samples], factor=0.9)
    again = NoiseAverages.from_state(json.loads(json.dumps(first.state())))
    for sample in rest:
        again.add(NoiseSample(*sample), factor=0.9)
    assert again.state() == whole.state()


def test_averages_reach_back_equally_far_in_samples_whatever_the_batch():
    small = forgetting(0.999, batch_size=64, reference_batch_size=64, num_steps=8)
    assert small == pytest.approx(0.999**8)
    assert forgetting(0.999, batch_size=512, reference_batch_size=64) == pytest.approx(small)


# over a whole training


def windows_of(traces, *, batch_size, seed=0, measurements=40):
    """A training whose |G|^2 falls and whose noise scale is traces[i] in its i-th part, measured without bias."""
    draw, windows, samples = np.random.default_rng(seed), NoiseWindows(), 0
    for part, phi in enumerate(traces):
        square = 10.0**-part
        for _ in range(measurements):
            samples += 10 * batch_size
            sample = NoiseSample(square * draw.normal(1, 0.8), square * phi * draw.normal(1, 0.2))
            windows.add(sample, at_samples=samples)
    return windows


@pytest.mark.parametrize("measurements", [4, 40])
def test_one_noise_scale_stands_for_a_training_whose_noise_grows(measurements):
    phis, size = [20.0, 60.0, 300.0, 2000.0], 64
    found = windows_of(phis, batch_size=size, measurements=200).effective(size, num_parts=8)
    for other in (16, 256, 1024):
        ratio = np.mean([(phi + other) / (phi + size) for phi in phis])
        assert (found.value + other) / (found.value + size) == pytest.approx(ratio, rel=0.1)
    few = windows_of(phis, batch_size=size, measurements=measurements, seed=2).effective(size)
    assert few.low <= few.value <= few.high


def test_the_interval_of_the_one_noise_scale_holds_what_was_planted():
    phis, size = [20.0, 60.0, 300.0, 2000.0], 64
    true = 1 / np.mean([1 / (phi + size) for phi in phis]) - size
    found = [windows_of(phis, batch_size=size, seed=seed).effective(size) for seed in range(60)]
    assert sum(each.low <= true <= each.high for each in found) >= 50  # 57 are expected


def test_windows_stay_few_and_keep_every_measurement():
    windows = NoiseWindows()
    for number in range(1000):
        windows.add(NoiseSample(1.0, 7.0), at_samples=(number + 1) * 8)
    state = windows.state()
    assert len(state["rows"]) <= 64 and sum(row[1] for row in state["rows"]) == 1000
    assert windows.effective(8).value == pytest.approx(7.0)
    again = NoiseWindows()
    again.load_state(json.loads(json.dumps(state)))
    assert again.state() == state


def test_a_training_too_short_to_have_parts_says_nothing():
    windows = NoiseWindows()
    windows.add(NoiseSample(1.0, 7.0), at_samples=8)
    assert windows.effective(8) is None
