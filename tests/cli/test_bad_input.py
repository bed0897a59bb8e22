"""Each slip of a user gives one clear message and exit code 2, with no traceback and nothing left behind."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from unittest import mock

import mlflow
import numpy as np
import pytest

from scaleray.cli.main import run_command

WORKLOAD = """
import numpy as np, torch
from torch import nn


class Good:
    def __init__(self, rows=32, bad_row=None, label=0):
        self.rows, self.bad_row, self.label = rows, bad_row, label

    def build_model(self):
        return nn.Linear(4, 3)

    def datasets(self):
        x = np.ones((self.rows, 4), np.float32)
        if self.bad_row is not None:
            x[:] = self.bad_row
        return {"train": {"x": x, "y": np.full(self.rows, self.label)}}

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


class OnlyMean(Good):
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


class MeanAsSum(Good):
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"]), len(batch["y"])


class Frozen(Good):
    def build_model(self):
        return nn.Linear(4, 3).requires_grad_(False)


class NoLoss:
    build_model = datasets = lambda self: None


class Failing(Good):
    def build_model(self):
        raise RuntimeError("my own mistake")


class Parquet(Good):
    def __init__(self, path):
        self.path = path

    def datasets(self):
        from scaleray import ParquetSource

        return {"train": ParquetSource(self.path)}
"""

CONFIG = """
workload:
  name: work.py:Good
batch:
  global_size: 16
optimizer:
  learning_rate: 0.1
stop:
  after: 2 steps
tracking:
  system_metrics: false
"""


@pytest.fixture
def folder(tmp_path, mlflow_database, monkeypatch):
    """A user's folder with a workload and a config that runs."""
    (tmp_path / "work.py").write_text(WORKLOAD)
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCALERAY_TRACKING__URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("SCALERAY_CHECKPOINT__STORAGE_PATH", str(tmp_path / "runs"))
    for module in ("work", "scaleray_workload_work"):  # each test has its own file of that name
        monkeypatch.delitem(__import__("sys").modules, module, raising=False)
    return tmp_path


def run(capsys, *words):
    code = run_command(list(words))
    captured = capsys.readouterr()
    return code, captured.err, captured.out


def train(capsys, *words):
    return run(capsys, "train", "-c", "run.yaml", "--local", *words)


def test_the_config_of_these_tests_runs(folder, capsys):
    code, _, out = train(capsys)
    assert code == 0
    assert "done: 2 steps" in out
    assert "record.json" in out
    (report,) = (folder / "runs").glob("*/report.html")
    assert f"report:  {report}" in out and "viewStateShareKey=scaleray-trainings" in out
    page = report.read_text()
    assert "Learning" in page and "figures as PNG and numbers as CSV are next to it" not in page
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("scaleray").experiment_id])
    assert "report.html" in [file.path for file in client.list_artifacts(run.info.run_id)]
    assert run.data.tags["mlflow.user"] and "| perf/step_time_s | s |" in run.data.tags["mlflow.note.content"]
    assert not any(name.startswith(("fsdp.", "pruning.", "gossip.")) for name in run.data.params)


