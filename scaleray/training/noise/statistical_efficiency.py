"""Batch size that learns fastest: goodput = samples per second x worth of a sample in a batch of that size.

The worth is relative to a sample at the reference batch size and follows from the gradient noise scale (`noise_scale`).
Sources: McCandlish et al. 2018, arXiv:1812.06162 (trade-off of steps and examples); Johnson et al. 2020, AdaScale,
arXiv:2007.05105 (gain); Qiao et al. 2021, Pollux, OSDI 2021 (goodput, throughput). Batch sizes are samples of the
global batch, times are seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scaleray.errors import ConfigError
from scaleray.records.study_record import Estimate
from scaleray.records.sweep_record import GoodputPoint

TRUSTED_FACTOR = 4.0
"""Largest ratio of a batch size to a measured one at which the noise scale measured there is trusted. In Pollux's own
traces, steps predicted from the smallest batch are 2 to 8 % too many at 4 x, and 31 to 72 % at 32 x: a larger batch
trains at another noise temperature."""


def statistical_efficiency(batch_size: float, *, reference: float, noise_scale: float) -> float:
    """Progress per sample in a batch of this size, relative to the reference batch: (phi + B_ref) / (phi + B).

    An infinite noise scale means that a sample is worth the same in every batch."""
    if math.isinf(noise_scale):
        return 1.0
    return (noise_scale + reference) / (noise_scale + batch_size)


@dataclass(frozen=True)
class TradeOff:
    """Steps against samples, for trainings to one target. `critical_batch_size` = least_samples / least_steps."""

    least_steps: float
    least_samples: float

    @property
    def critical_batch_size(self) -> float:
        """Batch size at which steps and samples are both twice their minimum."""
        return self.least_samples / self.least_steps

    def steps(self, batch_size: float) -> float:
        """Steps to the target at a batch size: S(B) = S_min (1 + B_crit / B)."""
        return self.least_steps * (1 + self.critical_batch_size / batch_size)

    def samples(self, batch_size: float) -> float:
        """Samples to the target at a batch size: E(B) = E_min (1 + B / B_crit)."""
        return self.least_samples * (1 + batch_size / self.critical_batch_size)


def fit_trade_off(batch_sizes: Sequence[float], steps: Sequence[float]) -> TradeOff | None:
    """Fit (S / S_min - 1) (E / E_min - 1) = 1 to trainings that reached their target; None for fewer than two sizes.

    The fit is S = S_min + E_min / B, by least squares of relative errors; a part that comes out below 0 is set to a
    thousandth of a step or sample, which means that these sizes do not determine it."""
    import numpy as np
    from scipy.optimize import nnls

    if len(set(batch_sizes)) < 2:
        return None
    sizes, taken = np.asarray(batch_sizes, dtype=float), np.asarray(steps, dtype=float)
    columns = np.stack([1 / taken, 1 / (sizes * taken)], axis=1)
    (least_steps, least_samples), _ = nnls(columns, np.ones(len(taken)))
    return TradeOff(max(float(least_steps), 1e-3), max(float(least_samples), 1e-3))


@dataclass(frozen=True)
class ThroughputModel:
    """Time of an optimizer step: passes over micro-batches of b rows on each of n workers, and their communication.

        step = accumulation x T_grad + (T_grad^gamma + T_net^gamma)^(1 / gamma),   T_grad = pass_s + row_s x b

    gamma 1: nothing overlaps; gamma 10: nearly everything does. `accumulation` is the number of passes before the last
    one. Source: Pollux, section 3.2."""

    pass_s: float
    row_s: float
    net_s: float = 0.0
    gamma: float = 1.0

    def step_time_s(self, batch_size: float, *, workers: int = 1, micro_size: float | None = None) -> float:
        """Seconds of a step with this global batch size. micro_size: rows of a pass; None: a worker's whole share."""
        share = batch_size / workers
        micro = share if micro_size is None else min(micro_size, share)
        passes = share / micro
        one = self.pass_s + self.row_s * micro
        if self.net_s == 0:
            return passes * one
        # scaled by the larger, as powers of milliseconds underflow
        larger = max(one, self.net_s)
        last = larger * ((one / larger) ** self.gamma + (self.net_s / larger) ** self.gamma) ** (1 / self.gamma)
        return (passes - 1) * one + last

    def samples_per_s(self, batch_size: float, *, workers: int = 1, micro_size: float | None = None) -> float:
        """Samples of all workers per second."""
        return batch_size / self.step_time_s(batch_size, workers=workers, micro_size=micro_size)


