"""Where MLflow is, for every command with `--uri`: the option, then the environment, then the YAML of `-c`."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from scaleray.cli.main import app, run_command

MODEL = "models:/none@champion"
COMMANDS = {
    "compare": ["compare", "none", "other"],
    "report": ["report", "none"],
    "watch": ["watch", "none", "--once"],
    "profile": ["profile", "none"],
    "evaluate": ["evaluate", "none", "--local"],
    "predict": ["predict", "none", "--data", "x.csv", "--out", "y.parquet"],
    "gate": ["gate", "none", "--against", "other"],
    "promote": ["promote", "none", "--as", "champion"],
    "rollback": ["rollback", MODEL],
    "export": ["export", "none", "--out", "x.safetensors"],
    "tracking invalidate": ["tracking", "invalidate", "none", "--reason", "x"],
    "tracking curve": ["tracking", "curve"],
}


def option_names(command):
    """Names of a command's options, those of its groups of options among them."""
    for name, parameter in inspect.signature(command).parameters.items():
        yield from (
            (f.name for f in dataclasses.fields(parameter.default))
            if dataclasses.is_dataclass(parameter.default)
            else [name]
        )


def with_uri(commands, name=()):
    """The names of all commands that take `--uri`."""
    for word in commands:
        if word.startswith("-"):
            continue
        command = commands[word]
        if command.default_command and "uri" in option_names(command.default_command):
            yield " ".join([*name, word])
        yield from with_uri(command, (*name, word))


def test_every_command_with_the_option_is_here():
    assert set(with_uri(app)) == COMMANDS.keys() | {"doctor", "tracking replay", "tracking ui"}


@pytest.mark.parametrize("words", [*COMMANDS.values(), ["gate", "--against", MODEL]], ids=" ".join)
def test_the_environment_says_where_mlflow_is(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'of_mlflow.db'}")
    monkeypatch.setenv("SCALERAY_TRACKING__URI", f"sqlite:///{tmp_path / 'mine.db'}")
    run_command(words)
    said = capsys.readouterr()
    assert "mine.db" in "".join((said.out + said.err).split()) and "of_mlflow.db" not in said.out + said.err


def test_an_option_wins_over_the_environment_and_that_over_the_yaml_of_a_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work.py").write_text("import scaleray\nclass Mine(scaleray.Workload): ...\n")
    (tmp_path / "job.yaml").write_text(
        f"workload: {{name: 'work.py:Mine'}}\nbatch: {{global_size: 8}}\nstop: {{after: 1 epochs}}\n"
        f"optimizer: {{learning_rate: 0.1}}\ntracking: {{uri: 'sqlite:///{tmp_path / 'of_yaml.db'}'}}\n"
    )
    words = ["predict", "-c", "job.yaml", "--weights", "none", "--data", "x.csv", "--out", "y.parquet"]

    def asked(*more):
        run_command([*words, *more])
        said = capsys.readouterr().err
        return next(
            (name for name in ("of_yaml.db", "of_env.db", "of_option.db") if name in "".join(said.split())), said
        )

    assert asked() == "of_yaml.db"
    monkeypatch.setenv("SCALERAY_TRACKING__URI", f"sqlite:///{tmp_path / 'of_env.db'}")
    assert asked() == "of_env.db"
    assert asked("--uri", f"sqlite:///{tmp_path / 'of_option.db'}") == "of_option.db"
