"""`scaleray path` as it is typed: exit codes, what is printed, and slips."""

from __future__ import annotations

import json
import shlex

import pytest

import scaleray
from scaleray.cli.main import run_command
from scaleray.release.path.path_state import find_path
from tests.release.path.conftest import JOB, to_the_gates


def along(path, *words):
    return run_command(["path", *words, "--name", path.folder])


def test_next_prints_the_command_of_the_next_task_and_does_nothing(path, commands, capsys):
    assert along(path, "next", "--print") == 0
    note, command = capsys.readouterr().out.splitlines()
    assert note == "# baseline/baseline-0: a training on 1 worker, seed 0"
    assert shlex.split(command) == ["scaleray", *path.tasks[0].command]
    assert commands.ran == [] and find_path(path.folder).tasks[0].status == "open"
    along(path, "next", "--print", "--until", "produce", "--json")
    told = json.loads(capsys.readouterr().out)["tasks"]
    assert [one["key"] for one in told][-2:] == ["optimise/sweep", "optimise/decide"], "a person decides"
    assert all("{" not in one["command"] for one in told)


def test_what_is_printed_has_what_earlier_tasks_gave(path, commands, capsys):
    to_the_gates(path)
    commands.codes = [0] * 6 + [1]
    scaleray.next_on_path(path.folder, until="validate")
    assert along(path, "next", "--print") == 0
    assert "--study /study --certificates /verify" in capsys.readouterr().out


def test_exit_codes_say_done_failed_and_that_a_person_must_decide(path, commands, capsys):
    assert along(path, "next") == 0
    commands.codes = [1]
    assert along(path, "next") == 1
    assert "baseline/baseline-1 failed: Error: it broke" in capsys.readouterr().out
    assert along(path, "next", "--until", "optimise") == 3
    assert along(path, "next", "--print") == 3
    assert "a person decides" in capsys.readouterr().out
    assert along(path, "skip", "optimise/decide", "--reason", "fast enough") == 0
    commands.codes = [0] * 6 + [3]
    assert along(path, "next", "--until", "produce") == 3, "a gate is inconclusive"
    assert along(path, "next", "--until", "produce") == 0
    assert along(path, "next") == 0 and "the path is complete" in capsys.readouterr().out


def test_status_shows_every_task_and_decision_as_tables_and_as_json(path, commands, capsys):
    commands.printed["doctor"] = {"summary": "ready: 11 checks of 1 node are green"}
    along(path, "next", "--until", "distribute")
    along(path, "skip", "optimise/study", "--reason", "<fast> enough")
    capsys.readouterr()
    assert along(path, "status") == 0
    said = capsys.readouterr().out
    assert "baseline: 2 of 2" in said and "ready: 11 checks of 1 node are green" in said
    assert [said.count(f"{task.key.partition('/')[2]} ") > 0 for task in path.tasks].count(False) == 0
    assert said.count("<fast> enough") == 2, "as the result of the task, and as a decision"
    assert along(path, "status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tasks"][0]["status"] == "done"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["next", "--until", "the end"], "it must be one of baseline"),
        (["next", "--print", "--until", "the end"], "it must be one of baseline"),
        (["skip", "baseline", "--reason", "no"], "it must be one of baseline/baseline-0"),
        (["skip", "baseline/baseline-0"], "--reason"),
        (["redo", "the/end"], "it must be one of baseline/baseline-0"),
    ],
)
def test_a_slip_is_one_message(path, commands, capsys, words, message):
    assert along(path, *words) == 2
    said = capsys.readouterr()
    assert message in said.err + said.out and "Traceback" not in said.err and commands.ran == []


def test_a_path_begins_as_it_is_typed_and_not_without_a_training(tmp_path, mlflow_database, capsys):
    (tmp_path / "job.py").write_text("class Job:\n    pass\n")
    (tmp_path / "job.yaml").write_text(JOB)
    words = ["path", "start", "-c", str(tmp_path / "job.yaml"), "--target", "test/accuracy >= 0.9", "--workers"]
    keys = ["--checkpoint.storage-path", str(tmp_path / "runs"), "--tracking.uri", f"sqlite:///{mlflow_database}"]
    assert run_command([*words, "2", "--runs", "2", "--name", "digits", *keys]) == 0
    assert "2 trainings of each side are fewer than the policy's 5" in capsys.readouterr().out
    assert (tmp_path / "runs" / "path-digits" / "path.json").is_file()
    assert run_command([*words, "1", *keys]) == 2
    assert run_command([*words, "2", "--batch.globl-size", "8", *keys]) == 2
    assert run_command(["path", "start", "--target", "a/b >= 1", "--workers", "2"]) == 2
    assert run_command(["path", "status", "--name", "nowhere"]) == 2
