"""Projects that `scaleray init` writes."""

from __future__ import annotations

import importlib.util
import io
import shutil
import sys

import pytest
import yaml

from scaleray.cli.main import run_command
from scaleray.cli.projects.write import KINDS, write_project
from scaleray.config import load_config
from scaleray.errors import UsageError

LIBRARIES = {"lightning": ["lightning"], "hf": ["transformers"], "images": ["PIL"]}


@pytest.fixture
def modules():
    """What tests import is forgotten, and where from."""
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in {about.file for about in KINDS.values()} & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.mark.combination
@pytest.mark.parametrize(
    "kind", ["table", *(pytest.param(kind, marks=pytest.mark.combination) for kind in KINDS if kind != "table")]
)
def test_a_project_passes_its_own_tests_as_it_is_written(kind, tmp_path, modules, monkeypatch, empty_database):
    for library in LIBRARIES.get(kind, []):
        pytest.importorskip(library)
    monkeypatch.setenv("HOME", str(tmp_path))
    *_, test_file = write_project(kind, tmp_path / "project")
    spec = importlib.util.spec_from_file_location(f"written_{kind}", test_file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "run").mkdir()
    shutil.copy(empty_database, tmp_path / "run" / "mlflow.db")  # making its tables costs more than the training
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test(*([tmp_path / "run"] if "tmp_path" in test.__code__.co_varnames[: test.__code__.co_argcount] else []))


@pytest.mark.parametrize("kind", KINDS)
def test_every_config_is_read_and_every_workload_compiles(kind, tmp_path):
    workload, config, test = write_project(kind, tmp_path, data="my files/it's.csv", workers=2)
    resolved = load_config(config, environ={})
    assert resolved.workload.args["data"] == "my files/it's.csv" and resolved.scale.workers == 2
    assert resolved.workload.name == f"{KINDS[kind].file}.py:{KINDS[kind].class_name}"
    for file in (workload, test):
        compile(file.read_text(), str(file), "exec")
        assert max(map(len, file.read_text().splitlines())) <= 140
    assert yaml.safe_load(write_project(kind, tmp_path / "sample")[1].read_text())["workload"]["args"]["data"] is None


def test_the_command_says_what_to_do_next_and_overwrites_nothing(tmp_path, capsys):
    words = ["init", "--from", "lightning", "--out", str(tmp_path), "--name", "mine_alone"]
    assert run_command(words) == 0
    out = capsys.readouterr().out
    assert f"wrote {tmp_path}/mine_alone.py" in out and "[lightning]'" in out
    (tmp_path / "mine_alone.py").write_text("my own")
    (tmp_path / "mine_alone.yaml").unlink()
    assert run_command(words) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert (tmp_path / "mine_alone.py").read_text() == "my own" and not (tmp_path / "mine_alone.yaml").exists()


def test_five_questions_are_asked_on_a_terminal(tmp_path, monkeypatch, capsys):
    answers = io.StringIO(f"7\ntext\nmy_text\n\nno\n3\n{tmp_path}\n")
    answers.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", answers)
    assert run_command(["init"]) == 0
    assert load_config(tmp_path / "my_text.yaml", environ={}).scale.workers == 3
    asked = capsys.readouterr().out
    assert [number for number in range(1, 6) if f"{number}/5" not in asked] == [] and asked.count("1/5") == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "there is no terminal to ask on: table, text, images, lightning, hf"),
        (["--from", "audio"], "there are: table, text, images, lightning, hf"),
        (["--from", "text", "--name", "my-text"], "the name of a Python module"),
        (["--from", "text", "--name", "json"], "a module of this name is installed"),
        (["--from", "text", "--workers", "0"], "at least 1"),
    ],
)
def test_bad_input_is_one_message(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert run_command(["init", *words]) == 2
    assert says in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="it cannot be written"):
        write_project("table", tmp_path / "file" / "project")
