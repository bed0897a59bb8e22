"""What measurements teach the planner: how much longer than predicted a GPU computes, and what a node's link really carries."""

from __future__ import annotations

import math
from dataclasses import replace

from scaleray.planner.constants import DEFAULT, Constants
from scaleray.planner.hardware import Cluster, Link
from scaleray.planner.layout import Layout
from scaleray.planner.profile import ModelProfile
from scaleray.planner.step_time import Measured, step_time


def calibrate(
    model: ModelProfile, layout: Layout, cluster: Cluster, measured_step_s: float, *,
    fused_attention: bool = True, constants: Constants = DEFAULT,
) -> Measured:  # fmt: skip
    """What has to be multiplied to the compute for the prediction to meet a step time that was measured.

    The scale is kept within 0.05 and 20: beyond, something else than compute is wrong.
    """
    start = (
        Measured()
        if model.has_flops
        else Measured(sample_s=measured_step_s / (layout.accumulation * layout.micro_batch))
    )
    low, high, scale = 0.05, 20.0, 1.0
    for _ in range(60):
        guess = step_time(
            model, layout, cluster, measured=replace(start, compute_scale=scale), fused_attention=fused_attention, constants=constants
        )  # fmt: skip
        if abs(guess.total_s - measured_step_s) < 1e-6 * measured_step_s or high / low < 1 + 1e-9:
            break
        low, high = (scale, high) if guess.total_s < measured_step_s else (low, scale)
        # what grows with the scale: Newton's step, or the middle where it leaves the bracket
        slope = (guess.compute_s + guess.bubble_s + guess.straggler_s) / scale
        step = scale + (measured_step_s - guess.total_s) / slope if slope > 0 else 0.0
        scale = step if low < step < high else math.sqrt(low * high)
    return replace(start, compute_scale=scale)


def calibrate_link(
    model: ModelProfile, layout: Layout, cluster: Cluster, measured_step_s: float, *, measured: Measured,
    fused_attention: bool = True, constants: Constants = DEFAULT,
) -> Link:  # fmt: skip
    """The node's link with the bandwidth at which the prediction meets a step measured on several GPUs of one node.

    `measured`: the compute, calibrated on fewer. The bandwidth is kept within a thousandth and ten times of what the link has.
    """
    low, high = math.log(cluster.link.bus_gb_per_s / 1000), math.log(cluster.link.bus_gb_per_s * 10)
    for _ in range(50):
        middle = (low + high) / 2
        link = replace(cluster.link, bus_gb_per_s=math.exp(middle), source="measured")
        guess = step_time(
            model, layout, replace(cluster, link=link), measured=measured, fused_attention=fused_attention, constants=constants
        )  # fmt: skip
        low, high = (low, middle) if guess.total_s < measured_step_s else (middle, high)
    return replace(cluster.link, bus_gb_per_s=math.exp((low + high) / 2), source="measured")
