"""`scaleray watch` as it is typed: once and for as long as a run lives, on a terminal, in a pipe and for scripts."""

import codecs
import dataclasses
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from live_states import live_state

import scaleray
from scaleray.cli.main import run_command
from scaleray.records.schemas import SCHEMAS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def storage(tmp_path, monkeypatch):
    """The storage path in which runs are looked for by name, and an MLflow that is not there."""
    monkeypatch.setenv("SCALERAY_CHECKPOINT__STORAGE_PATH", str(tmp_path / "runs"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'none.db'}")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def write(storage, **more):
    state = live_state(**{"name": "mine", **more})
    (storage / state.name).mkdir(exist_ok=True)
    part = storage / state.name / ".part"
    part.write_text(state.to_json())
    part.replace(storage / state.name / "live.json")
    return state


def test_a_run_is_found_by_its_name_and_by_its_folder(storage, capsys):
    write(storage)
    assert run_command(["watch", "mine", "--once"]) == 0
    by_name = capsys.readouterr().out
    assert run_command(["watch", str(storage / "mine"), "--once"]) == 0
    assert "120 of 460 steps" in by_name and "RUNNING" in capsys.readouterr().out


def test_a_script_gets_an_object_with_a_version_that_keeps_its_schema(storage, capsys):
    state = write(storage, loss=float("nan"))
    assert run_command(["watch", "mine", "--once", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    jsonschema.validate(shown, SCHEMAS["live"]())
    assert (shown["schema_version"], shown["step"], shown["loss"]) == (1, 120, None)
    assert shown["ranks"][1]["late_s"] == 0.030 and scaleray.live_state("mine").step == state.step
    assert run_command(["watch", "--all", "--once", "--json"]) == 0
    every = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in every["runs"]] == ["mine"] and every["schema_version"] == 1


def test_a_run_that_ended_is_shown_once_in_a_pipe_as_a_line(storage, capsys):
    write(storage, status="FINISHED", verdict="done")
    assert run_command(["watch", "mine"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("mine FINISHED | step 120/460") and out.count("\n") == 1
    assert [state.status for state in scaleray.watch("mine")] == ["FINISHED"]


def test_a_pipe_gets_a_line_for_every_look_at_a_run_that_has_gone_on(storage, capsys, monkeypatch):
    steps = iter([live_state(step=1), live_state(step=1), live_state(step=2), live_state(step=3, status="FINISHED")])
    monkeypatch.setattr("time.sleep", lambda seconds: write(storage, **vars(next(steps))))
    write(storage, **vars(next(steps)))
    name = live_state().name
    assert run_command(["watch", name, "--json"]) == 0
    assert [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()] == [1, 2, 3]


def test_two_runs_of_one_name_are_two_lines_until_one_goes_on(capsys, monkeypatch):
    first, second = (live_state(name="same", run_id=run_id, run_dir=f"/runs/{run_id}") for run_id in ("1", "2"))
    looks = iter([[first, second], [first, second], [first, dataclasses.replace(second, step=121)], KeyboardInterrupt])

    def look():
        found = next(looks)
        if found is KeyboardInterrupt:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr("scaleray.launch.watch.find.watched_runs", lambda stack: look)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert run_command(["watch", "--all"]) == 0
    assert [line.split(" | ")[1] for line in capsys.readouterr().out.splitlines()] == [
        "step 120/460",
        "step 120/460",
        "step 121/460",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "was not found: no folder of this name"),
        (["."], "is not the folder of a run"),
        (["./"], "is not the folder of a run"),
        ([], "Give a RUN, or --all."),
        (["mine", "--all"], "RUN cannot be combined with --all"),
        (["mine", "--interval", "0"], "it must be at least 0.2 seconds"),
        (["mine", "--interval", "nan"], "it must be at least 0.2 seconds"),
        (["no'name"], "was not found: no folder of this name"),
    ],
)
def test_what_cannot_be_watched_is_one_clear_message(storage, capsys, monkeypatch, words, said):
    monkeypatch.chdir(storage)
    assert run_command(["watch", *words, "--once"]) == 2
    text = capsys.readouterr().err
    assert said in " ".join(text.split()) and text.count("\n") <= 2 and "Traceback" not in text


def test_a_folder_of_runs_names_some_of_them(storage, capsys):
    write(storage)
    assert run_command(["watch", str(storage), "--once"]) == 2
    assert "runs in it: mine" in capsys.readouterr().err


def test_the_address_of_a_dashboard_is_refused_with_what_to_give_instead(storage, capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    assert run_command(["watch", "nowhere", "--once"]) == 2
    assert "HOST:6379" in capsys.readouterr().err


def read_until(terminal, words, *, timeout_s=120.0):
    """What a terminal shows until these words have come, without its control sequences."""
    text, deadline = "", time.monotonic() + timeout_s
    decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end in the middle of a character
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                text += decoder.decode(os.read(terminal, 65536))
            except OSError:  # the other end is closed
                break
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
        if words in plain:
            return plain
    raise AssertionError(text)


@pytest.fixture
def on_a_terminal(storage):
    """A command in a process of its own whose terminal is this end."""
    own, its = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "LINES": "40", "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "scaleray", "watch", "mine", "--interval", "0.2"]
    made = []

    def start():
        made.append(
            subprocess.Popen(
                command,
                stdin=its,
                stdout=its,
                stderr=its,
                env=environment,
                # tests that a shell started in the background ignore Ctrl-C, and so would their children
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        )
        return made[-1], own

    yield start
    for process in made:
        process.kill()
        process.wait()
    os.close(own)
    os.close(its)


@pytest.mark.combination
def test_a_page_changes_with_the_run_and_ends_with_it(storage, on_a_terminal):
    write(storage)
    process, terminal = on_a_terminal()
    read_until(terminal, "120 of 460 steps")
    write(storage, step=121)
    read_until(terminal, "121 of 460 steps")
    write(storage, step=460, status="FINISHED", verdict="target reached")
    read_until(terminal, "target reached")
    assert process.wait(timeout=60) == 0


@pytest.mark.combination
def test_ctrl_c_ends_the_page_and_leaves_the_run_alone(storage, on_a_terminal):
    write(storage)
    process, terminal = on_a_terminal()
    read_until(terminal, "120 of 460 steps")
    files = sorted(path.name for path in (storage / "mine").iterdir())
    process.send_signal(signal.SIGINT)
    assert "KILLED" not in read_until(terminal, "stopped watching; the run continues")
    assert process.wait(timeout=60) == 0
    assert sorted(path.name for path in (storage / "mine").iterdir()) == files == ["live.json"]
