"""Gradient noise: |G|^2, the trace of the gradient's covariance, and the batch size at which noise equals signal.

The quantities are measured from the norms of gradients at two batch sizes. Both estimates are unbiased but their ratio
is not, so they are averaged separately and divided last. Sizes and noise scales are in samples. Source: McCandlish et
al. 2018, arXiv:1812.06162, appendix A.1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scaleray.records.study_record import Estimate

MOST_WINDOWS = 64


@dataclass(frozen=True)
class NoiseSample:
    """One measurement, unbiased in both quantities. `square` estimates |G|^2 and is often negative if noise is large.
    `trace` is that of one sample: gradients of B samples have a covariance of trace / B."""

    square: float
    trace: float


@dataclass(frozen=True)
class Parts:
    """Mean gradients of parts of a batch: `weighted_squares` is the sum of size x |mean gradient|^2 over the parts.

    Parts of unequal size count by their size, which keeps the estimates unbiased: with E|m_k|^2 = |G|^2 + trace / n_k,
    the mean weighted by n_k is |G|^2 + trace x parts / (sum of n_k)."""

    weighted_squares: float
    size: float
    num_parts: float

    @classmethod
    def of(cls, size: float, square: float) -> Parts:
        """A single part with this squared norm of its mean gradient; a part of size 0 is not counted."""
        return cls(size * square, size, 1.0) if size > 0 else cls(0.0, 0.0, 0.0)

    def __add__(self, other: Parts) -> Parts:
        return Parts(
            self.weighted_squares + other.weighted_squares, self.size + other.size, self.num_parts + other.num_parts
        )

    @property
    def mean_square(self) -> float:
        """Mean of |mean gradient|^2 over the parts."""
        return self.weighted_squares / self.size

    @property
    def effective_size(self) -> float:
        """Batch size at which the expected squared norm is `mean_square`."""
        return self.size / self.num_parts


def estimate(parts: Parts, *, whole_square: float, whole_size: float) -> NoiseSample | None:
    """Estimate |G|^2 and trace from the parts of a batch and the squared norm of the whole batch's mean gradient.

    The parts need not cover the batch. None if a norm is not finite, or the parts are not smaller than the whole."""
    if parts.size <= 0 or not (math.isfinite(parts.weighted_squares) and math.isfinite(whole_square)):
        return None
    small = parts.effective_size
    if not small < whole_size * (1 - 1e-9):
        return None
    square = (whole_size * whole_square - small * parts.mean_square) / (whole_size - small)
    trace = (parts.mean_square - whole_square) / (1 / small - 1 / whole_size)
    return NoiseSample(square, trace)


class NoiseAverages:
    """Exponential averages of |G|^2 and trace, each with bias correction, and the resulting noise scale.

    The averages are sums of weighted values over the sum of weights, so that the first value counts fully. Products are
    kept as well, for an interval. `state` consists of plain numbers and is exact to the bit."""

    FIELDS = ("weight", "weight_of_squares", "square", "trace", "square_square", "square_trace", "trace_trace")

    def __init__(self, *, is_biased: bool = False) -> None:
        self._sums = dict.fromkeys(self.FIELDS, 0.0)
        self.num_samples = 0
        self.num_rejected = 0
        self.is_biased = is_biased
        """Whether the measurements come from consecutive steps: the noise scale is then too small at a high learning
        rate, since the gradient moves between them."""

    def add(self, sample: NoiseSample | None, *, factor: float) -> bool:
        """Add one measurement; `factor` in [0, 1] multiplies the weight of earlier ones. A missing or non-finite
        measurement is only counted, and the result is then False."""
        if sample is None or not (math.isfinite(sample.square) and math.isfinite(sample.trace)):
            self.num_rejected += 1
            return False
        s, t = sample.square, sample.trace
        new = dict(zip(self.FIELDS, (1.0, 1.0, s, t, s * s, s * t, t * t), strict=True))
        if not all(map(math.isfinite, new.values())):  # a product that overflows would spoil all that follows
            self.num_rejected += 1
            return False
        for name, value in new.items():
            kept = factor**2 if name == "weight_of_squares" else factor
            self._sums[name] = kept * self._sums[name] + value
        self.num_samples += 1
        return True

    @property
    def square(self) -> float:
        """Average of |G|^2; negative if the true value may be 0 within the noise. NaN before the first measurement."""
        return self._mean("square")

    @property
    def trace(self) -> float:
        """Trace of the covariance of one sample's gradient. NaN before the first measurement."""
        return self._mean("trace")

    @property
    def noise_scale(self) -> float:
        """Noise scale, trace / |G|^2, in samples. Infinite if |G|^2 may be 0 within its noise: the scale is then too
        large to be resolved. NaN before the first measurement."""
        if self.num_samples == 0:
            return math.nan
        if self.square <= 0:
            return math.inf
        return max(0.0, self.trace) / self.square

    def interval(self, *, confidence: float = 0.95) -> Estimate | None:
        """The noise scale with the interval of Fieller 1954 (doi:10.1111/j.2517-6161.1954.tb00159.x), whose upper end
        is infinite if |G|^2 may be 0 within its noise. None for fewer than 3 effective measurements.

        Measurements are assumed independent, as gradients of different samples are; a drift of the true values widens
        the interval."""
        sums = self._sums
        effective = sums["weight"] ** 2 / sums["weight_of_squares"] if self.num_samples else 0.0
        if effective < 3:
            return None
        from scipy import stats  # a second to import

        variance = {
            (a, b): max(self._mean(f"{a}_{b}") - self._mean(a) * self._mean(b), -math.inf) / (effective - 1)
            for a, b in (("square", "square"), ("square", "trace"), ("trace", "trace"))
        }
        z = float(stats.t.ppf((1 + confidence) / 2, effective - 1))
        # interval of |G|^2 / trace, whose denominator is known far better than that of the noise scale
        low, high = _fieller(
            self.square,
            self.trace,
            variance["square", "square"],
            variance["square", "trace"],
            variance["trace", "trace"],
            z,
        )
        value = self.noise_scale
        least = 1 / high if high > 0 else math.inf
        most = 1 / low if low > 0 else math.inf
        return Estimate(value, min(least, value), max(most, value))

    def state(self) -> dict[str, Any]:
        """All sums and counts, as values that can be stored in JSON."""
        counts = {"num_samples": self.num_samples, "num_rejected": self.num_rejected, "is_biased": self.is_biased}
        return {**self._sums, **counts}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> NoiseAverages:
        """Restore the averages from a `state`."""
        averages = cls(is_biased=bool(state["is_biased"]))
        averages._sums = {name: float(state[name]) for name in cls.FIELDS}
        averages.num_samples, averages.num_rejected = int(state["num_samples"]), int(state["num_rejected"])
        return averages

    def _mean(self, name: str) -> float:
        return self._sums[name] / self._sums["weight"] if self.num_samples else math.nan


