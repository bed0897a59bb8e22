"""Whole sweeps on a cluster: records, failures, populations, what is freed, and going on after an interruption."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from shown_progress import shown
from test_interrupt import placement_groups, wait_for_no_actors
from waiting import wait_until

from scaleray.config import load_config
from scaleray.errors import ClusterError, DataError, RunFailedError
from scaleray.records.sweep_record import SweepRecord
from scaleray.sweeps.sweep_question import question_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

HERE = Path(__file__).parents[1] / "launch"
ROOT = HERE.parent.parent


def options(tmp_path, **more):
    values = {
        "workload.name": f"{HERE / 'workloads.py'}:Sweepable",
        "batch.global_size": 8,
        "optimizer.name": "sgd",
        "optimizer.learning_rate": 0.02,
        "optimizer.momentum": 0.0,
        "stop.after": "6 epochs",
        "evaluation.every": "1 epoch",
        "scale.collective_timeout_s": 60,
        "tracking.uri": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "checkpoint.storage_path": str(tmp_path / "runs"),
    }
    return {**values, **more}


def run(tmp_path, flags=None, *, said=None, **asked):
    from scaleray.sweeps.sweep import sweep

    config = load_config(flags=options(tmp_path, **(flags or {})), environ={})
    say = said.append if said is not None else lambda text: None
    return sweep(config, say=say, **asked)


def children(record):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=record.tracking_uri)
    query = f"tags.`mlflow.parentRunId` = '{record.run_id}'"
    return client.get_run(record.run_id), client.search_runs([record.experiment_id], query)


class Said(list):
    """What a sweep says; whoever sees its stages looks with each line."""

    def __init__(self, seen):
        self.seen = seen

    def append(self, line):
        super().append(line)
        self.seen.look()


def test_trials_of_two_workers_one_of_which_fails_and_one_that_never_fits(ray_session, tmp_path, monkeypatch):
    with shown(monkeypatch, is_terminal=True) as seen:
        said = Said(seen)
        record = run(
            tmp_path,
            {"stop.at": "val/loss <= 0.3", "optimizer.learning_rate": 0.05},
            said=said,
            batch_sizes="8,16,128",
            workers_per_trial=2,
            search="grid",
            vary=("workload.args.fail_at=0,3",),
            seeds=2,
        )
    of_trials = [line for view in seen.views for line in view.splitlines() if "trials, about" in line]
    assert of_trials and all("━" in line and line.rstrip().endswith("left") and len(line) <= 80 for line in of_trials)
    assert any(re.match(r"trial +\d+/\d+ \|", line.strip()) for line in said), "a line for each trial, also in a pipe"
    by_kind = {}
    for trial in record.trials:
        by_kind.setdefault((trial.batch_size, trial.settings["workload.args.fail_at"]), []).append(trial)
    good = [*by_kind[8, 0], *by_kind[16, 0]]
    assert {t.status for t in good} == {"target reached"}
    assert all(t.samples_to_target == t.curve[-1][0] and t.value <= 0.3 and t.workers == 2 for t in good)
    assert len({t.seed for t in by_kind[8, 0]}) == 2
    # the failure is said with its cause, and the workers took the other trials all the same
    failed = [*by_kind[8, 3], *by_kind[16, 3]]
    assert {t.status for t in failed} == {"failed"}
    assert all("the user's own mistake" in t.error for t in failed)
    assert [t.status for t in [*by_kind[128, 0], *by_kind[128, 3]]] == ["never fits", "never fits"]
    assert "one global batch needs 128" in by_kind[128, 0][0].error
    assert any(line.startswith("Fastest") for line in record.words)
    # on disk, in MLflow, and nowhere else
    folder = Path(record.folder)
    assert SweepRecord.read(folder / "record.json") == record
    assert {path.name for path in folder.iterdir()} == {
        *(".lock", "alerts.jsonl", "live.json", "record.json", "sweep.json", "trials"),
        *("report.html", "trials.csv", "settings.csv", "figures"),
    }
    parent, runs = children(record)
    assert parent.info.status == "FINISHED" and parent.data.tags["scaleray.kind"] == "sweep"
    assert {r.info.run_id for r in runs} == {t.run_id for t in record.trials}
    assert sum(r.info.status == "FAILED" for r in runs) == 6
    # one process group after another in the same processes: nothing is left of them
    wait_until(lambda: not placement_groups())
    wait_for_no_actors()
    assert sum("| failed: " in line for line in said) == 4


@pytest.mark.slow
def test_a_population_takes_over_weights_and_mutates_learning_rates(ray_session, tmp_path):
    record = run(
        tmp_path,
        {"stop.after": "10 epochs", "optimizer.learning_rate": 0.01},
        learning_rates="1e-6,1e-5,1e-4,1e-2",
        scheduler="pbt",
    )
    assert {t.status for t in record.trials} == {"finished"}
    mutated = [t for t in record.trials if t.settings.get("mutations")]
    assert mutated
    planned = {1e-6, 1e-5, 1e-4, 1e-2}
    assert any(t.learning_rate not in planned for t in mutated)
    # alone, a rate of 1e-6 moves the loss by less than a thousandth
    idle = [t for t in mutated if t.settings["mutations"][0].startswith(("learning rate 1e-06", "learning rate 1e-05"))]
    assert idle and all(t.value < 0.9 * t.curve[0][2] for t in idle)
    assert sorted(t.number for t in record.trials) == [0, 1, 2, 3]
    assert not (Path(record.folder) / "states").exists()


def test_trials_that_can_never_fit_are_refused_at_once(ray_session, tmp_path):
    with pytest.raises(ClusterError, match="--workers-per-trial is 12, which needs 12 workers"):
        run(tmp_path, batch_sizes="48", workers_per_trial=12)
    assert not list((tmp_path / "runs").glob("*")) and not placement_groups()


@pytest.mark.combination
def test_when_all_trials_failed_the_most_common_cause_is_said_once(ray_session, tmp_path):
    with pytest.raises(RunFailedError) as caught:
        run(tmp_path, {"workload.args": {"fail_at": 2}}, batch_sizes="8,16")
    text = str(caught.value)
    assert "all 2 trials failed, 2 of them with:" in text
    assert text.count("the user's own mistake") <= 1 and "record.json" in text
    record = SweepRecord.read(text.rpartition(": ")[2].strip())
    assert [t.status for t in record.trials] == ["failed", "failed"]


# what follows takes minutes


def command(tmp_path, *words, **flags):
    given = [word for key, value in options(tmp_path, **flags).items() for word in (f"--{key}", str(value))]
    return [sys.executable, "-m", "scaleray", "sweep", *words, *given]


def start(ray_session, words):
    environment = {**os.environ, "RAY_ADDRESS": ray_session.address}
    return subprocess.Popen(
        words, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def done_trials(tmp_path):
    return sorted((tmp_path / "runs").glob("*/trials/*.json"))


SLOW = {"workload.args": '{"seconds": 0.05}'}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_frees_everything_and_goes_on_where_it_was(ray_session, tmp_path, number):
    words = command(tmp_path, "--batch-sizes", "8,16", "--seeds", "3", "--workers-per-trial", "2", **SLOW)
    process = start(ray_session, words)
    wait_until(lambda: len(done_trials(tmp_path)) >= 2 or process.poll() is not None)
    process.send_signal(number)
    output, _ = process.communicate(timeout=600)
    assert "Traceback" not in output, output
    if number != signal.SIGKILL:
        assert process.returncode == 130 and "to continue: scaleray sweep --continue" in output
    wait_until(lambda: not placement_groups())
    wait_for_no_actors()
    before = {path.name: path.read_text() for path in done_trials(tmp_path)}
    assert 2 <= len(before) < 6
    (folder,) = (tmp_path / "runs").iterdir()
    process = start(ray_session, [sys.executable, "-m", "scaleray", "sweep", "--continue", str(folder)])
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    after = {path.name: path.read_text() for path in done_trials(tmp_path)}
    assert len(after) == 6 and all(after[name] == text for name, text in before.items())
    record = SweepRecord.read(folder / "record.json")
    assert [t.number for t in record.trials] == list(range(6))
    assert len({(t.batch_size, t.seed) for t in record.trials}) == 6
    _, runs = children(record)
    assert len(runs) == 6
    again = start(ray_session, [sys.executable, "-m", "scaleray", "sweep", "--continue", str(folder), "--json"])
    output, _ = again.communicate(timeout=600)
    assert "has already finished" in output


@pytest.mark.slow
def test_ctrl_c_while_workers_start_frees_everything(ray_session, tmp_path):
    process = start(ray_session, command(tmp_path, "--batch-sizes", "8,16", "--workers-per-trial", "2", **SLOW))
    wait_until(lambda: placement_groups() or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130 and "Traceback" not in output, output
    wait_until(lambda: not placement_groups())
    wait_for_no_actors()
    assert not done_trials(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["asha", "hyperband", "median", "pbt"])
def test_schedulers_end_with_more_trials_than_room(ray_session, tmp_path, scheduler):
    rates = "1e-5,1e-4,1e-3,1e-2,2e-2,3e-2,4e-2"
    record = run(tmp_path, learning_rates=rates, scheduler=scheduler, workers_per_trial=2, search="grid")
    assert len(record.trials) == 7
    assert {t.status for t in record.trials} <= {"finished", "stopped early"}
    best = min(record.trials, key=lambda t: t.value)
    if scheduler != "pbt":
        assert best.learning_rate >= 1e-2 and best.status == "finished"
        assert any(t.status == "stopped early" for t in record.trials)
        assert all(len(t.curve) < 6 for t in record.trials if t.status == "stopped early")
    wait_until(lambda: not placement_groups())


@pytest.mark.slow
def test_optuna_runs_what_was_asked(ray_session, tmp_path):
    pytest.importorskip("optuna")
    record = run(
        tmp_path,
        batch_sizes="8..256",
        learning_rates="1e-3..3e-2",
        search="optuna",
        trials=6,
        seeds=2,
        workers_per_trial=2,
    )
    ran = [t for t in record.trials if t.status != "never fits"]
    assert [t.status for t in ran] == ["finished"] * 12
    assert len({(t.batch_size, t.learning_rate) for t in ran}) == 6
    assert [t.number for t in record.trials] == list(range(len(record.trials)))


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced_and_its_trial_runs_again(ray_session, tmp_path):
    marker = tmp_path / "killed"
    record = run(
        tmp_path,
        {"workload.args": {"kill_at": 3, "rank": 1, "marker": str(marker)}},
        batch_sizes="8,16,32",
        workers_per_trial=2,
    )
    assert marker.exists()
    assert [t.status for t in record.trials] == ["finished"] * 3
    assert all(len(t.curve) == 6 for t in record.trials)


@pytest.mark.slow
def test_a_cluster_that_others_use_is_waited_for(ray_session, tmp_path):
    import threading

    import ray

    others = ray.util.placement_group([{"CPU": 5}])
    ray.get(others.ready(), timeout=60)
    timer = threading.Timer(8.0, ray.util.remove_placement_group, [others])
    timer.start()
    record = run(tmp_path, batch_sizes="8,16", workers_per_trial=2)
    assert [t.status for t in record.trials] == ["finished"] * 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_sweeps_on_one_cluster_end_both(ray_session, tmp_path):
    # one sets trials aside and takes them up again, one stops them, and each alone would fill the cluster
    rates = ("--learning-rates", "1e-4,1e-3,1e-2,2e-2", "--search", "grid", "--workers-per-trial", "2")
    flags = {"stop.after": "4 epochs"}
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    started = [
        start(ray_session, command(folder, *rates, "--scheduler", scheduler, **flags))
        for folder, scheduler in zip(folders, ("hyperband", "asha"), strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, output, folder in zip(started, outputs, folders, strict=True):
        assert process.returncode == 0, output
        (sweep_folder,) = (folder / "runs").iterdir()
        record = SweepRecord.read(sweep_folder / "record.json")
        assert len(record.trials) == 4 and {t.status for t in record.trials} <= {"finished", "stopped early"}
    wait_until(lambda: not placement_groups())
    wait_for_no_actors()


def test_a_sweep_continues_on_its_own_data_alone():
    from scaleray.sweeps.sweep import check_data_of
    from scaleray.sweeps.sweep_folder import AskedSweep

    question = question_of(load_config(flags=options(Path("/tmp")), environ={}))
    asked = AskedSweep(
        config={},
        question=question,
        candidates=[],
        refused=[],
        command="",
        base_dir=None,
        data={"{}": "a" * 64, "x": None},
        started_at=0.0,
        run_id="",
    )
    check_data_of(asked, {"{}": "a" * 64, "x": "b" * 64})
    with pytest.raises(DataError, match=r"and the interrupted sweep read [0-9a-f]{16}"):
        check_data_of(asked, {"{}": "b" * 64})
