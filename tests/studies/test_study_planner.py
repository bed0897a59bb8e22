"""The planner's model among a study's laws, or the reason why it is not there."""

from __future__ import annotations

import dataclasses

import pytest
from planted_curves import planted
from small_runs import DEFAULTS

from scaleray.config import load_config
from scaleray.errors import UsageError
from scaleray.records.workload_profile import PartProfile, Product, WorkloadProfile
from scaleray.studies.conclusions import _precision as precision_of
from scaleray.studies.conclusions import planner_law
from scaleray.studies.curves.curves import as_curve

CPU = [{"cpu": "some", "accelerators": {}, "device": "cpu"}]
BLOCK = PartProfile(
    name="block", num_parameters=250_000, products=[Product(rows=1, inner=500, columns=500)], num_operations=10
)
PROFILE = WorkloadProfile(
    num_parameters=1_000_000, num_trained_parameters=1_000_000, parameter_bytes=4_000_000, precision="fp32",
    backward_flops=4e6, activation_bytes=1e6, fixed_activation_bytes=0.0, count_per_sample=None,
    parts=[PartProfile(name="first", num_parameters=10), BLOCK, BLOCK, BLOCK, BLOCK, PartProfile(name="last", num_parameters=10)],
)  # fmt: skip


def config(**flags):
    return load_config(flags={**DEFAULTS, "precision.dtype": "fp32", **flags}, environ={})


def law(points=None, profile=PROFILE, hardware=CPU, *, per_node=8, **flags):
    points = planted(lambda n: n**0.9, [1, 2, 4]) if points is None else points
    return planner_law(config(**flags), profile, points, hardware, workers_per_node=per_node)


@pytest.mark.parametrize("mode", ["strong", "weak"])
def test_the_law_meets_the_smallest_point_and_is_judged_like_the_others(mode):
    points = planted(lambda n: n**0.9, [1, 2, 4], mode=mode)
    found = law(points)
    assert found.throughput(1) == pytest.approx(points[0].samples_per_s.value, rel=0.03)
    assert found.throughput(1) < found.throughput(3) < found.throughput(8)
    curve = as_curve(mode, points, laws=[found])
    fit = next(fit for fit in curve.fits if fit.law == "planner")
    assert fit.held_out_error > 0 and set(fit.parameters) == {"scale"}
    assert fit.band[-1][0] == 8


def test_a_curve_that_goes_as_the_planner_says_is_predicted_by_it():
    shape = law().throughput
    points = planted(lambda n: shape(n) / shape(1), [1, 2, 4], between=0.001, within=0.001)
    found = law(points)
    assert as_curve("strong", points, laws=[found]).best_law == "planner"


def test_a_node_that_is_full_is_drawn_on_as_if_it_were_larger():
    assert law(per_node=4).throughput(8) == pytest.approx(law(per_node=8).throughput(8))


def test_a_batch_that_cannot_be_divided_further_leaves_the_law_at_the_last_size():
    points = [
        dataclasses.replace(p, global_batch_size=4, micro_batch_size=4 // p.workers)
        for p in planted(lambda n: n, [1, 2, 4])
    ]
    found = law(points)
    assert found.throughput(8) == found.throughput(4)


@pytest.mark.parametrize(
    ("points", "more", "reason"),
    [
        ({"marks": ["oversubscribed"]}, {}, "separate cores"),
        ({"marks": ["emulated"]}, {}, "steps sleep"),
        ({"strategy": "gossip"}, {}, "strategy is gossip: the planner supports only"),
        ({}, {"compression.name": "topk"}, r"compression\.name is topk"),
        ({}, {"fine_tuning.lora_rank": 4}, "freezes parameters"),
        ({}, {"profile": "the loss failed"}, "the loss failed"),
        ({}, {"hardware": [{"accelerators": {"names": ["Mystery 9000"]}}], "scale.gpus_per_worker": 1}, "Mystery 9000"),
        ({}, {"precision.dtype": "fp64"}, "fp64"),
        ({}, {"per_node": 2}, "network between nodes is unknown, and 4 workers need 2 nodes"),
    ],
)
def test_what_the_planner_does_not_know_is_the_reason(points, more, reason):
    found = [dataclasses.replace(p, **points) for p in planted(lambda n: n**0.9, [1, 2, 4])]
    with pytest.raises(UsageError, match=reason):
        law(found, **more)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"precision.dtype": "fp32"}, "fp32"),
        ({"precision.dtype": "fp32", "precision.tf32": True}, "tf32"),
        ({"precision.dtype": "bf16", "precision.tf32": True}, "bf16"),
    ],
)
def test_tensor_cores_multiply_fp32_where_they_are_let(flags, name):
    assert precision_of(config(**flags)) == name