@dataclass(frozen=True)
class MeasuredStep:
    """Measured time of a step at a global batch size."""

    batch_size: int
    step_time_s: float
    micro_size: int | None = None


def fit_throughput(measured: Sequence[MeasuredStep], *, workers: int = 1) -> ThroughputModel:
    """Fit the step time as a fixed cost per pass plus a cost per row, by least squares of log time. For one number of
    workers the communication is constant as well, and becomes part of the fixed cost.

    With a single size, the time is proportional to the rows. Raises ConfigError if nothing was measured."""
    import numpy as np
    from scipy.optimize import least_squares, nnls

    if not measured:
        raise ConfigError.problem("The throughput model", "needs a measured step time at one batch size or more")
    times = np.array([m.step_time_s for m in measured])
    rows = np.array([m.batch_size / workers for m in measured])
    passes = np.array([share / min(m.micro_size or share, share) for m, share in zip(measured, rows, strict=True)])
    if len({(m.batch_size, m.micro_size) for m in measured}) == 1:
        return ThroughputModel(0.0, float(np.mean(times / rows)))
    # relative least squares as a start, which is the log's to first order
    columns = np.stack([passes / times, rows / times], axis=1)
    (pass_s, row_s), _ = nnls(columns, np.ones(len(times)))
    smallest = 1e-6 * float(times.min())
    start = np.log([max(pass_s, smallest), max(row_s, smallest / float(rows.max()))])

    def errors(logs: np.ndarray) -> np.ndarray:
        fixed, a_row = np.exp(logs)
        return np.asarray(np.log(passes * fixed + rows * a_row) - np.log(times))

    found = np.exp(least_squares(errors, start).x)
    return ThroughputModel(float(found[0]), float(found[1]))


@dataclass(frozen=True)
class Noise:
    """Noise scale in samples with its interval, and the batch size at which it was measured."""

    batch_size: int
    scale: Estimate


def is_trusted(batch_size: float, noises: Sequence[Noise]) -> bool:
    """Whether this batch size is close enough to the one at which the noise was measured: within a factor of 4."""
    ratios = (noise.batch_size / batch_size for noise in noises)
    return any(max(ratio, 1 / ratio) <= TRUSTED_FACTOR * (1 + 1e-9) for ratio in ratios)


def predict_samples(batch_size: int, *, known: Mapping[int, float], noises: Sequence[Noise]) -> Estimate:
    """Samples needed to reach a target at a batch size, from those at the sizes of `known`, which must not be empty.

    At a known size this is the known value. Between two of them it is interpolated on logarithms, with an interval
    between the two. Beyond them it follows from the nearest size, using the noise scale measured nearest to that size.
    """
    if batch_size in known:
        return Estimate(known[batch_size], known[batch_size], known[batch_size])
    below = max((size for size in known if size < batch_size), default=None)
    above = min((size for size in known if size > batch_size), default=None)
    if below is not None and above is not None:
        share = math.log(batch_size / below) / math.log(above / below)
        ends = known[below], known[above]
        value = math.exp((1 - share) * math.log(ends[0]) + share * math.log(ends[1]))
        return Estimate(value, min(ends), max(ends))
    near = below if below is not None else above
    assert near is not None
    noise = min(noises, key=lambda noise: abs(math.log(noise.batch_size / near)), default=None)
    # without any, samples may be worth anything between the same in every batch and nothing beyond the first
    scale = noise.scale if noise is not None else Estimate(math.inf, 0.0, math.inf)
    found = [
        known[near] / statistical_efficiency(batch_size, reference=near, noise_scale=phi)
        for phi in (scale.value, scale.low, scale.high)
    ]
    return Estimate(found[0], min(found), max(found))


def goodput_point(
    batch_size: int,
    *,
    samples_per_s: Estimate,
    to_target: Estimate,
    reference_to_target: float,
    is_trusted: bool,
    is_measured: bool,
) -> GoodputPoint:
    """Goodput in samples of the reference batch per second. to_target: samples needed to reach the target at this batch
    size; reference_to_target: samples needed at the reference batch size."""
    worth = Estimate(
        reference_to_target / to_target.value, reference_to_target / to_target.high, reference_to_target / to_target.low
    )
    goodput = Estimate(
        samples_per_s.value * worth.value, samples_per_s.low * worth.low, samples_per_s.high * worth.high
    )
    return GoodputPoint(
        batch_size=batch_size,
        samples_per_s=samples_per_s,
        statistical_efficiency=worth,
        goodput=goodput,
        predicted_steps=to_target.value / batch_size,
        predicted_samples=to_target.value,
        is_trusted=is_trusted,
        is_measured=is_measured,
    )
