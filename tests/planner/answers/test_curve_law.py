"""The planner as a law for a measured curve: meets the measured size, and predicts the others as `step_time` does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from scaleray.config.hardware.catalogue import CATALOGUE
from scaleray.config.hardware.cluster_text import parse_cluster
from scaleray.errors import UsageError
from scaleray.planner.answers.curve_law import Size, predicted_throughput
from scaleray.planner.cost.layout import Layout
from scaleray.planner.cost.step_time import step_time
from scaleray.planner.models.names import find_model

GPT = find_model("gpt2")
NODE = parse_cluster("a100-80:8")
LAYOUT = Layout(gradient_bytes=4)


def sizes(*workers, batch=64, mode="strong"):
    per_worker = [batch // n if mode == "strong" else batch for n in workers]
    return [
        Size(
            workers=n, global_batch_size=rows * n, micro_batch_size=min(8, rows), accumulation_steps=math.ceil(rows / 8)
        )
        for n, rows in zip(workers, per_worker, strict=True)
    ]


def test_the_law_meets_the_measured_size_whatever_the_order_of_sizes():
    law = predicted_throughput(GPT, LAYOUT, NODE, sizes(4, 1, 2), measured_step_s=1.0)
    assert law(1) == pytest.approx(64, rel=0.02)
    assert law(1) < law(2) < law(4) < 4 * law(1)


def test_sizes_are_predicted_as_the_planner_predicts_them():
    exact = step_time(GPT, replace(LAYOUT, micro_batch=8, accumulation=8), replace(NODE, gpus_per_node=1)).total_s
    law = predicted_throughput(GPT, LAYOUT, NODE, sizes(1, 8), measured_step_s=exact)
    on_eight = step_time(GPT, replace(LAYOUT, data=8, micro_batch=8), NODE).total_s
    assert law(8) == pytest.approx(64 / on_eight, rel=1e-3)


def test_between_sizes_the_law_is_a_power_of_the_workers():
    law = predicted_throughput(GPT, LAYOUT, NODE, sizes(2, 8), measured_step_s=1.0)
    assert law(4) == pytest.approx(math.sqrt(law(2) * law(8)))


def test_nodes_beyond_the_first_need_a_known_network():
    with pytest.raises(UsageError, match="network between nodes is unknown"):
        predicted_throughput(GPT, LAYOUT, NODE, sizes(1, 16), measured_step_s=1.0)
    joined = replace(NODE, network=CATALOGUE.find_network("25G"))
    slow = predicted_throughput(GPT, LAYOUT, joined, sizes(1, 16, mode="weak"), measured_step_s=1.0)
    board = replace(NODE, gpus_per_node=16)
    fast = predicted_throughput(GPT, LAYOUT, board, sizes(1, 16, mode="weak"), measured_step_s=1.0)
    assert slow(16) < fast(16)


@pytest.mark.parametrize(("replicas", "shard"), [(1, 8), (4, 2)])
def test_sharded_training_keeps_its_replicas_on_every_size(replicas, shard):
    layout = replace(LAYOUT, sharding="zero3", data=replicas)
    exact = step_time(
        GPT, replace(layout, data=1, micro_batch=8, accumulation=8), replace(NODE, gpus_per_node=1)
    ).total_s
    law = predicted_throughput(GPT, layout, NODE, sizes(1, 8), measured_step_s=exact)
    on_eight = step_time(GPT, replace(layout, data=8, shard=shard, micro_batch=8), NODE).total_s
    assert law(8) == pytest.approx(64 / on_eight, rel=1e-3)


def test_a_measured_time_that_no_calibration_reaches_is_refused():
    with pytest.raises(
        UsageError, match=r"a step on 1 worker is 0\.01 ms: the closest prediction for this model and hardware is"
    ):
        predicted_throughput(GPT, LAYOUT, NODE, sizes(1, 2), measured_step_s=1e-5)
