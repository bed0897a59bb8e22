"""Calibrate predictions by measurements: find the ratios of measured to predicted time for compute and collectives, and
the actual bandwidth of a node's link. A single step time cannot separate compute from communication, so the error is
divided in the most likely way: the logarithm of each part changes in proportion to its variance and its weight in the
step (the mode of two normal priors on a line). On one GPU the whole error is compute."""

import math
from collections.abc import Callable
from dataclasses import replace

from scaleray.config.hardware.hardware_kinds import Cluster, Link
from scaleray.planner.cost.block_pass import Measured
from scaleray.planner.cost.constants import DEFAULT, Constants
from scaleray.planner.cost.layout import Layout
from scaleray.planner.cost.step_time import step_time
from scaleray.planner.models.block_counts import ModelProfile

COMM_DOUBT = 2.5
"""Standard deviation of communication's logarithm relative to compute's: rates of matrix products are known to 20 %,
networks to a factor of 1.5, the variation among the catalogue's sources."""
PRECISION = 1e-5
"""Relative error of the step time at which the search for the scales stops, since clocks are not more precise."""
MOST_COMM = 4.0
"""Largest factor, up or down, by which communication is scaled; a larger error is not in the network."""


def calibrate(
    model: ModelProfile,
    layout: Layout,
    cluster: Cluster,
    measured_step_s: float,
    *,
    fused_attention: bool = True,
    constants: Constants = DEFAULT,
) -> Measured:
    """Return the factors of compute and communication with which the prediction equals a measured step time. The factor
    of compute is limited to 0.05 to 20; a larger error is not in compute."""
    start = (
        Measured()
        if model.has_flops
        else Measured(sample_s=measured_step_s / (layout.accumulation * layout.micro_batch))
    )

    def total_s(compute: float, comm: float) -> float:
        guess = replace(start, compute_scale=compute, comm_scale=comm)
        return step_time(
            model, layout, cluster, measured=guess, fused_attention=fused_attention, constants=constants
        ).total_s

    blame = _blame(total_s) if layout.num_gpus > 1 else 0.0

    def scales(log_compute: float) -> tuple[float, float]:
        most = math.log(MOST_COMM)
        return math.exp(log_compute), math.exp(min(most, max(-most, blame * log_compute)))

    low, high = math.log(0.05), math.log(20.0)
    guess, before, slope = 0.0, (0.0, 0.0), 1.0
    for _ in range(60):
        off = math.log(total_s(*scales(guess)) / measured_step_s)
        if abs(off) < PRECISION or high - low < 1e-9:
            break
        low, high = (guess, high) if off < 0 else (low, guess)
        # the secant through the last two guesses; the midpoint if it leaves the bracket
        if guess != before[0]:
            slope = max(0.05, (off - before[1]) / (guess - before[0]))
        nearer, before = guess - off / slope, (guess, off)
        guess = nearer if low < nearer < high else (low + high) / 2
    compute, comm = scales(guess)
    return replace(start, compute_scale=compute, comm_scale=comm)


def _blame(total_s: Callable[[float, float], float]) -> float:
    """Ratio of the logarithm of communication's scale to that of compute's."""
    small = 0.05
    plain = total_s(1.0, 1.0)
    of_compute, of_comm = total_s(1 + small, 1.0) - plain, total_s(1.0, 1 + small) - plain
    return COMM_DOUBT**2 * of_comm / of_compute if of_compute > 0 else 0.0


def calibrate_link(
    model: ModelProfile,
    layout: Layout,
    cluster: Cluster,
    measured_step_s: float,
    *,
    measured: Measured,
    fused_attention: bool = True,
    constants: Constants = DEFAULT,
) -> Link:
    """Return the node's link with the bandwidth at which the prediction equals a step measured on several of its GPUs.

    `measured`: the compute, calibrated on fewer GPUs. The bandwidth is limited to a thousandth to ten times that of the
    link.
    """
    low, high = math.log(cluster.link.bus_gb_per_s / 1000), math.log(cluster.link.bus_gb_per_s * 10)
    for _ in range(50):
        middle = (low + high) / 2
        link = replace(cluster.link, bus_gb_per_s=math.exp(middle), source="measured")
        guess = step_time(
            model,
            layout,
            replace(cluster, link=link),
            measured=measured,
            fused_attention=fused_attention,
            constants=constants,
        )
        low, high = (low, middle) if guess.total_s < measured_step_s else (middle, high)
    return replace(cluster.link, bus_gb_per_s=math.exp((low + high) / 2), source="measured")
