"""Projects that `scaleray init` writes."""

from __future__ import annotations

import functools
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
    tmp_path /= "my projects"
    words = ["init", "--from", "lightning", "--out", str(tmp_path), "--name", "mine_alone"]
    assert run_command(words) == 0
    out = capsys.readouterr().out
    assert f"scaleray check -c '{tmp_path}/mine_alone.yaml'" in out
    assert f"wrote {tmp_path}/mine_alone.py" in out and "[lightning]'" in out
    (tmp_path / "mine_alone.py").write_text("my own")
    (tmp_path / "mine_alone.yaml").unlink()
    assert run_command(words) == 2
    assert "is not overwritten" in capsys.readouterr().err
    assert (tmp_path / "mine_alone.py").read_text() == "my own" and not (tmp_path / "mine_alone.yaml").exists()


def test_five_questions_are_asked_on_a_terminal(tmp_path, monkeypatch, capsys):
    answers = io.StringIO(f"7\ntext\nmy_text\n\nno\n3\n{tmp_path}\n")
    answers.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", answers)
    assert run_command(["init"]) == 0
    assert load_config(tmp_path / "my_text.yaml", environ={}).scale.workers == 3
    asked = capsys.readouterr().out
    assert [number for number in range(1, 6) if f"{number}/5" not in asked] == [] and asked.count("1/5") == 2
    assert "Enter a number from 1 to 5, or a name of the list." in asked and "Enter a number from 1.\n" in asked


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--from is required without a terminal. It must be one of table, text, images, lightning, hf."),
        (["--from", "audio"], "it must be one of table, text, images, lightning, hf"),
        (["--from", "text", "--name", "my-text"], "the name of a Python module"),
        (["--from", "text", "--name", "json"], "an installed module has this name"),
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
    with pytest.raises(UsageError, match="cannot be written"):
        write_project("table", tmp_path / "file" / "project")


def trainer_arguments(tmp_path, **changes):
    """A file of TrainingArguments as transformers writes it."""
    from transformers import TrainingArguments

    path = tmp_path / "arguments.json"
    path.write_text(TrainingArguments(str(tmp_path / "runs"), use_cpu=True, report_to=[], **changes).to_json_string())
    return str(path)


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({}, {"optimizer.learning_rate": 5e-5, "batch.global_size": 16, "stop.after": "3 epochs", "schedule.name": "linear", "optimizer.clip_norm": 1.0, "seed": 42, "precision.dtype": "fp32", "evaluation.every": "None", "checkpoint.every": "500 steps", "tracking.every_steps": 500}),
        ({"max_steps": 200, "warmup_steps": 20, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, {"stop.after": "200 steps", "schedule.warmup": "20 steps", "batch.global_size": 16, "batch.micro_size": 4}),
        ({"warmup_steps": 0.1, "lr_scheduler_type": "cosine", "num_train_epochs": 5}, {"schedule.warmup": "0.5 epochs", "schedule.name": "cosine", "stop.after": "5 epochs"}),
        ({"lr_scheduler_type": "constant", "warmup_steps": 9}, {"schedule.name": "constant", "schedule.warmup": "0 steps"}),
        ({"optim": "sgd"}, {"optimizer.name": "sgd", "optimizer.momentum": 0.0}),
        ({"num_train_epochs": 1}, {"stop.after": "1 epoch"}),
        ({"adam_beta2": 0.95, "adam_epsilon": 1e-6, "max_grad_norm": 0.0}, {"optimizer.betas": (0.9, 0.95), "optimizer.epsilon": 1e-6, "optimizer.clip_norm": None}),
        ({"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "save_total_limit": 2}, {"evaluation.every": "1 epoch", "checkpoint.every": "1 epoch", "checkpoint.best": "val/loss min", "checkpoint.keep_last": 2}),
        ({"eval_strategy": "steps", "eval_steps": 50, "save_steps": 50, "load_best_model_at_end": True, "metric_for_best_model": "eval_accuracy"}, {"evaluation.every": "50 steps", "checkpoint.best": "val/accuracy max"}),
        ({"gradient_checkpointing": True, "train_sampling_strategy": "group_by_length", "seed": 7, "full_determinism": True}, {"activations.checkpointing": "full", "data.bucket_by_length": 50, "seed": 7, "deterministic": True}),
        ({"bf16": True}, {"precision.dtype": "bf16"}),
    ],
)  # fmt: skip
def test_the_config_takes_the_arguments_of_transformers_trainer(tmp_path, changes, values, capsys):
    words = ["init", "--from", "hf", "--out", str(tmp_path / "mine"), "--workers", "2"]
    assert run_command([*words, "--arguments", trainer_arguments(tmp_path, **changes)]) == 0
    assert "not taken" not in capsys.readouterr().out
    config = load_config(tmp_path / "mine" / "language.yaml", environ={})
    found = {key: functools.reduce(getattr, key.split("."), config) for key in values}
    assert {key: str(value) for key, value in found.items()} == {key: str(value) for key, value in values.items()}
    assert config.workload.name == "language.py:Language" and config.scale.workers == 2


def test_arguments_without_an_equivalent_are_named_with_what_to_do(tmp_path, capsys):
    changes = {"label_smoothing_factor": 0.1, "optim": "adafactor", "lr_scheduler_type": "inverse_sqrt", "neftune_noise_alpha": 5.0, "weight_decay": 0.01}  # fmt: skip
    words = ["init", "--from", "hf", "--out", str(tmp_path / "mine")]
    assert run_command([*words, "--arguments", trainer_arguments(tmp_path, **changes)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not taken: ")]
    assert [line.split(": ")[1] for line in lines] == ["lr_scheduler_type", "optim", "weight_decay", "label_smoothing_factor", "neftune_noise_alpha"]  # fmt: skip
    assert "label_smoothing_factor: 0.1: a loss() of your own" in lines[3]
    path = tmp_path / "other.json"
    path.write_text('{"a": 1}')
    assert run_command([*words, "--arguments", str(path)]) == 2
    assert "must contain TrainingArguments" in capsys.readouterr().err
    assert run_command(["init", "--from", "table", "--out", str(tmp_path / "x"), "--arguments", str(path)]) == 2