@pytest.mark.combination
def test_a_report_that_fails_is_a_warning_and_not_asked_for_there_is_none(folder, capsys, monkeypatch):
    from scaleray.launch.run import kept_page

    def fail(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(kept_page, "render", fail)
    code, _, out = train(capsys)
    assert code == 0 and "warning: no report was written (OSError: no space left)" in out
    code, _, out = train(capsys, "--no-report")
    assert code == 0 and "report:" not in out and not list((folder / "runs").glob("*/report.html"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch.gloabl-size", "8"], ["batch.gloabl_size", "did you mean batch.global_size?"]),
        (["--batch.global-size", "many"], ["batch.global_size", "many", "integer"]),
        (["--stop.after", "soon"], ["stop.after", "3 epochs"]),
        (["--scale.workers", "3"], ["scale.workers", "--local runs one worker"]),
        (["--parallel.tensor", "2"], ["parallel is tensor 2", "scale.workers is 1", "use --scale.workers 2"]),
        (["--parallel.expert", "2"], ["parallel is expert 2", "use --scale.workers 2"]),
        (["--batch.micro-size", "5"], ["batch.micro_size", "nearest: 4 or 8"]),
        (["--workload.name", "nowhere.py:Good"], ["nowhere.py", "does not exist"]),
        (["--workload.name", "work.py:Godo"], ["no 'Godo'", "Good"]),
        (["--workload.name", "no.such.package:Good"], ["no.such.package", "No module named"]),
        (["--workload.name", "work.py"], ["workload.name", "path/to/file.py:Name"]),
        (["--workload.name", "work.py:NoLoss"], ["loss", "needs the methods"]),
        (["--workload.name", "work.py:Failing"], ["build_model()", "work.py", "my own mistake"]),
        (["--workload.name", "work.py:Frozen"], ["has no trainable parameters"]),
        (["--workload.name", "work.py:OnlyMean"], ["loss()", "must return (sum, count)"]),
        (["--workload.name", "work.py:MeanAsSum"], ["loss()", "a mean", "reduction='sum'"]),
        (["--workload.args.rows", "0"], ["train data", "empty"]),
        (["--workload.args.rows", "10"], ["10 samples", "one global batch needs 16", "--batch.global-size 10"]),
        (["--workload.args.label", "3"], ["label or token", "Target 3 is out of bounds"]),
        (["--workload.args.bad-row", ".nan"], ["column x", "NaN or infinite", "inputs must be finite"]),
        (["--workload.args.colour", "red"], ["workload.args", "colour", "its signature is"]),
        (["--tracking.uri", "http://127.0.0.1:9"], ["MLflow at http://127.0.0.1:9 does not answer"]),
        (["--tracking.uri", "mlruns"], ["tracking.uri", "sqlite:///FILE"]),
        (["--scale.gpus-per-worker", "1"], ["no CUDA device"]),
        (["stray"], ["stray", "--scale.workers 2"]),
    ],
)
def test_one_message_and_exit_code_2(folder, capsys, options, words):
    if "--scale.gpus-per-worker" in options and __import__("torch").cuda.is_available():
        options, words = ["--scale.gpus-per-worker", "7"], ["scale.gpus_per_worker"]
    code, err, _ = train(capsys, *options)
    assert code == 2, err
    for word in words:
        assert word in err
    assert "Traceback" not in err
    assert "site-packages" not in err


def test_a_batch_that_does_not_divide_names_the_nearest_that_do(folder, capsys):
    code, err, _ = run(capsys, "config", "show", "-c", "run.yaml", "--batch.global-size", "10", "--scale.workers", "4")
    assert code == 2
    assert "nearest: 8 or 12" in err


def test_a_missing_file_names_those_that_are_there(folder, capsys):
    code, err, _ = run(capsys, "train", "-c", "rum.yaml")
    assert code == 2
    assert "does not exist" in err
    assert "run.yaml" in err


def test_an_import_error_shows_the_users_lines_only(folder, capsys):
    (folder / "broken.py").write_text("import numpy\n\ndef helper():\n    return 1 / 0\n\nhelper()\n")
    code, err, _ = train(capsys, "--workload.name", "broken.py:X")
    assert code == 2
    assert "broken.py" in err
    assert "line 4, in helper" in err
    assert "ZeroDivisionError" in err
    assert "scaleray/workload.py" not in err
    assert "importlib" not in err


def test_a_syntax_error_shows_its_line(folder, capsys):
    (folder / "broken.py").write_text("def x(:\n")
    code, err, _ = train(capsys, "--workload.name", "broken.py:X")
    assert code == 2
    assert "def x(:" in err
    assert "SyntaxError" in err


def test_an_unreadable_parquet_file_is_named(folder, capsys):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "data").mkdir()
    pq.write_table(pa.table({"x": np.zeros(20)}), folder / "data" / "a.parquet")
    (folder / "data" / "b.parquet").write_bytes(b"not parquet at all, only text")
    code, err, _ = train(capsys, "--workload.name", "work.py:Parquet", "--workload.args.path", "data")
    assert code == 2
    assert "b.parquet" in err
    assert "cannot be read" in err


def test_a_storage_path_that_cannot_be_written_is_named(folder, capsys):
    (folder / "file").write_text("")
    code, err, _ = train(capsys, "--checkpoint.storage-path", "file/runs")
    assert code == 2
    assert "checkpoint.storage_path" in err
    assert "cannot be written" in err