class NoiseWindows:
    """Plain sums of measurements over parts of a training: at most `MOST_WINDOWS` parts, each with the same number of
    measurements.

    The number of samples that a whole training takes at another batch size depends on the noise of every part of it. An
    average of |G|^2 over the whole training would be dominated by its beginning, where gradients are largest."""

    FIELDS = ("until", "count", "s", "t", "ss", "st", "tt")

    def __init__(self) -> None:
        self._rows: list[list[float]] = []
        self._a_window = 1

    def add(self, sample: NoiseSample, *, at_samples: int) -> None:
        """Add a measurement taken after this many samples of training."""
        s, t = sample.square, sample.trace
        new = [float(at_samples), 1.0, s, t, s * s, s * t, t * t]
        if self._rows and self._rows[-1][1] < self._a_window:
            self._rows[-1] = _joined(self._rows[-1], new)
        else:
            self._rows.append(new)
        if len(self._rows) > MOST_WINDOWS:
            pairs = [self._rows[i : i + 2] for i in range(0, len(self._rows), 2)]
            self._rows = [_joined(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
            self._a_window *= 2

    def effective(self, batch_size: float, *, num_parts: int = 8) -> Estimate | None:
        """Single noise scale that represents the whole training with batches of this size, with a 95 % interval.

        With phi_w of each part of the training, a training to the same loss with batches of B takes (phi + B) / (phi +
        B_0) times as many samples as this one with B_0, where 1 / (phi + B_0) is the mean of 1 / (phi_w + B_0) over its
        samples. None for fewer than 2 measurements per part."""
        rows = self._in_parts(num_parts)
        if len(rows) < 2 or min(row[1] for row in rows) < 2:
            return None
        total, before, mean, variance = rows[-1][0], 0.0, 0.0, 0.0
        for until, count, s, t, ss, st, tt in rows:
            weight, before = (until - before) / total, until
            d = t + batch_size * s  # batch_size x the squared norm of a batch's gradient, which is never small
            if d <= 0:
                continue
            ratio = min(max(s / d, 0.0), 1 / batch_size)
            # variance of s - ratio x d over single measurements
            dd, sd = tt + 2 * batch_size * st + batch_size**2 * ss, st + batch_size * ss
            scatter = max(0.0, ss - 2 * ratio * sd + ratio**2 * dd) / count
            mean += weight * ratio
            variance += weight**2 * scatter / ((count - 1) * (d / count) ** 2)
        half = 1.96 * math.sqrt(variance)
        low, value, high = (
            max(0.0, 1 / u - batch_size) if u > 0 else math.inf for u in (mean + half, mean, mean - half)
        )
        return Estimate(value, low, high)

    def state(self) -> dict[str, Any]:
        """All sums and counts, as values that can be stored in JSON."""
        return {"a_window": self._a_window, "rows": [list(row) for row in self._rows]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the sums and counts of a `state`."""
        self._a_window, self._rows = int(state["a_window"]), [[float(v) for v in row] for row in state["rows"]]

    def _in_parts(self, num_parts: int) -> list[list[float]]:
        size = max(1, math.ceil(len(self._rows) / num_parts))
        while size < len(self._rows) and size * self._a_window < 4:
            size += 1
        groups = [self._rows[i : i + size] for i in range(0, len(self._rows), size)]
        if len(groups) > 1 and len(groups[-1]) * self._a_window < 4:
            groups[-2:] = [groups[-2] + groups[-1]]
        return [_joined(*group) for group in groups]


def forgetting(factor: float, *, batch_size: float, reference_batch_size: float, num_steps: int = 1) -> float:
    """Factor for the weight of earlier measurements after `num_steps` steps, chosen so that averages reach back equally
    many samples at any batch size: factor^(steps x B / B_ref). Source: AdaptDL's `gradient_noise_scale.py`."""
    return factor ** (num_steps * batch_size / reference_batch_size)


def _joined(*rows: list[float]) -> list[float]:
    return [rows[-1][0], *(sum(row[i] for row in rows) for i in range(1, len(rows[0])))]


def _fieller(
    numerator: float, denominator: float, variance_n: float, covariance: float, variance_d: float, z: float
) -> tuple[float, float]:
    """(low, high) of numerator / denominator; infinite if the denominator may be 0 within its noise."""
    a = denominator**2 - z**2 * variance_d
    b = numerator * denominator - z**2 * covariance
    c = numerator**2 - z**2 * variance_n
    if a <= 0:
        return -math.inf, math.inf
    root = math.sqrt(max(0.0, b * b - a * c))
    return (b - root) / a, (b + root) / a
