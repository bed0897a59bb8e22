"""Whole verifications: what is planned, what ends in the certificate and in MLflow, and how groups of processes fail."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from small_runs import WithBatchNorm, WithDropout

from scaleray.config import load_config
from scaleray.data import load_sources
from scaleray.errors import ConfigError, PeerLostError, RunFailedError
from scaleray.launch.workers.gloo import OnFirst, UserCode, gloo_processes
from scaleray.training.setup.rank_context import RankContext
from scaleray.verification.variants import Assignment, verify_group
from scaleray.verification.verdicts.verdict_texts import without_statistics
from scaleray.verification.verification_plan import course, default_world_sizes, make_plan
from scaleray.verification.verify import verify
from scaleray.verification.verify_options import VerifyOptions
from scaleray.workload import load_workload

HERE = Path(__file__).parents[1] / "launch"

pytestmark = pytest.mark.usefixtures("mlflow_database")


def config(tmp_path, workload="Line", **more):
    flags = {
        "workload.name": f"{HERE / 'workloads.py'}:{workload}",
        "batch.global_size": 16,
        "optimizer.learning_rate": 0.05,
        "stop.after": "12 steps",
        "tracking.uri": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "checkpoint.storage_path": str(tmp_path / "runs"),
        **more,
    }
    return load_config(flags=flags, environ={})


def plan(tmp_path, question, **more):
    resolved = config(tmp_path, **more)
    workload = load_workload(resolved.workload.name, {})
    return make_plan(resolved, question, workload, load_sources(workload))


# the plan


@pytest.mark.combination
def test_patience_and_a_target_are_no_part_of_the_compared_steps(tmp_path):
    ends = {"evaluation.every": "1 epoch", "stop.patience": 1, "stop.watch": "val/loss min", "stop.at": "val/loss <= 9"}
    workload = WithDropout(num_rows=32)
    sources = load_sources(workload)
    made = make_plan(config(tmp_path, **ends), VerifyOptions("all", steps=3, world_sizes=[1]), workload, sources)
    for job in (made.reference.job, made.reference.own, made.reference.later):
        assert (job.config.stop.patience, job.config.stop.watch, job.config.stop.at) == (None, None, None)
    outcomes, _ = verify_group(
        RankContext(), Assignment(made.reference, tuple(made.groups[1]), 1e-9), {}, sources=sources
    )
    assert {outcome.verdict for outcome in outcomes} == {"equal"}, outcomes


@pytest.mark.combination
def test_a_model_with_dropout_is_equal_on_one_worker_that_goes_on_from_the_references_checkpoint(tmp_path):
    workload = WithDropout(num_rows=32)
    sources = load_sources(workload)
    made = make_plan(
        config(tmp_path), VerifyOptions("all", steps=4, world_sizes=[1], accumulation=[1, 2]), workload, sources
    )
    outcomes, _ = verify_group(
        RankContext(), Assignment(made.reference, tuple(made.groups[1]), 1e-9), {}, sources=sources
    )
    assert [outcome.verdict for outcome in outcomes] == ["equal", "equal"], outcomes
    assert all("dropout off" in outcome.words for outcome in outcomes)


@pytest.mark.parametrize(
    ("world_sizes", "accumulation"), [([1, 2], [1, 3]), ([1, 2, 4], [1, 3]), ([2], [1]), ([1, 2, 4], [1, 2])]
)
def test_batch_norm_gets_rows_of_which_no_micro_batch_is_a_single_one(tmp_path, world_sizes, accumulation):
    workload = WithBatchNorm(num_rows=200)
    question = VerifyOptions(["ddp"], world_sizes=world_sizes, accumulation=accumulation, steps=6)
    made = make_plan(config(tmp_path), question, workload, load_sources(workload))
    reasons = {v.label: without_statistics(v) for variants in made.groups.values() for v in variants}
    assert len(reasons) == len(world_sizes) * len(accumulation) and not any(reasons.values()), reasons


def test_all_strategies_are_planned_where_they_exist(tmp_path):
    made = plan(tmp_path, VerifyOptions("all", world_sizes=[1, 2, 4], accumulation=[1, 2]))
    assert [v.label for v in made.groups[1]] == ["single x 1", "single x 1, 2 micro-batches"]
    assert "ddp x 4, 2 micro-batches" in [v.label for v in made.groups[4]]
    assert not made.refused


def test_every_layout_is_planned_and_named_by_its_degrees(tmp_path):
    made = plan(tmp_path, VerifyOptions(layouts="all", world_sizes=[1, 4], accumulation=[1]))
    labels = {variant.label: variant.strategy for variant in made.groups[4]}
    assert labels["ddp x 4"] == "ddp" and labels["fsdp x 4"] == "fsdp"
    assert labels["replicate 2 x shard 2"] == "fsdp" and labels["shard 2 x tensor 2"] == "tensor"
    assert labels["pipeline 2 x tensor 2"] == labels["pipeline 2 x shard 2"] == "pipeline"
    assert labels["context 4"] == "ddp" and labels["shard 2 x context 2"] == "fsdp"
    assert len(labels) == 15 and not made.refused and not made.groups[1]


@pytest.mark.parametrize(
    ("strategy", "labels"),
    [
        ("auto", ["single x 1", "ddp x 2", "ddp x 2, 2 micro-batches"]),
        ("fsdp", ["single x 1", "fsdp x 2", "fsdp x 2, 2 micro-batches"]),
    ],
)
def test_by_default_the_configs_own_strategy_is_planned(tmp_path, strategy, labels):
    question = VerifyOptions(["own"], world_sizes=[1, 2], accumulation=[1, 2])
    made = plan(tmp_path, question, **{"strategy.name": strategy})
    planned = [variant.label for group in made.groups.values() for variant in group]
    assert [label for label in planned if label != "single x 1, 2 micro-batches"] == labels and not made.refused


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [({}, (1, 2)), ({"strategy.name": "tensor", "parallel.tensor": 4, "scale.workers": 4}, (1, 4))],
)
def test_by_default_as_many_workers_are_compared_as_hold_one_model(tmp_path, strategy, sizes):
    assert default_world_sizes(config(tmp_path, **strategy)) == sizes


@pytest.mark.parametrize(("accumulation", "batch"), [([1, 2], 8), ([1, 4], 32), ([4, 1], 32)])
def test_the_batch_after_the_resume_leaves_every_micro_batch_two_rows_or_is_twice_as_large(
    tmp_path, accumulation, batch
):
    made = plan(tmp_path, VerifyOptions("all", world_sizes=[2], accumulation=accumulation))
    assert course(made)["global_batch_size"] == 16 and course(made)["later_global_batch_size"] == batch


def test_a_variant_is_the_start_of_the_whole_training_on_other_workers(tmp_path):
    more = {"schedule.name": "cosine", "schedule.warmup": "5 steps", "scale.workers": 8, "batch.micro_size": 1}
    made = plan(tmp_path, VerifyOptions("all", steps=3, world_sizes=[2], accumulation=[2]), **more)
    variant = made.groups[2][0]
    recipe = variant.job.recipe
    assert (recipe.total_steps, recipe.schedule_steps, recipe.warmup_steps) == (3, 12, 5)
    assert (recipe.per_worker_batch_size, recipe.micro_batch_size, recipe.accumulation_steps) == (8, 4, 2)
    assert variant.job.config.precision.dtype == "fp64" and variant.own.config.precision.dtype == "fp32"
    assert list(variant.own.splits) == ["train"]  # of its own precision only steps are compared
    assert made.groups[1] == [] and made.reference.world_size == 1


def test_what_a_config_forbids_is_listed_with_the_reason(tmp_path):
    made = plan(
        tmp_path,
        VerifyOptions(strategies=["ddp"], world_sizes=[2], accumulation=[1, 2, 3]),
        **{"strategy.static_graph": True},
    )
    assert [v.label for v in made.groups[2]] == ["ddp x 2"]
    reasons = {(o.strategy, o.accumulation): o.words for o in made.refused}
    assert "static graph cannot accumulate" in reasons["ddp", 2]
    assert "static graph cannot accumulate" in reasons["ddp", 3]


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"world_sizes": [3]}, "nearest: 2 or 4"),
        ({"world_sizes": [32]}, "nearest: 16"),
        ({"world_sizes": [0]}, "positive integers"),
        ({"accumulation": []}, "positive integers"),
        ({"strategies": ["ddp"], "world_sizes": [16], "accumulation": [2]}, "each worker has only 1 sample"),
        ({"strategies": ["dpp"]}, "it must be one of all, single, ddp"),
        ({"strategies": ["single"], "world_sizes": [2]}, "it is for one worker"),
        ({"steps": 0}, "at least 1"),
        ({"bound": 1.0}, "less than 1"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_the_way_out(tmp_path, question, words):
    with pytest.raises(ConfigError, match=words):
        plan(tmp_path, VerifyOptions(**{"strategies": "all", **question}))


# plain gloo processes


def given(place, value):
    values: list = [None] * place.world_size
    torch.distributed.all_gather_object(values, value)
    return values


def test_what_is_large_goes_to_the_first_process_alone():
    with gloo_processes(2, UserCode(None, {}, None), timeout_s=30) as processes:
        assert processes.run(2, given, OnFirst("large"), workload=object()) == ["large", None]


@pytest.mark.combination
@pytest.mark.parametrize("how", ["kill", pytest.param("sleep", marks=pytest.mark.slow)])
def test_a_variant_that_hangs_or_dies_fails_alone(tmp_path, how):
    args = {"how": how, "at_call": 6, "marker": str(tmp_path / "struck")}
    resolved = config(tmp_path, "Failing", **{"workload.args": args, "scale.collective_timeout_s": 8})
    question = VerifyOptions(["ddp", "zero1", "fsdp"], world_sizes=[1, 2], accumulation=[1], steps=4)
    certificate = verify(resolved, options=question, local=True)
    found = {(o.strategy, o.world_size): o for o in certificate.outcomes if o.verdict != "refused"}
    assert not certificate.passed and "1 of 4 variants differ (the run failed)" in certificate.verdict
    assert [o.verdict for o in found.values()] == ["equal", "differs", "equal", "equal"], found
    failed = found["ddp", 2].mismatch
    assert failed.cause == "the run failed" and ("SIGKILL" if how == "kill" else "rank 1") in failed.why


def leave(place, what):
    if what == "die" and place.rank == 1:
        os._exit(3)
    if what == "kill" and place.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "kill":
        raise PeerLostError("another worker is gone")
    if what == "refuse":
        raise ConfigError("a key", 1, "it must be 2")
    return place.world_size


@pytest.mark.combination
def test_processes_run_groups_of_any_size_and_report_what_ended_them():
    with gloo_processes(2, UserCode(None, {}, None), timeout_s=30) as processes:
        assert [processes.run(n, leave, "", workload=object()) for n in (1, 2, 1)] == [1, 2, 1]
        with pytest.raises(ConfigError, match="it must be 2"):
            processes.run(2, leave, "refuse", workload=object())
        with pytest.raises(RunFailedError, match=r"rank 1 failed: .*code 3"):
            processes.run(2, leave, "die", workload=object())
    killed = pytest.raises(RunFailedError, match=r"rank 0 failed: .*SIGKILL, as the system does when memory runs out")
    with gloo_processes(2, UserCode(None, {}, None), timeout_s=30) as processes, killed:
        processes.run(2, leave, "kill", workload=object())


# under Ray


@pytest.mark.combination
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_verification_on_ray_leaves_its_certificate_in_mlflow(ray_session, tmp_path):
    from mlflow import MlflowClient

    said: list[str] = []
    resolved = config(tmp_path, **{"scale.gpus_per_worker": 0})  # as the driver decides here
    certificate = verify(resolved, strategies=["ddp"], world_sizes=[2], accumulation=[1], steps=4, say=said.append)
    assert certificate.passed and certificate.where == "Ray"
    assert certificate.verdict.startswith("the same training: 1 variants equal one process")
    assert [(o.strategy, o.world_size, o.verdict) for o in certificate.outcomes] == [("ddp", 2, "equal")]
    assert certificate.outcomes[0].comparison.largest < 1e-13
    assert [one["device"] for one in certificate.outcomes[0].workers] == ["cpu"]
    assert any("each worker requests 0.25 CPU" in line for line in said)

    client = MlflowClient(certificate.tracking_uri)
    run = client.get_run(certificate.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["scaleray.kind"] == "verify" and run.data.tags["scaleray.passed"] == "true"
    assert run.data.params["config_hash"] == resolved.hash()
    assert run.data.metrics["verify/loss_difference"] < 1e-13 and run.data.metrics["verify/mismatches"] == 0
    stored = json.loads(
        Path(client.download_artifacts(certificate.run_id, "certificate.json", str(tmp_path))).read_text()
    )
    assert stored["bound"] == 1e-9 and stored["passed"] and stored["environment_hash"]
    assert "verification.txt" in {f.path for f in client.list_artifacts(certificate.run_id)}
