"""What a look at a workload finds, by name."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import wrong_workloads

from scaleray.cli.main import run_command
from scaleray.records.check_record import DOUBTFUL, WRONG
from scaleray.verification.check.check import check

CONFIG = {
    "workload.name": "wrong_workloads:Right",
    "batch.global_size": 8,
    "optimizer.learning_rate": 0.1,
    "stop.after": "2 epochs",
}


def checked(name, **flags):
    """The record without processes, and its findings that are not good."""
    record = check({**CONFIG, **flags}, getattr(wrong_workloads, name), processes=False)
    return record, [finding for finding in record.findings if finding.verdict != "good"]


def test_a_workload_without_a_mistake_is_ready_to_train():
    record, findings = checked("Right")
    assert record.passed and not findings and record.verdict.startswith("ready to train")
    assert [(c.name, c.shape, c.dtype) for c in record.columns] == [("x", "8 x 4", "float32"), ("y", "8", "int64")]
    assert record.figures["rows"] == {"train": 40, "val": 20}
    assert record.figures["loss_count"] == 8 and record.figures["num_parameters"] == 67
    assert record.figures["loss_sum"] == pytest.approx(8 * record.figures["loss"])
    assert record.figures["gradient_bytes"] == record.figures["parameter_bytes"] == 67 * 4


@pytest.mark.parametrize(
    ("name", "subject", "says"),
    [
        ("Mean", "loss", ["loss() at ", "wrong_workloads.py:", "a mean", "reduction='sum'"]),
        ("MeanMetric", "metrics", ["accuracy of metrics() at ", "wrong_workloads.py:", "is a mean"]),
        ("UnseenLabel", "extreme rows", ["column y of val", "3 (row 13)", "Target 3 is out of bounds"]),
        (
            "Double",
            "loss",
            ["has the types float64 (2.bias), and the columns have float32 (x)", "wrong_workloads.py:", "datasets()"],
        ),
        ("Unrepeatable", "split train", ["transform() at ", "wrong_workloads.py:", "returns a different column x"]),
        ("OtherModelEachTime", "build_model", ["wrong_workloads.py:", "draws a different 2.bias from the same seed"]),
        ("InfiniteGradient", "gradients", ["NaN or infinite in", "square root of zero"]),
        ("RaisesInTheLoss", "loss", ["wrong_workloads.py", "KeyError: 'labels'"]),
        ("Gaps", "loss", ["column x of the first batch", "NaN or infinite in 8 of 8 rows"]),
        ("BatchNegatives", "loss", ["depends on how a batch is cut: 8 rows give ", "wrong_workloads.py:"]),
        ("Dice", "loss", ["of it apart)", "outputs() and batch_loss() instead of loss()"]),
        ("OneIsAMean", "loss", ["other", "a mean", "reduction='sum'"]),
        ("WrongArguments", "metrics", ["metrics()['auroc'] failed while being given to MulticlassAUROC"]),
        ("NeedsAMissingColumn", "evaluation", ["loss() failed while evaluating val", "KeyError: 'noise'"]),
    ],
)
def test_a_mistake_is_named_with_its_place(name, subject, says):
    record, findings = checked(name)
    wrong = [finding for finding in findings if finding.verdict == WRONG]
    assert subject in [finding.subject for finding in wrong] and not record.passed
    text = next(finding.text for finding in wrong if finding.subject == subject)
    assert [words for words in says if words not in text] == [], text


@pytest.mark.parametrize(
    ("name", "subject", "says"),
    [
        ("Unused", "unused parameters", "head.weight, head.bias get none"),
        ("BatchMetric", "metrics", "val/squared: it depends on how a batch is cut: 8 rows give "),
        ("OtherColumns", "split val", "column x is float64[4] here and float32[4] in train"),
    ],
)
def test_what_training_survives_is_worth_a_look(name, subject, says):
    record, findings = checked(name)
    assert record.passed and subject in record.verdict
    assert [(f.verdict, says in f.text) for f in findings if f.subject == subject] == [(DOUBTFUL, True)]


@pytest.mark.parametrize("batch_size", [2, 8])
@pytest.mark.parametrize(
    ("name", "text"),
    [("OneLabel", "column y is 0 in all of 40 rows"), ("EmptyImages", "column x is 0 in all of 32 rows")],
)
def test_a_constant_is_named_whatever_the_batch(name, text, batch_size):
    record, findings = checked(name, **{"batch.global_size": batch_size})
    assert record.passed and [f.verdict for f in findings if f.text.startswith(text)] == [DOUBTFUL], findings


def test_a_config_that_does_not_fit_the_data_is_a_finding():
    _, findings = checked("Right", **{"batch.global_size": 100})
    assert [f.subject for f in findings] == ["recipe"] and "one global batch needs 100" in findings[0].text


def test_the_workload_is_as_it_was_after_a_look():
    import torch

    before = torch.get_rng_state()
    checked("Right")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.combination
def test_two_processes_that_train_something_else_are_found():
    record = check(CONFIG, wrong_workloads.KnowsItsRank)
    last = record.findings[-1]
    assert (last.subject, last.verdict) == ("two processes", WRONG) and "step 1" in last.text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Objects", "val/auroc: accepts the result of metrics()"),
        ("LossesAlone", "loss other: sum "),
        ("LossesAlone", "noise only in train"),
        ("DrawsInItsLoss", "halves were not compared, since the loss draws random numbers"),
        ("SparseBuffer", "halves add up"),
        ("SparseGradient", "gradients: finite for 3 of 3 parameters"),
        ("NegativesOfMicroBatches", "which depends_on_micro_batch accepts"),
        ("WholeBatchNegatives", "it is computed over the whole batch"),
        ("Compiled", "draws the same 2 parameters"),
    ],
)
def test_what_the_documentation_allows_is_ready_to_train(name, says):
    sized = {"optimizer.name": "sgd"} if name == "SparseGradient" else {}  # AdamW needs dense gradients
    record, findings = checked(name, **sized)
    assert record.passed and not findings, findings
    assert any(says in f"{finding.subject}: {finding.text}" for finding in record.findings), record.findings


@pytest.mark.always("LossesAlone")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("LossesAlone", "equal one process within"),
        ("SparseGradient", "equal one process within"),
        ("SparseBuffer", "in float32; the workload does not run in float64"),
        ("WholeBatchNegatives", "equal one process within"),
        ("NegativesOfMicroBatches", "the gradient is the sum of those of its 2 micro-batches, each computed alone"),
    ],
)
def test_two_processes_judge_a_workload_as_training_takes_it(name, says):
    record = check({**CONFIG, "batch.drop_last": True, "optimizer.name": "sgd"}, getattr(wrong_workloads, name))
    assert record.passed and record.findings[-1].subject == "two processes", record.findings
    assert says in record.findings[-1].text


@pytest.mark.combination
def test_a_recipe_of_several_losses_passes():
    record = check("jobs/recipes/gan.yaml")
    assert record.passed and {"loss discriminator", "loss generator"} <= {f.subject for f in record.findings}


def test_a_recipe_of_rows_of_unequal_length_passes():
    record = check("jobs/recipes/source_lines.yaml", processes=False)
    assert record.passed and "worth a look" not in record.verdict, record.findings


PATIENCE = {"evaluation.every": "1 epoch", "stop.patience": 2, "stop.watch": "val/accuracy max"}


@pytest.mark.combination
def test_a_training_that_ends_on_patience_is_compared_as_one_without():
    record = check({**CONFIG, **PATIENCE, "stop.at": "val/accuracy >= 0.99"}, wrong_workloads.Right)
    assert record.passed and "equal one process" in record.findings[-1].text, record.findings[-1]


@pytest.mark.combination
def test_the_command_prints_findings_and_verdict_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text(
        f"workload: {{name: {wrong_workloads.__file__}:Right}}\nbatch: {{global_size: 8}}\n"
        "optimizer: {learning_rate: 0.1}\nstop: {after: 2 epochs}\n"
    )
    assert run_command(["check", "-c", str(tmp_path / "c.yaml"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["findings"][-1]["subject"] == "two processes" and "equal one process" in told["findings"][-1]["text"]
    assert run_command(["check", "-c", str(tmp_path / "c.yaml"), "--no-processes", "--batch.global-size", "100"]) == 1
    out = capsys.readouterr().out
    assert "wrong    recipe: " in out and "1 of 2 checks failed: recipe" in out
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


@pytest.mark.combination
def test_a_file_with_the_name_of_a_library_reaches_the_two_processes(tmp_path):
    file = tmp_path / Path(statistics.__file__).name  # that library is imported already, here as in every command
    file.write_text(Path(wrong_workloads.__file__).read_text())
    record = check({**CONFIG, "workload.name": f"{file}:Right"})
    assert record.passed and "two processes" in [finding.subject for finding in record.findings]
