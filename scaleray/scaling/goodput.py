"""Which batch size learns fastest: goodput = samples per second x what a sample of so large a batch is worth.

Worth is counted against samples at a reference batch size, by the gradient noise scale (`noise_scale`). Sources: McCandlish
et al. 2018, arXiv:1812.06162 (trade-off of steps and examples); Johnson et al. 2020, AdaScale, arXiv:2007.05105 (gain);
Qiao et al. 2021, Pollux, OSDI 2021 (goodput, throughput). Batch sizes are samples of the global batch, times seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scaleray.errors import ConfigError
from scaleray.study_records import Estimate, GoodputPoint

TRUSTED_FACTOR = 4.0
"""How far from a measured batch its noise scale is trusted. Steps predicted from the smallest batch of Pollux's own traces
are 2 to 8 % too many at 4 x, 31 to 72 % at 32 x: a larger batch trains at another temperature."""


def adascale_gain(kappa: float, *, square: float, trace: float) -> float:
    """How many steps of the reference batch a step of `kappa` times as many samples is worth, in [1, kappa] from kappa 1 on.

    square: |G|^2; trace: of the covariance of the reference batch's mean gradient. AdaScale multiplies the learning rate by
    it (Adam: by its square root).
    """
    square, trace = max(0.0, square), max(0.0, trace)
    if square == 0 and trace == 0:
        return 1.0  # no gradient: nothing is gained by more samples
    return (trace + square) / (trace / kappa + square)


def statistical_efficiency(batch_size: float, *, reference: float, noise_scale: float) -> float:
    """Progress of a sample in a batch of this size, relative to one in the reference batch: (phi + B_ref) / (phi + B).

    An infinite noise scale means that samples are worth the same in every batch.
    """
    if math.isinf(noise_scale):
        return 1.0
    return (noise_scale + reference) / (noise_scale + batch_size)


def steps_to_target(batch_size: float, *, least_steps: float, critical_batch_size: float) -> float:
    """S(B) = S_min (1 + B_crit / B): twice the least number of steps at the critical batch size."""
    return least_steps * (1 + critical_batch_size / batch_size)


def samples_to_target(batch_size: float, *, least_samples: float, critical_batch_size: float) -> float:
    """E(B) = E_min (1 + B / B_crit): twice the least number of samples at the critical batch size."""
    return least_samples * (1 + batch_size / critical_batch_size)


@dataclass(frozen=True)
class TradeOff:
    """Steps against samples of trainings to one target. `critical_batch_size` = least_samples / least_steps."""

    least_steps: float
    least_samples: float

    @property
    def critical_batch_size(self) -> float:
        return self.least_samples / self.least_steps


def fit_trade_off(batch_sizes: Sequence[float], steps: Sequence[float]) -> TradeOff | None:
    """(S / S_min - 1) (E / E_min - 1) = 1 fitted to trainings that reached their target; None for fewer than two sizes.

    That is S = S_min + E_min / B, by least squares of relative errors; a part that comes out below 0 is set to a thousandth
    of a step or sample, which says that these sizes do not show it.
    """
    import numpy as np
    from scipy.optimize import nnls

    if len(set(batch_sizes)) < 2:
        return None
    sizes, taken = np.asarray(batch_sizes, dtype=float), np.asarray(steps, dtype=float)
    columns = np.stack([1 / taken, 1 / (sizes * taken)], axis=1)
    (least_steps, least_samples), _ = nnls(columns, np.ones(len(taken)))
    return TradeOff(max(float(least_steps), 1e-3), max(float(least_samples), 1e-3))


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step: passes over micro-batches of b rows on each of n workers, and their communication.

        step = accumulation x T_grad + (T_grad^gamma + T_net^gamma)^(1 / gamma),   T_grad = pass_s + row_s x b

    gamma 1: nothing overlaps; 10: nearly everything does. `accumulation` counts the passes before the last.
    Source: Pollux, section 3.2.
    """

    pass_s: float
    row_s: float
    net_s: float = 0.0
    gamma: float = 1.0

    def __call__(self, batch_size: float, *, workers: int = 1, micro_size: float | None = None) -> float:
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
        return batch_size / self(batch_size, workers=workers, micro_size=micro_size)


@dataclass(frozen=True)
class MeasuredStep:
    """The time of a step at a global batch size."""

    batch_size: int
    step_time_s: float
    micro_size: int | None = None


