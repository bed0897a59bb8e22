"""Help pages at 80 columns, and what a command says if nothing was given to it."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import yaml

from scaleray.cli.help import TRAIN_KEYS, flowed
from scaleray.cli.main import run_command
from scaleray.config.loading import known_keys, load_config
from scaleray.errors import ConfigError

GROUPS = ["Start", "Prove and measure", "Look", "Use the model", "Clusters", "Production", "Other"]


@pytest.fixture
def help_of(monkeypatch, capsys):
    """The help page of a command at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def shown(*words: str) -> str:
        assert run_command([*words, "--help"]) == 0
        return capsys.readouterr().out

    return shown


def test_commands_are_in_groups_with_the_most_used_first(help_of):
    page = help_of()
    assert re.findall(r"╭─ ([\w ]+?) ─", page) == GROUPS
    assert re.findall(r"^│ (\w+) ", page, re.M)[:4] == ["train", "init", "check", "config"]


def test_a_page_has_the_lines_of_80_columns_and_not_those_of_the_source(help_of):
    for command in ("train", "study", "gate"):
        paragraphs = help_of(command).split("╭─")[0].split("\n\n")[1:]
        for lines in (one.splitlines() for one in paragraphs):
            for line, following in itertools.pairwise(lines):
                assert len(line.rstrip()) + 1 + len(following.split()[0]) > 80, (command, line)


def test_a_text_flows_and_entries_of_a_list_keep_their_lines():
    assert flowed("One\nand\n    two.\n\nThree:\n- four\n  five\n- six") == "One and two.\n\nThree:\n- four five\n- six"


def test_the_keys_that_train_shows_exist_and_fit(help_of):
    page = help_of("train")
    assert TRAIN_KEYS in page and "[default: ]" not in page and "scaleray config keys" in page
    assert set(re.findall(r"--([a-z-]+\.[a-z-]+)", TRAIN_KEYS)) <= {key.replace("_", "-") for key in known_keys()}
    assert max(map(len, TRAIN_KEYS.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("watch", "Give a RUN, or --all.\n"),
        ("export", "Give a RUN.\n  see scaleray export --help"),
        ("evaluate", "Give a RUN.\n  see scaleray evaluate --help"),
        ("jobs logs", "Give a JOB.\n  see scaleray jobs logs --help"),
        ("path start -c x.yaml --workers 2", "Give --target with a value.\n  see scaleray path start --help"),
        ("train -c", "Give -c a value.\n  see scaleray train --help"),
        ("train", "Give a config with -c FILE.\n  scaleray init writes one that is ready to train"),
        ("study", "Give a config with -c FILE.\n  scaleray init writes one that is ready to train"),
        ("promote", "Give the RUN of a training.\n"),
        ("profile", "Give a training with -c FILE, or only a RUN.\n"),
    ],
)
def test_a_missing_argument_is_an_imperative(words, said, capsys):
    assert run_command(words.split()) == 2
    assert f"UsageError: {said}" in capsys.readouterr().err


def test_a_file_without_a_workload_is_named(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("batch: {global_size: 4}\nstop: {after: 1 epochs}\n")
    assert run_command(["train", "-c", str(tmp_path / "a.yaml")]) == 2
    assert "workload.name is required" in capsys.readouterr().err


def test_a_config_is_shown_by_what_differs_from_the_defaults(tmp_path, capsys):
    file = tmp_path / "a.yaml"
    file.write_text("workload: {name: a:B}\nbatch: {global_size: 4}\nstop: {after: 1 epochs}\nseed: 3\n")
    assert run_command(["config", "show", "-c", str(file), "--no-data", "--optimizer.learning-rate", "0.1"]) == 0
    short = capsys.readouterr().out
    assert yaml.safe_load(short) == {
        "workload": {"name": "a:B"},
        "batch": {"global_size": 4},
        "optimizer": {"learning_rate": 0.1},
        "stop": {"after": "1 epoch"},
        "seed": 3,
    }
    assert "optimizer.weight_decay is 0.0 by default; in torch's AdamW it is 0.01" in short
    assert run_command(["config", "show", "-c", str(file), "--no-data", "--all", "--optimizer.name", "sgd"]) == 0
    whole = capsys.readouterr().out
    assert set(yaml.safe_load(whole)) == {key.partition(".")[0] for key in known_keys()}
    assert "optimizer.momentum is 0.9 by default; in torch's SGD it is 0.0" in whole


def test_adam_is_adamw_without_decay():
    given = {"workload.name": "a:B", "batch.global_size": 4, "stop.after": "1 epochs", "optimizer.name": "adam"}
    assert load_config(flags=given).optimizer.name == "adamw"
    with pytest.raises(ConfigError, match="adam has no decoupled weight decay"):
        load_config(flags={**given, "optimizer.weight_decay": 0.1})


def test_derived_values_fit_a_terminal_of_80_columns(capsys):
    file = Path(__file__).parents[2] / "jobs/digits.yaml"
    assert run_command(["config", "show", "-c", str(file), "--scale.workers", "2"]) == 0
    shown = capsys.readouterr().out
    assert "degrees                      replicate 2 " in shown
    assert max(map(len, shown.splitlines())) <= 80
