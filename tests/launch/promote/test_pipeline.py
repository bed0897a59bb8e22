"""The repeatable pipeline of a promoted model: what it trains, its files by kind of cluster, and its limits of alerts."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from optional_programs import needs, program

import scaleray
from scaleray.config.alerts import AlertLimits
from scaleray.errors import UsageError
from scaleray.gates.policy import Policy
from scaleray.launch.promote.check import check_promoted
from scaleray.launch.promote.measured_limits import measured_limits
from scaleray.launch.promote.pipeline import write_pipeline
from scaleray.launch.promote.promote import promote
from scaleray.launch.promote.schedules import days_of
from scaleray.manifests.rules.read import check_manifests
from scaleray.tracking.find_record import FoundRun, find_run
from tests.launch.promote.conftest import POLICY
from tests.recorded_runs import a_run


@pytest.fixture(scope="module")
def packed(four_runs, tmp_path_factory):
    """A packed model as its pipeline sees it: its note and its code."""
    folder = tmp_path_factory.mktemp("packed")
    (folder / "code").mkdir()
    shutil.copy(Path(four_runs[0].run_dir).parents[1] / "corners.py", folder / "code")
    (folder / "run.json").write_text(json.dumps({"config": {"workload": {"name": "corners.py:Named"}}}))
    return folder


def written(four_runs, packed, out, **more):
    runs = [find_run(record.run_dir) for record in four_runs[:2]]
    write_pipeline(runs, packed, out, model="corners@champion", uri=four_runs[0].tracking_uri, **more)
    return {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}


@pytest.mark.combination
def test_the_job_trains_what_was_promoted_and_the_version_has_the_pipeline(sides, tmp_path):
    candidates, baselines, uri = sides
    folder = tmp_path / "pipeline"
    found = promote(candidates, "champion", against=baselines, policy=POLICY, pipeline=folder, uri=uri)
    assert found.version == 1, found.not_passed
    record = check_promoted("corners@champion", pipeline=folder, uri=uri)
    assert record.answer == "pass", record.lines()
    assert {"the pipeline trains what was promoted", "the pipeline's folder is the promoted one"} <= {
        check.what for check in record.gates[0].checks
    }
    again = scaleray.train(scaleray.load_config(folder / "job.yaml"), base_dir=folder, local=True)
    first = scaleray.RunRecord.from_json(Path(candidates[0], "record.json").read_text())
    assert again.metrics == first.metrics and again.name != first.name and again.tracking_uri == uri
    (folder / "job.yaml").write_text((folder / "job.yaml").read_text().replace("0.02", "0.03"))
    words = [
        check.words
        for check in check_promoted("corners/1", pipeline=folder, uri=uri).gates[0].checks
        if check.answer == "fail"
    ]
    assert words == ["job.yaml was changed"]
    with pytest.raises(UsageError, match="is another one"):
        promote(candidates, "champion", against=baselines, policy=POLICY, pipeline=folder, uri=uri)


def test_each_kind_of_cluster_has_its_manifests_and_its_schedule(four_runs, packed, tmp_path):
    common = {"job.yaml", "pipeline.json", "alerts.yaml", "retrain.sh", "drift.sh", "code/corners.py"}
    assert written(four_runs, packed, tmp_path / "local") == common | {"crontab.txt"}
    slurm = written(four_runs, packed, tmp_path / "slurm", cluster="slurm", schedule="30 2 * * *")
    assert common | {"crontab.txt", "slurm/train.sbatch", "slurm/settings.sh"} <= slurm
    lines = (tmp_path / "slurm/crontab.txt").read_text().splitlines()
    assert lines[3] == "#SCRON --time=00:10:00" and lines[4] == "30 2 * * * $PIPELINE/retrain.sh"
    assert "sbatch slurm/train.sbatch -c job.yaml" in (tmp_path / "slurm/retrain.sh").read_text()
    assert "ray_up/aws.yaml" in written(four_runs, packed, tmp_path / "ray", cluster="ray-up")
    kubernetes = written(four_runs, packed, tmp_path / "kubernetes", cluster="kubernetes")
    assert common | {"kubernetes/retrain.yaml", "kubernetes/drift.yaml", "kubernetes/base/storage.yaml"} <= kubernetes


def test_jobs_on_kubernetes_keep_the_rules_and_see_the_shared_folder(four_runs, packed, tmp_path):
    written(four_runs, packed, tmp_path / "out", cluster="kubernetes")
    retrain, drift = (
        yaml.safe_load((tmp_path / f"out/kubernetes/{name}.yaml").read_text()) for name in ("retrain", "drift")
    )
    assert (retrain["kind"], retrain["spec"]["schedule"]) == ("RayCronJob", "0 3 * * 1")
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": retrain["metadata"],
        "spec": retrain["spec"]["jobTemplate"],
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert check_manifests(tmp_path / "job.yaml") == {"manifests": 1, "faults": []}
    pod = drift["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"] == ["bash", "/mnt/scaleray/pipelines/corners-champion/drift.sh"]
    assert {"name": "shared", "mountPath": "/mnt/scaleray"} in pod["containers"][0]["volumeMounts"]
    assert {one["name"] for one in pod["volumes"]} == {one["name"] for one in pod["containers"][0]["volumeMounts"]}


@pytest.mark.parametrize(
    ("schedule", "runs", "days"),
    [
        ("0 3 * * 1", 5, 36),  # five weeks, and a day
        ("0 3 * * MON", 3, 22),
        ("30 2 1 * *", 5, 154),  # five of the longest months
        ("0 3 * * 1-5", 5, 8),
        ("0 3 * * *", 5, 6),
        ("0 */6 * * *", 4, 2),
        ("0 3 1 1 *", 2, 732),
        ("0 3 29 2 *", 1, 1462),
        ("0 0 13 * 7", 1, 8),  # of a day of the month and one of the week cron asks for either
    ],
)
def test_the_days_of_a_schedule_hold_as_many_runs_as_are_asked_for(schedule, runs, days):
    assert days_of(schedule, runs) == days


def test_the_check_for_drift_looks_back_as_far_as_its_schedule_and_policy_need(four_runs, packed, tmp_path):
    policy = Policy.model_validate({"drift": {"min_runs": 3}, "convergence": {"min_runs": 2}})
    written(four_runs, packed, tmp_path / "usual")
    written(four_runs, packed, tmp_path / "daily", schedule="0 3 * * *", policy=policy)
    assert "scaleray drift corners@champion --days 36 --uri" in (tmp_path / "usual/drift.sh").read_text()
    assert "scaleray drift corners@champion --days 4 --uri" in (tmp_path / "daily/drift.sh").read_text()


@needs("promtool")
def test_promtool_takes_the_alerts_with_the_limits_that_were_measured(four_runs, packed, tmp_path):
    written(four_runs, packed, tmp_path / "out")
    done = subprocess.run(
        [program("promtool"), "check", "rules", tmp_path / "out/alerts.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_scripts_are_sound(four_runs, packed, tmp_path):
    for cluster in ("local", "slurm"):
        written(four_runs, packed, tmp_path / cluster, cluster=cluster)
        for name in ("retrain.sh", "drift.sh"):
            script = tmp_path / cluster / name
            assert script.stat().st_mode & 0o100
            done = subprocess.run([program("shellcheck"), script], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout


def a_steps_file(*, loss=lambda step: 1.0, time=lambda step: 0.1, number=300):
    rows = [f"{n},{loss(n)},64,64,0.1,1.0,{time(n)},0,0,True,1,0," for n in range(1, number + 1)]
    head = "step,loss,count,num_samples,learning_rate,grad_norm,step_time_s,input_wait_s,epoch,is_finite,world_size,recorded_at,losses"
    return "\n".join([head, *rows])


class TestMeasuredLimits:
    def found(self, record=None, **more):
        return FoundRun(record or a_run(), "here", None, a_steps_file(**more))

    def test_a_limit_is_twice_what_was_seen_and_at_least_half_of_the_usual_one(self):
        run = dataclasses.replace(a_run(), input_wait_share=0.3)
        limits = measured_limits([self.found(run, time=lambda step: 40.0 if step == 7 else 0.1)]).limits
        assert (limits.input_wait_share, limits.no_progress_s) == (0.6, 80.0)
        calm = measured_limits([self.found(dataclasses.replace(a_run(), input_wait_share=0.0))]).limits
        assert (calm.input_wait_share, calm.no_progress_s) == (0.1, AlertLimits().no_progress_s / 2)

    def test_three_losses_in_a_row_make_a_spike_and_one_does_not(self):
        one = measured_limits([self.found(loss=lambda step: 9.0 if step == 200 else 1.0)]).limits
        three = measured_limits([self.found(loss=lambda step: 9.0 if step in (200, 201, 202) else 1.0)]).limits
        assert one.loss_spike_mads == AlertLimits().loss_spike_mads / 2
        assert three.loss_spike_mads == pytest.approx(2 * 8 / 0.011, rel=1e-2)

    def test_what_was_not_measured_keeps_its_usual_limit_and_is_not_listed(self):
        bare = dataclasses.replace(a_run(), input_wait_share=None, samples_per_s=None, memory=[])
        found = measured_limits([FoundRun(bare, "here")])
        assert (found.limits, found.lines, found.samples_per_s) == (AlertLimits(), (), None)

    def test_memory_may_use_half_of_what_was_left(self):
        run = dataclasses.replace(a_run(), peak_memory_bytes=[60], memory=[{"device_bytes": 100}])
        assert measured_limits([self.found(run)]).limits.memory_share == 0.8


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"cluster": "mesos"}, "kinds are local, kubernetes, slurm, ray-up"),
        ({"schedule": "weekly"}, "five fields of cron"),
        ({"schedule": "0 3 * * ;"}, "five fields of cron"),
        ({"schedule": "0 24 * * 1"}, "the field '24' must be within 0 and 23"),
        ({"schedule": "0 3 * * 5-1"}, "the field '5-1' must be within 0 and 7"),
        ({"schedule": "0 3 31 2 *"}, "it is too rare"),
    ],
)
def test_an_unknown_cluster_and_a_schedule_with_a_slip_are_refused_before_anything_is_asked(more, message):
    with pytest.raises(UsageError, match=message):
        promote("nowhere", "champion", **more)


def test_a_pipeline_without_an_alias_is_refused(tmp_path):
    with pytest.raises(UsageError, match="it is written for an alias"):
        promote("nowhere", pipeline=tmp_path / "new")