def fit_step_time(measured: Sequence[MeasuredStep], *, workers: int = 1) -> StepTime:
    """The step time as a pass's fixed cost and a cost a row, by least squares of log time. At one number of workers their
    communication is a constant too, and lies in the fixed cost.

    A single size gives time in proportion to rows. Raises ConfigError for none.
    """
    import numpy as np
    from scipy.optimize import least_squares, nnls

    if not measured:
        raise ConfigError("the throughput model", 0, "it needs a measured step time at one batch size at least")
    times = np.array([m.step_time_s for m in measured])
    rows = np.array([m.batch_size / workers for m in measured])
    passes = np.array([share / min(m.micro_size or share, share) for m, share in zip(measured, rows, strict=True)])
    if len({(m.batch_size, m.micro_size) for m in measured}) == 1:
        return StepTime(0.0, float(np.mean(times / rows)))
    # relative least squares as a start, which is the log's to first order
    columns = np.stack([passes / times, rows / times], axis=1)
    (pass_s, row_s), _ = nnls(columns, np.ones(len(times)))
    smallest = 1e-6 * float(times.min())
    start = np.log([max(pass_s, smallest), max(row_s, smallest / float(rows.max()))])

    def errors(logs: np.ndarray) -> np.ndarray:
        fixed, a_row = np.exp(logs)
        return np.asarray(np.log(passes * fixed + rows * a_row) - np.log(times))

    found = np.exp(least_squares(errors, start).x)
    return StepTime(float(found[0]), float(found[1]))


@dataclass(frozen=True)
class Noise:
    """A noise scale in samples with its interval, and the batch size at which it was measured."""

    batch_size: int
    scale: Estimate


def noise_at(batch_size: float, noises: Sequence[Noise]) -> Estimate:
    """The noise scale at a batch size: between two measured ones by interpolation of logarithms, as it grows with the batch;
    beyond them that of the nearest."""
    ordered = sorted(noises, key=lambda noise: noise.batch_size)
    above = next((noise for noise in ordered if noise.batch_size >= batch_size), ordered[-1])
    below = next((noise for noise in reversed(ordered) if noise.batch_size <= batch_size), ordered[0])
    if above.batch_size <= below.batch_size:
        return above.scale
    share = math.log(batch_size / below.batch_size) / math.log(above.batch_size / below.batch_size)

    def between(low: float, high: float) -> float:
        if not (0 < low < math.inf and 0 < high < math.inf):
            return low if share < 0.5 else high
        return math.exp((1 - share) * math.log(low) + share * math.log(high))

    value = between(below.scale.value, above.scale.value)
    low, high = between(below.scale.low, above.scale.low), between(below.scale.high, above.scale.high)
    return Estimate(value, min(low, value), max(high, value))


def is_trusted(batch_size: float, noises: Sequence[Noise]) -> bool:
    """Whether the noise was measured within 4 times of this batch size."""
    ratios = (noise.batch_size / batch_size for noise in noises)
    return any(max(ratio, 1 / ratio) <= TRUSTED_FACTOR * (1 + 1e-9) for ratio in ratios)


def goodput_points(
    batch_sizes: Sequence[int], *, reference: int, noises: Sequence[Noise], throughputs: Sequence[Estimate],
    measured: Sequence[int] = (), steps_at_reference: float | None = None,
) -> list[GoodputPoint]:  # fmt: skip
    """What each batch size is worth: its samples per second x the worth of a sample beside one at the reference batch.

    throughputs: samples/s of each batch size. steps_at_reference: what a training to the target takes at the reference
    batch; steps and samples at the others follow, None without it. Sizes beyond 4 times a measured one are marked.
    """
    points = []
    for size, throughput in zip(batch_sizes, throughputs, strict=True):
        scale = noise_at(size, noises)
        worth = sorted(
            statistical_efficiency(size, reference=reference, noise_scale=phi) for phi in (scale.low, scale.high)
        )
        value = statistical_efficiency(size, reference=reference, noise_scale=scale.value)
        efficiency = Estimate(value, min(worth[0], value), max(worth[1], value))
        goodput = Estimate(
            throughput.value * efficiency.value, throughput.low * efficiency.low, throughput.high * efficiency.high
        )
        samples = None if steps_at_reference is None else steps_at_reference * reference / efficiency.value
        points.append(
            GoodputPoint(
                batch_size=size, samples_per_s=throughput, statistical_efficiency=efficiency, goodput=goodput,
                predicted_steps=None if samples is None else samples / size, predicted_samples=samples,
                is_trusted=is_trusted(size, noises), is_measured=size in measured,
            )
        )  # fmt: skip
    return points


def best_point(points: Sequence[GoodputPoint], *, trusted_only: bool = False) -> GoodputPoint | None:
    """The point of the highest goodput; None where there is none."""
    candidates = [point for point in points if point.is_trusted or not trusted_only]
    return max(candidates, key=lambda point: point.goodput.value, default=None)
