"""`scaleray path` as it is typed: exit codes, what is printed, and slips."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import scaleray
from scaleray.cli.main import run_command
from scaleray.launch.path.state import find_path, write
from tests.launch.path.conftest import JOB, to_the_gates


@pytest.fixture
def alone(path):
    """The path without its copy in MLflow, which costs a second at each task."""
    return write(replace(path, run_id=""))


def along(path, *words):
    return run_command(["path", *words, "--name", path.folder])


def test_next_prints_the_command_of_the_next_task_and_does_nothing(alone, commands, capsys):
    assert along(alone, "next", "--print") == 0
    note, command = capsys.readouterr().out.splitlines()
    assert note == "# baseline/baseline-0: a training on 1 worker, seed 0"
    assert shlex.split(command) == ["scaleray", *alone.tasks[0].command]
    assert commands.ran == [] and find_path(alone.folder).tasks[0].status == "open"
    along(alone, "next", "--print", "--until", "produce", "--json")
    told = json.loads(capsys.readouterr().out)["tasks"]
    assert [one["key"] for one in told][-2:] == ["optimise/sweep", "optimise/decide"], "a person decides"
    assert all("{" not in one["command"] for one in told)


def test_what_is_printed_has_what_earlier_tasks_gave(alone, commands, capsys):
    to_the_gates(alone)
    commands.codes = [0] * 6 + [1]
    scaleray.next_on_path(alone.folder, until="validate")
    assert along(alone, "next", "--print") == 0
    assert "--study /study --certificates /verify" in capsys.readouterr().out


def test_exit_codes_say_done_failed_and_that_a_person_must_decide(alone, commands, capsys):
    assert along(alone, "next") == 0
    commands.codes = [1]
    assert along(alone, "next") == 1
    assert "baseline/baseline-1 failed: Error: it broke" in capsys.readouterr().out
    assert along(alone, "next", "--until", "optimise") == 3
    assert along(alone, "next", "--print") == 3
    assert "a person decides" in capsys.readouterr().out
    assert along(alone, "skip", "optimise/decide", "--reason", "fast enough") == 0
    commands.codes = [0] * 6 + [3]
    assert along(alone, "next", "--until", "produce") == 3, "a gate is inconclusive"
    assert along(alone, "next", "--until", "produce") == 0
    assert along(alone, "next") == 0 and "the path is at its end" in capsys.readouterr().out


def test_status_says_how_far_it_is_as_lines_as_json_and_as_a_page(alone, commands, capsys, tmp_path):
    along(alone, "next")
    capsys.readouterr()
    assert along(alone, "status", "--html", str(tmp_path / "page.html")) == 0
    said = capsys.readouterr().out
    assert "baseline: 1 of 2" in said and f"page: {tmp_path / 'page.html'}" in said
    assert "Path to production" in (tmp_path / "page.html").read_text()
    assert along(alone, "status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tasks"][0]["status"] == "done"
    assert along(alone, "status", "--html", str(tmp_path / "no" / "page.html")) == 2
    assert "--html" in capsys.readouterr().err


def test_a_trial_is_tried_as_it_is_typed(alone, commands, capsys):
    policy = Path(alone.folder) / "policy.yaml"
    policy.write_text("convergence: {min_runs: 2, metric_margin: 0.5, not_faster_than_chance: false}\n")
    along(alone, "next", "--until", "optimise")
    assert along(alone, "try", "larger", "--batch.global-size", "16") == 0
    assert "left: larger {'batch.global_size': '16'}: " in capsys.readouterr().out
    assert along(alone, "redo", "optimise/sweep") == 0
    assert find_path(alone.folder).next_task().key == "optimise/sweep"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["try", "larger"], "a change is missing"),
        (["try", "larger", "--batch.global-size"], "it is a key of the config and its value"),
        (["next", "--until", "the end"], "steps are baseline"),
        (["next", "--print", "--until", "the end"], "steps are baseline"),
        (["skip", "baseline", "--reason", "no"], "digits has baseline/baseline-0"),
        (["skip", "baseline/baseline-0"], "--reason"),
        (["redo", "the/end"], "digits has baseline/baseline-0"),
    ],
)
def test_a_slip_is_one_message(alone, commands, capsys, words, message):
    assert along(alone, *words) == 2
    said = capsys.readouterr()
    assert message in said.err + said.out and "Traceback" not in said.err and commands.ran == []


def test_a_path_begins_as_it_is_typed_and_not_without_a_training(tmp_path, mlflow_database, capsys):
    (tmp_path / "job.py").write_text("class Job:\n    pass\n")
    (tmp_path / "job.yaml").write_text(JOB)
    words = ["path", "start", "-c", str(tmp_path / "job.yaml"), "--target", "test/accuracy >= 0.9", "--workers"]
    keys = ["--checkpoint.storage-path", str(tmp_path / "runs"), "--tracking.uri", f"sqlite:///{mlflow_database}"]
    assert run_command([*words, "2", "--runs", "2", "--name", "digits", *keys]) == 0
    assert "2 trainings of each side are fewer than the policy's 5" in capsys.readouterr().out
    assert (tmp_path / "runs" / "path-digits" / "path.html").is_file()
    assert run_command([*words, "1", *keys]) == 2
    assert run_command([*words, "2", "--batch.globl-size", "8", *keys]) == 2
    assert run_command(["path", "start", "--target", "a/b >= 1", "--workers", "2"]) == 2
    assert run_command(["path", "status", "--name", "nowhere"]) == 2
