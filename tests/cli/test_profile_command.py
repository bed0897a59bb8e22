"""`scaleray profile`: a recorded run, a short training, and what cannot be profiled."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import study_examples
from made_up_steps import measured

import scaleray
from scaleray.cli.main import run_command
from scaleray.cli.profile import print_verdict
from scaleray.profiling.run_profile import run_profile
from scaleray.profiling.verdict.findings import Limit
from scaleray.records.phases import Phase


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Neither this user's runs nor their MLflow."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def saved(folder, *ranks, **more):
    """A run's folder whose record has the profile of these ranks."""
    record = study_examples.run_record(workers=len(ranks), run_dir=str(folder), profile=run_profile(ranks), **more)
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(record.to_json())
    return folder


def refused(capsys, *words):
    """What is said of a command that is bad usage: one message, no traceback."""
    assert run_command(["profile", *map(str, words)]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_a_recorded_run_is_judged_in_a_sentence(tmp_path, capsys):
    late = {Phase.BACKWARD: 0.014, Phase.COMMUNICATION: 0.0002}
    waiting = {Phase.COMMUNICATION: 0.0042}
    folder = saved(tmp_path / "run", measured(0, num_steps=60, **waiting), measured(1, num_steps=60, **late))
    assert run_command(["profile", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("rank 1 delays the others in backward: 21% of a step on 2 workers; ")
    assert "would give at most 1.26x. Next: " in said
    assert scaleray.profile(folder).verdict.primary.ranks == (1,)


def test_json_has_the_verdict_and_the_profile_and_nothing_else_is_on_stdout(tmp_path, capsys):
    folder = saved(tmp_path / "run", measured(0, num_steps=60))
    assert run_command(["profile", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["schema_version"] == 1 and shown["written"]["record.json"] == str(folder / "record.json")
    assert shown["verdict"]["limit"] == "compute" and shown["verdict"]["steps"] == 50
    assert shown["profile"]["ranks"][0]["phases"]["forward"]["median"] == pytest.approx(0.005)


def test_a_run_that_has_too_few_steps_or_no_profile_is_refused(tmp_path, capsys):
    short = saved(tmp_path / "short", measured(0, num_steps=8))
    assert "covers only 4 steps: too few" in refused(capsys, short)
    old = saved(tmp_path / "old")
    said = refused(capsys, old)
    assert "missing" in said and f"scaleray profile -c {old}/config.yaml" in said


def test_a_folder_that_is_no_run_one_that_runs_and_a_study_are_refused(tmp_path, capsys):
    assert "there is no folder with a record.json" in refused(capsys, tmp_path)
    running = tmp_path / "running"
    running.mkdir()
    (running / "run.json").write_text("{}")
    assert "it is still running, or was killed" in refused(capsys, running)
    study = tmp_path / "study"
    study.mkdir()
    (study / "record.json").write_text(study_examples.study().to_json())
    assert "is a study or sweep" in refused(capsys, study)


def test_words_that_make_no_sense_together_are_refused(tmp_path, capsys):
    assert "a training with -c FILE, or only a RUN" in refused(capsys)
    assert "a training with -c FILE, or only a RUN" in refused(capsys, tmp_path, "--steps", 30)
    assert "Give one RUN, not 2" in refused(capsys, tmp_path, tmp_path)
    config = tmp_path / "config.yaml"
    config.write_text("workload: {name: x.py:X}\nbatch: {global_size: 4}\nstop: {after: 1 epochs}\n")
    assert "RUN cannot be combined with -c" in refused(capsys, tmp_path, "-c", config)
    assert "--steps is 5: it must be at least 20" in refused(capsys, "-c", config, "--local", "--steps", 5)


def test_a_short_training_is_profiled_and_its_length_and_schedule_are_its_own(tmp_path, mlflow_database):
    config = {
        "workload.name": "tests/launch/workloads.py:Line",
        "batch.global_size": 8,
        "optimizer.learning_rate": 0.01,
        "schedule": {"name": "cosine", "warmup": "2 epochs", "length": "5 epochs"},
        "stop": {"after": "100 epochs", "at": "val/loss <= 100"},
        "evaluation.every": "1 epochs",
        "checkpoint.storage_path": str(tmp_path / "runs"),
        "tracking": {"uri": f"sqlite:///{mlflow_database}", "experiment": "mine", "system_metrics": False},
    }
    found = scaleray.profile(config, steps=24, local=True)
    assert found.record.steps == 24 and found.record.status == "FINISHED"
    assert found.verdict.steps == 13 and found.verdict.limit is not Limit.INCOMPLETE
    assert sum(found.verdict.shares.values()) == pytest.approx(1, abs=0.01)
    assert not list((tmp_path / "runs").glob("*/*.safetensors"))
    again = scaleray.profile(found.record.run_dir)
    assert dataclasses.asdict(again.verdict) == dataclasses.asdict(found.verdict)


def test_a_verdict_is_broken_between_words_on_a_terminal_and_nowhere_in_a_pipe(monkeypatch, capsys):
    line = "the step waits for its input: " + "12 % of the step is spent in preprocessing of rows " * 4
    verdict = SimpleNamespace(lines=lambda: [line.strip()])
    print_verdict(verdict, is_error=False)
    assert capsys.readouterr().out == f"{line.strip()}\n"
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    print_verdict(verdict, is_error=False)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 3 and max(map(len, shown)) <= 80
    assert " ".join(" ".join(shown).split()) == line.strip()
