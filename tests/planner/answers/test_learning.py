"""What a team's own points teach the planner: nothing that held-out points do not confirm."""

import dataclasses
import math
import random

import pytest
import study_examples

from scaleray.config.hardware.catalogue import CATALOGUE
from scaleray.config.hardware.cluster_text import parse_cluster
from scaleray.errors import UsageError
from scaleray.planner.answers.learned_constants import learn
from scaleray.planner.answers.team_points import TeamPoint, TeamPoints, model_key, points_of
from scaleray.planner.cost.block_pass import Measured
from scaleray.planner.cost.step_time import step_time
from scaleray.planner.models.flop_count_as_model import from_workload
from scaleray.records.workload_profile import PartProfile, Product, WorkloadProfile


def counted(width=1024, params=12_000_000):
    part = PartProfile(
        name="block", num_parameters=params, products=[Product(rows=512, inner=width, columns=4096)] * 3,
        activation_bytes=4e7, output_bytes=1e6, traffic_bytes=1e8, num_operations=30,
    )  # fmt: skip
    return WorkloadProfile(
        num_parameters=10**8, num_trained_parameters=10**8, parameter_bytes=4 * 10**8, precision="bf16", backward_flops=1e11,
        activation_bytes=1e9, fixed_activation_bytes=0, count_per_sample=512, parts=[part] * 10,
    )  # fmt: skip


MODELS = {"mine": counted(), "other": counted(2048), "large": counted(params=50_000_000)}
MINE = from_workload(MODELS["mine"], name="mine")
CLUSTER = parse_cluster("h100:8x4")
SLOWER = Measured(compute_scale=1.4)


def team(truth=SLOWER, *, noise=0.03, studies=3, model="mine", gpu="h100", sizes=(1, 2, 4, 8, 16), seed=0):
    """Points of a cluster on which everything takes as much longer as `truth` says."""
    rng, found = random.Random(seed), []
    for study in range(studies):
        for workers in sizes:
            point = TeamPoint(
                study=f"study {study}", model=model, gpu=gpu, workers=workers, workers_per_node=8, strategy="ddp",
                micro_batch=8 * (study + 1), accumulation=1, precision="bf16", step_time_s=1.0, measured_at=1.0,
            )  # fmt: skip
            exact = step_time(from_workload(MODELS[model], name=model), point.layout, point.cluster(), measured=truth)
            found.append(dataclasses.replace(point, step_time_s=exact.total_s * math.exp(rng.gauss(0, noise))))
    return TeamPoints(tuple(found), MODELS)


def lesson(known, key="mine"):
    return learn(known, MINE, CLUSTER, key=key, catalogue=CATALOGUE)


def test_what_the_teams_machines_take_longer_is_found_and_confirmed_by_studies_left_out():
    found = lesson(team())
    assert found.measured.compute_scale == pytest.approx(1.4, rel=0.03)
    assert found.is_used and found.is_of_model
    assert found.before.median > 0.25 and found.after.median < 0.05
    assert "learned from 15 points in 3 studies of this model" in found.lines()[0]
    assert "from data sheets" in found.lines()[1] and "each study from the others" in found.lines()[1]


def test_communication_is_learned_where_steps_show_it():
    known = team(Measured(comm_scale=3.0), noise=0.0, sizes=(1, 16, 32, 64), model="large")
    found = learn(known, known.profile("large"), CLUSTER, key="large", catalogue=CATALOGUE)
    assert found.measured.comm_scale == pytest.approx(3.0, rel=0.05)
    assert found.measured.compute_scale == pytest.approx(1.0, rel=0.05)
    assert found.before.median > 0.3 and found.after.median < 0.05


def test_what_predicts_no_better_than_data_sheets_is_said_and_not_used():
    used = [lesson(team(Measured(), noise=0.02, studies=2, seed=seed)) for seed in range(8)]
    assert not all(found.is_used for found in used)
    refused = next(found for found in used if not found.is_used)
    assert "not used: predictions did not improve" in refused.lines()[0]
    assert refused.after.median >= refused.before.median


def test_one_study_is_judged_point_by_point_and_one_point_teaches_nothing():
    alone = lesson(team(studies=1))
    assert alone.is_used and "each point from the others of its study" in alone.lines()[1]
    single = lesson(team(studies=1, sizes=(4,)))
    assert not single.is_used and single.after is None and "at least two are needed" in single.lines()[0]


def test_the_models_own_points_are_preferred_and_others_teach_where_there_are_none():
    mixed = TeamPoints(team().points + team(Measured(compute_scale=3.0), model="other").points, MODELS)
    assert lesson(mixed).measured.compute_scale == pytest.approx(1.4, rel=0.03)
    of_others = lesson(TeamPoints(team(Measured(compute_scale=3.0), model="other").points, MODELS), key=None)
    assert of_others.measured.compute_scale == pytest.approx(3.0, rel=0.05) and not of_others.is_of_model
    assert "of other models" in of_others.lines()[0]


def test_points_on_another_gpu_teach_nothing_of_this_one():
    with pytest.raises(UsageError, match="--learn found points only on a100-80, but the plan is for h100"):
        lesson(team(gpu="a100-80"))
    with pytest.raises(UsageError, match=r"found no points(?s:.*)omitted: curve: the fan was off"):
        lesson(TeamPoints((), {}, ("curve: the fan was off",)))


def a_study(**more):
    record = study_examples.study(modes=("strong",), sizes=(1, 2, 4, 8), price=None)
    topology = {"nodes": [{"cpus": 64, "gpus": 8}], "workers": [{"accelerators": {"names": ["NVIDIA H100 80GB HBM3"]}}]}
    config = {**record.config, "scale": {"gpus_per_worker": 1}, "precision": {"dtype": "bf16"}}
    conditions = dataclasses.replace(record.conditions, topology=topology)
    given = {"config": config, "model_profile": MODELS["mine"].to_dict(), **more}
    return dataclasses.replace(record, conditions=conditions, **given)


def test_a_study_teaches_by_each_of_its_points_and_what_does_not_count_is_named():
    found = points_of([a_study()])
    assert [(p.workers, p.workers_per_node, p.gpu, p.precision) for p in found.points] == [
        (n, 8, "h100", "bf16") for n in (1, 2, 4, 8)
    ]
    assert found.points[0].step_time_s == pytest.approx(0.24) and list(found.models) == [model_key(a_study().config)]
    assert points_of([a_study(), a_study()]).points == found.points
    uncounted = points_of([a_study(model_profile=None)])
    assert not uncounted.points and "operations were not counted" in uncounted.skipped[0]
    compressed = points_of([a_study(config={**a_study().config, "compression": {"name": "topk"}})])
    assert not compressed.points and "compression.name" in compressed.skipped[0]
    curve = study_examples.curve("strong", [1, 2], marks=("emulated",))
    assert "1 workers: it is emulated" in points_of([a_study(curves=[curve])]).skipped[0]
    curve = study_examples.curve("strong", [1, 2], reused_from="another")
    assert points_of([a_study(curves=[curve])]).points == ()
