"""Checkpoints and interruptions: Daly's formulas against simulated interruptions and their own optimum, and Llama 3's report."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from scaleray.config.hardware.cluster_text import parse_cluster
from scaleray.errors import ConfigError
from scaleray.planner.cost.checkpoint_stalls import best_interval_s, checkpoint_cost, effective_time_ratio, state_bytes
from scaleray.planner.cost.layout import Layout
from scaleray.planner.models.names import find_model

GPT2 = find_model("gpt2-xl")
H100 = parse_cluster("h100:8x4")
FSDP = Layout(data=32, sharding="zero3")


def simulated_ratio(interval_s, stall_s, restart_s, mtbf_s, *, num_intervals, seed=0):
    """Intervals done one after the other; an interruption throws back to the last checkpoint, also out of a restart."""
    random, wall = np.random.default_rng(seed), 0.0
    for _ in range(num_intervals):
        needed = interval_s + stall_s
        while (failure := random.exponential(mtbf_s)) < needed:
            wall += failure
            needed = restart_s + interval_s + stall_s
        wall += needed
    return num_intervals * interval_s / wall


@pytest.mark.parametrize(
    ("interval_s", "stall_s", "restart_s", "mtbf_s"), [(600, 20, 300, 3600), (1800, 5, 60, 20000), (100, 50, 10, 500)]
)
def test_the_time_ratio_is_what_interruptions_at_random_leave(interval_s, stall_s, restart_s, mtbf_s):
    expected = effective_time_ratio(interval_s, stall_s=stall_s, restart_s=restart_s, mtbf_s=mtbf_s)
    found = simulated_ratio(interval_s, stall_s, restart_s, mtbf_s, num_intervals=20_000)
    assert found == pytest.approx(expected, rel=0.02)  # four standard errors of 20,000 intervals at most


@settings(max_examples=40)
@given(st.floats(0.1, 1000), st.floats(1.0, 1e4))
def test_the_interval_is_the_best_one(stall_s, times):
    mtbf_s = stall_s * times

    def ratio(interval_s):
        return effective_time_ratio(interval_s, stall_s=stall_s, restart_s=0.0, mtbf_s=mtbf_s)

    best = minimize_scalar(
        lambda power: -ratio(math.exp(power)), bounds=(math.log(stall_s) - 3, math.log(mtbf_s) + 3), method="bounded"
    )
    assert ratio(best_interval_s(stall_s, mtbf_s)) == pytest.approx(-best.fun, rel=2e-3)
    if times > 1000:
        assert best_interval_s(stall_s, mtbf_s) == pytest.approx(math.sqrt(2 * stall_s * mtbf_s), rel=0.05), "Young's"


@settings(max_examples=40)
@given(st.floats(1, 1e5), st.floats(0.01, 1e3), st.floats(0, 1e4), st.floats(100, 1e7), st.floats(1.01, 3))
def test_the_ratio_is_a_share_that_falls_with_every_loss(interval_s, stall_s, restart_s, mtbf_s, factor):
    def ratio(**change):
        values = {"stall_s": stall_s, "restart_s": restart_s, "mtbf_s": mtbf_s} | change
        return effective_time_ratio(interval_s, **values)

    assert 0 <= ratio() < ratio(mtbf_s=math.inf) < 1
    assert ratio(stall_s=stall_s * factor) <= ratio() and ratio(restart_s=restart_s * factor) <= ratio()
    assert ratio(mtbf_s=mtbf_s * factor) >= ratio()


def test_llama_3s_interruptions_leave_the_effective_time_that_meta_reports():
    # 419 unexpected interruptions of 16,384 GPUs in 54 days, "higher than 90% effective training time"; storage sustains 2 TB/s
    # (arXiv:2407.21783, sections 3.3.1 and 3.3.4)
    cluster = replace(parse_cluster("h100:8x2048"), storage_gb_per_s=2000, gpu_mtbf_hours=54 * 24 * 16384 / 419)
    layout = Layout(data=128, tensor=8, pipeline=16, sharding="zero1")
    cost = checkpoint_cost(find_model("llama-3-405b"), layout, cluster)
    assert cost.mtbf_s / 3600 == pytest.approx(3.09, abs=0.01)
    assert cost.state_bytes / 16384 < 4e9, "the report has 1 MB to 4 GB for each GPU"
    assert 0.90 < cost.time_ratio < 0.97
    assert cost.is_interval_chosen and cost.stall_s < 1
    synchronous = checkpoint_cost(
        find_model("llama-3-405b"), layout, replace(cluster, storage_gb_per_s=20), is_asynchronous=False
    )
    assert synchronous.stall_s == pytest.approx(synchronous.state_bytes / 20e9) and synchronous.time_ratio < 0.85


def test_a_checkpoint_holds_parameters_and_optimizer_state_once():
    assert state_bytes(GPT2, FSDP) == 12 * GPT2.num_params
    assert state_bytes(GPT2, replace(FSDP, optimizer_bytes=0)) == 4 * GPT2.num_params
    assert state_bytes(GPT2, replace(FSDP, is_mixed=False)) == 10 * GPT2.num_params


def test_an_asynchronous_checkpoint_waits_for_the_copy_and_for_the_one_before():
    cluster = replace(H100, storage_gb_per_s=1.0)
    beside = checkpoint_cost(GPT2, FSDP, cluster, interval_s=600)
    front = checkpoint_cost(GPT2, FSDP, cluster, interval_s=600, is_asynchronous=False)
    assert front.stall_s == front.write_s == beside.write_s == beside.state_bytes / 1e9
    assert beside.stall_s == pytest.approx(beside.state_bytes / 32 / 20e9)
    hurried = checkpoint_cost(GPT2, FSDP, cluster, interval_s=1.0)
    assert hurried.stall_s + 1.0 == pytest.approx(hurried.write_s)
    assert hurried.time_ratio == pytest.approx(1 / hurried.write_s) and hurried.stall_share == pytest.approx(
        1 - 1 / hurried.write_s
    )


def test_what_is_assumed_is_said_and_interruptions_are_off():
    cost = checkpoint_cost(GPT2, FSDP, H100)
    assert cost.mtbf_s is None and cost.interval_s == 600 and not cost.is_interval_chosen
    assert any("4 GB/s" in note for note in cost.notes)
    with pytest.raises(ConfigError, match="positive"):
        checkpoint_cost(GPT2, FSDP, H100, interval_s=0)
