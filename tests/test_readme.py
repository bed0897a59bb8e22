"""The README's own words: its workload runs as written, and its commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from scaleray.cli.main import run_command

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"<!-- readme-test: (\S+) -->\n```\w*\n(.*?)```", re.S)


@pytest.fixture
def blocks():
    return dict(BLOCK.findall(README.read_text()))


def test_bringing_a_workload_takes_under_40_lines(blocks):
    lines = [line for name in ("iris.py", "iris.yaml") for line in blocks[name].splitlines() if line.strip()]
    assert len(lines) < 40


def test_the_readmes_workload_trains_as_written(blocks, tmp_path, mlflow_database, monkeypatch, capsys):
    for name in ("iris.py", "iris.yaml"):
        (tmp_path / name).write_text(blocks[name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCALERAY_TRACKING__URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("SCALERAY_CHECKPOINT__STORAGE_PATH", str(tmp_path / "runs"))
    words = shlex.split(blocks["command"].strip())
    assert words[0] == "scaleray"
    # without Ray here; whole runs on two workers are tested in tests/launch
    assert run_command([*words[1:], "--local", "--scale.workers", "1"]) == 0
    assert "target reached: val/accuracy >= 0.95" in capsys.readouterr().out


def test_every_command_of_the_readme_exists(capsys):
    text = README.read_text()
    for command in set(re.findall(r"`?scaleray ((?:train|config \w+|tracking \w+))", text)):
        assert run_command([*command.split(), "--help"]) == 0, command


def test_every_file_named_in_the_readme_exists():
    root = README.parent
    for name in re.findall(r"`((?:scaleray|jobs|tests)/[\w/.]+\.\w+)`", README.read_text()):
        assert (root / name).exists(), name
