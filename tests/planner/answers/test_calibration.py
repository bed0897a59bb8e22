"""What one measured step teaches: all of it about compute on one GPU, shared out by doubt where GPUs already talk."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaleray.config.hardware.cluster_text import parse_cluster
from scaleray.planner.answers.calibration import MOST_COMM, calibrate
from scaleray.planner.cost.block_pass import Measured
from scaleray.planner.cost.layout import Layout
from scaleray.planner.cost.step_time import step_time
from scaleray.planner.models.names import find_model

GPT = find_model("gpt2-xl")
SLOW = parse_cluster("a100-80:8x2,net=10G")
FAST = parse_cluster("a100-80:8x2,net=8x200G")
SIXTEEN = Layout(data=16, micro_batch=4, gradient_bytes=4)


def taught(cluster, layout, factor):
    return calibrate(GPT, layout, cluster, factor * step_time(GPT, layout, cluster).total_s)


def test_on_one_gpu_all_that_was_missed_is_compute():
    found = taught(parse_cluster("a100-80:1"), Layout(micro_batch=4), 1.3)
    assert found.comm_scale == 1.0 and found.compute_scale > 1.25


def test_a_step_that_is_mostly_a_slow_network_blames_the_network():
    slow, fast = taught(SLOW, SIXTEEN, 1.3), taught(FAST, SIXTEEN, 1.3)
    assert slow.comm_scale > 1.25 > 1.1 > slow.compute_scale > 1.0
    assert fast.compute_scale > 1.2
    assert math.log(slow.comm_scale) / math.log(slow.compute_scale) > math.log(fast.comm_scale) / math.log(
        fast.compute_scale
    )


def test_a_second_layout_is_predicted_better_than_by_compute_alone():
    # the truth: a network half as fast as its data sheet says, and compute as predicted
    truth = Measured(comm_scale=2.0)
    big = replace(SIXTEEN, micro_batch=32)
    measured = step_time(GPT, SIXTEEN, SLOW, measured=truth).total_s
    wanted = step_time(GPT, big, SLOW, measured=truth).total_s
    found = calibrate(GPT, SIXTEEN, SLOW, measured)
    shared = step_time(GPT, big, SLOW, measured=found).total_s
    compute_only = Measured(compute_scale=1 + (measured / step_time(GPT, SIXTEEN, SLOW).total_s - 1) * 2)
    assert abs(shared / wanted - 1) < 0.05
    assert abs(shared / wanted - 1) < abs(step_time(GPT, big, SLOW, measured=compute_only).total_s / wanted - 1)


@settings(max_examples=25)
@given(st.sampled_from([SLOW, FAST]), st.sampled_from(["none", "zero1", "zero3"]), st.floats(0.7, 2.0))
def test_the_measured_step_is_met_and_both_scales_go_the_same_way(cluster, sharding, factor):
    layout = replace(SIXTEEN, sharding=sharding, shard=16 if sharding == "zero3" else 1)
    wanted = factor * step_time(GPT, layout, cluster).total_s
    found = calibrate(GPT, layout, cluster, wanted)
    assert step_time(GPT, layout, cluster, measured=found).total_s == pytest.approx(wanted, rel=1e-3)
    assert (found.compute_scale - 1) * (found.comm_scale - 1) >= 0
    assert 1 / MOST_COMM <= found.comm_scale <= MOST_COMM
