"""Runs as MLPerf's own tools read them."""

import json
import logging

import pytest

from scaleray.config.base import Target
from scaleray.errors import TrackingError, UsageError
from scaleray.launch.gate.evidence import Evidence
from scaleray.launch.gate.mlperf_log import POINTS, TOKEN, mlperf_lines, write_mlperf_log
from scaleray.tracking.find_record import FoundRun
from scaleray.tracking.steps_file import STEP_COLUMNS
from tests import study_examples

TARGET = Target.parse("test/accuracy >= 0.9")
STEPS = f"{','.join(STEP_COLUMNS)}\n" + "".join(
    ",".join({"step": f"{n}", "step_time_s": "0.5", "recorded_at": f"{1000 + n / 2}"}.get(c, "") for c in STEP_COLUMNS)
    + "\n"
    for n in range(1, 41)
)
CONFIG = {
    "seed": 3, "optimizer": {"name": "adamw"}, "tracking": {"experiment": "digits"}, "stop": {}, "scale": {"workers": 2},
}  # fmt: skip
DERIVED = {"global_batch_size": 64, "steps_per_epoch": 10, "accumulation_steps": 1, "learning_rate": 0.1}
DATA = {"train": {"rows": 640}, "test": {"rows": 100}}


def a_run(reached_at, *, name="run", steps=STEPS):
    record = study_examples.run_record(name=name, config=CONFIG, derived=DERIVED, data=DATA)
    points = [(step, 0.95 if step >= reached_at else 0.5) for step in range(5, 41, 5)]
    return FoundRun(record, name, None, steps, {"test/accuracy": points})


def parsed(lines):
    return [json.loads(line.removeprefix(TOKEN)) for line in lines]


def test_a_run_ends_at_the_first_evaluation_with_the_target_at_the_time_of_its_step():
    lines = parsed(mlperf_lines(a_run(20), TARGET, benchmark="digits"))
    evaluations = [line for line in lines if line["key"] == "eval_accuracy"]
    assert [line["metadata"]["epoch_num"] for line in evaluations] == [0.5, 1.0, 1.5, 2.0]
    assert [line["metadata"]["samples_count"] for line in evaluations] == [320, 640, 960, 1280]
    assert [line["time_ms"] for line in evaluations] == [1002500, 1005000, 1007500, 1010000]
    assert (lines[-1]["key"], lines[-1]["metadata"]["status"]) == ("run_stop", "success")
    assert [line["time_ms"] for line in lines] == sorted(line["time_ms"] for line in lines)


def test_a_run_without_the_target_is_aborted():
    lines = parsed(mlperf_lines(a_run(99), TARGET, benchmark="digits"))
    assert lines[-1]["metadata"]["status"] == "aborted"


def test_mlperfs_checker_of_convergence_reads_the_lines_and_the_reference_points(tmp_path, monkeypatch):
    checker = pytest.importorskip("mlperf_logging.rcp_checker.rcp_checker", reason="mlperf-logging is not installed")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    for times, passes in (([20, 25, 25, 25, 30], True), ([5, 5, 5, 5, 5], False)):
        evidence = Evidence([a_run(n) for n in times], [a_run(n) for n in (20, 20, 25, 25, 25, 25, 25, 30, 30, 30)], [])
        folder = tmp_path / str(passes)
        write_mlperf_log(evidence, TARGET, folder, benchmark="resnet")
        files = sorted(map(str, folder.glob("result_*.txt")))
        batch, epochs, benchmark = checker.get_submission_epochs(files, "6.0.0", False)
        assert (batch, benchmark, sorted(epochs)) == (64, "resnet", sorted(n / 10 for n in times))
        with open(folder / POINTS) as points:
            options = {"rcp_file": points, "rcp_pass": "pruned_rcps"}
            found = checker.check_directory(str(folder), "training", "6.0.0", False, False, **options)
        assert found[:2] == (passes, "RCP found"), found


def test_mlperfs_parser_and_common_rules_accept_every_line(tmp_path):
    compliance = pytest.importorskip(
        "mlperf_logging.compliance_checker.mlp_compliance", reason="mlperf-logging is not installed"
    )
    from mlperf_logging.compliance_checker.mlp_parser import parse_file

    evidence = Evidence([a_run(20)], [], [])
    (file,) = write_mlperf_log(evidence, TARGET, tmp_path, benchmark="llama31_8b")
    lines, errors = parse_file(str(file), "6.0.0")
    assert not errors and len(lines) > 30
    checker = compliance.make_checker("training", "6.0.0", quiet=False, werror=True)
    accepted = checker.check_file(str(file), "training_6.0.0/common.yaml")
    assert accepted, [*checker.overwritable.values(), *checker.not_overwritable]


def test_without_a_target_or_steps_nothing_is_written(tmp_path):
    with pytest.raises(UsageError, match="counts to a target"):
        write_mlperf_log(Evidence([a_run(20)], [], []), None, tmp_path / "a", benchmark="digits")
    with pytest.raises(TrackingError, match=r"no steps\.csv"):
        write_mlperf_log(Evidence([a_run(20, steps=None)], [], []), TARGET, tmp_path / "a", benchmark="digits")
    with pytest.raises(UsageError, match="1 without the target"):
        write_mlperf_log(Evidence([a_run(20)], [a_run(20), a_run(99)], []), TARGET, tmp_path / "a", benchmark="digits")
    assert not (tmp_path / "a").exists()
