"""The repeatable pipeline of a promoted model: what it trains, its files by kind of cluster, and its limits of alerts."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from optional_programs import needs, program

import scaleray
from scaleray.config.alerts import AlertLimits
from scaleray.errors import UsageError
from scaleray.recording.find_record import FoundRun, find_run
from scaleray.release.gates.policy import Policy
from scaleray.release.promote.pipeline import measured_limits, write_pipeline
from scaleray.release.promote.promote import promote
from scaleray.release.promote.verify_promoted import check_promoted
from tests.recorded_runs import a_run
from tests.release.promote.conftest import POLICY


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
    assert {"the pipeline retrains the promoted model", "the pipeline's folder is unchanged since the promotion"} <= {
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
    with pytest.raises(UsageError, match="already exists with different content"):
        promote(candidates, "champion", against=baselines, policy=POLICY, pipeline=folder, uri=uri)


def test_each_kind_of_cluster_has_its_manifests(four_runs, packed, tmp_path):
    common = {"job.yaml", "pipeline.json", "alerts.yaml", "retrain.sh", "drift.sh", "code/corners.py"}
    assert written(four_runs, packed, tmp_path / "local") == common
    slurm = written(four_runs, packed, tmp_path / "slurm", cluster="slurm")
    assert common | {"slurm/train.sbatch", "slurm/settings.sh"} <= slurm
    assert "sbatch slurm/train.sbatch -c job.yaml" in (tmp_path / "slurm/retrain.sh").read_text()
    assert "ray_up/aws.yaml" in written(four_runs, packed, tmp_path / "ray", cluster="ray-up")
    kubernetes = written(four_runs, packed, tmp_path / "kubernetes", cluster="kubernetes")
    assert common | {"kubernetes/base/storage.yaml"} <= kubernetes


def run_as_cron_does(script, *words, **variables):
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(script.parent), **variables}
    return subprocess.run([script, *words], env=environment, cwd="/", capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["retrain.sh", "drift.sh"])
def test_the_scripts_run_in_the_environment_of_cron(four_runs, packed, tmp_path, name):
    script = tmp_path / "a folder" / name
    written(four_runs, packed, script.parent)
    done = run_as_cron_does(script, "--help")
    assert done.returncode == 0 and "Usage: scaleray" in done.stdout, done.stderr


def test_the_scripts_take_another_interpreter_where_this_one_is_not(four_runs, packed, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/of/another machine/python")
    written(four_runs, packed, tmp_path / "out")
    (tmp_path / "python").write_text('#!/bin/sh\necho "$0 $@"\n')
    (tmp_path / "python").chmod(0o755)
    script = tmp_path / "out" / "drift.sh"
    for given in ({"PYTHON": str(tmp_path / "python")}, {"PATH": f"{tmp_path}:/usr/bin:/bin"}):
        done = run_as_cron_does(script, **given)
        assert done.stdout.startswith(f"{tmp_path}/python -m scaleray gate --against corners@champion"), done.stderr


def test_the_check_for_drift_looks_back_as_many_weeks_as_the_policy_needs_runs(four_runs, packed, tmp_path):
    policy = Policy.model_validate({"drift": {"min_runs": 3}, "convergence": {"min_runs": 2}})
    written(four_runs, packed, tmp_path / "usual")
    written(four_runs, packed, tmp_path / "few", policy=policy)
    echo = {"PYTHON": "/bin/echo"}
    assert "--days 36" in run_as_cron_does(tmp_path / "usual/drift.sh", **echo).stdout
    assert "--days 22" in run_as_cron_does(tmp_path / "few/drift.sh", **echo).stdout
    assert "--days 4" in run_as_cron_does(tmp_path / "few/drift.sh", **echo, DAYS="4").stdout


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


def test_an_unknown_cluster_is_refused_before_anything_is_asked():
    with pytest.raises(UsageError, match="it must be one of local, kubernetes, slurm, ray-up"):
        promote("nowhere", "champion", cluster="mesos")


def test_a_pipeline_without_an_alias_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--pipeline requires an alias"):
        promote("nowhere", pipeline=tmp_path / "new")