def test_a_port_in_use_is_named(folder, capsys):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, err, _ = run(capsys, "tracking", "ui", "--port", str(port))
    assert code == 2
    assert f"The port {port} is in use" in err


def test_an_unknown_command_is_bad_usage(capsys):
    assert run(capsys, "trian")[0] == 2


def test_a_slip_leaves_no_run_folder_and_no_run(folder, empty_database, capsys):
    train(capsys, "--workload.args.rows", "10")
    assert list((folder / "runs").iterdir()) == []
    assert (folder / "mlflow.db").read_bytes() == empty_database.read_bytes()


@pytest.mark.combination
def test_json_prints_the_record_and_nothing_else_on_stdout(folder, capsys):
    import json

    code, err, out = train(capsys, "--json")
    assert code == 0
    assert json.loads(out)["status"] == "FINISHED"
    assert "done: 2 steps" in err


def test_config_show_prints_every_derived_value_with_how(folder, capsys):
    code, _, out = run(
        capsys,
        "config",
        "show",
        "-c",
        "run.yaml",
        "--scale.workers",
        "2",
        "--optimizer.rule",
        "sqrt",
        "--optimizer.reference-batch-size",
        "4",
    )
    assert code == 0
    assert "learning_rate" in out
    assert "rule sqrt at kappa = 4 = 16 / 4" in out
    for name in (
        "global_batch_size",
        "accumulation_steps",
        "total_steps",
        "warmup_steps",
        "steps_per_epoch",
        "strategy",
    ):
        assert f"# {name}" in out


def test_environment_variables_lose_to_flags_and_win_over_the_file(folder, capsys, monkeypatch):
    monkeypatch.setenv("SCALERAY_BATCH__GLOBAL_SIZE", "8")
    assert "global_size: 8" in run(capsys, "config", "show", "-c", "run.yaml", "--no-data")[2]
    assert (
        "global_size: 4" in run(capsys, "config", "show", "-c", "run.yaml", "--no-data", "--batch.global-size", "4")[2]
    )


def test_config_keys_lists_every_key(capsys):
    from scaleray.config import known_keys

    _, _, out = run(capsys, "config", "keys")
    for key in known_keys():
        assert f"\n{key}  " in "\n" + out


def test_a_nonfinite_run_fails_with_exit_code_1(folder, capsys):
    (folder / "explode.py").write_text(
        textwrap.dedent(
            """
            from work import Good


            class Explode(Good):
                calls = 0

                def loss(self, model, batch):
                    total, count = super().loss(model, batch)
                    self.calls += model.training
                    return total * (float("inf") if self.calls == 2 else 1), count
            """
        )
    )
    code, err, _ = train(capsys, "--workload.name", "explode.py:Explode", "--stop.after", "4 steps")
    assert code == 1
    assert "NonFiniteLossError" in err
    assert "step 2" in err


@pytest.mark.combination
def test_a_reader_that_has_seen_enough_gets_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "scaleray", "config", "keys"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=600)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_broken_pipe_to_another_process_is_not_taken_for_a_reader_that_left(monkeypatch):
    command_line = importlib.import_module("scaleray.cli.main")  # the package has a function of that name
    monkeypatch.setattr(command_line, "run_command", mock.Mock(side_effect=BrokenPipeError("a worker is gone")))
    monkeypatch.setattr(command_line, "_make_early_ends_failures", lambda: None)
    reader, writer = os.pipe()
    with open(writer, "w") as output, open(reader):
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(BrokenPipeError, match="a worker is gone"):
            command_line.main([])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["path", "next", "digits"], "scaleray path next does not take 'digits'.\n  give it as --name digits; see scaleray path next --help"),
        (["report", "a", "b"], "scaleray report does not take 'b'.\n  leave it out; see scaleray report --help"),
        (["cluster", "status", "a", "b"], "does not take 'b'.\n  leave it out; see scaleray cluster status --help"),
        (["compare", "--fail-if-slower", "x"], "see scaleray compare --help"),
    ],
)  # fmt: skip
def test_words_that_a_command_does_not_take_are_refused_with_its_own_help(capsys, words, said):
    assert run_command(words) == 2
    err = capsys.readouterr().err
    assert said in err and "Tokens" not in err and "scaleray --help" not in err
