"""Run records: written as JSON, read again, and strict enough for other readers."""

import dataclasses
import json
import math

import pytest
import study_examples
from pydantic import ValidationError

from scaleray.common import metric_names
from scaleray.records.certificate import Comparison, EqualityCertificate, Mismatch, Outcome
from scaleray.records.json_record import first_problem
from scaleray.records.profile_record import (
    Buckets,
    CollectiveRow,
    Goodput,
    MemoryNumbers,
    MemoryPeak,
    RankProfile,
    RunProfile,
    Spread,
)
from scaleray.records.run_record import RunRecord
from tests import recorded_runs

STEP = Spread(2.0, 0.1, 0.12, [0.1, 0.1])
PROFILE = RunProfile(
    Buckets(2, 10, 2),
    [
        RankProfile(
            0,
            "n",
            "cpu",
            20,
            STEP,
            {"forward": STEP},
            0.001,
            memory=MemoryNumbers(peak=MemoryPeak(9, 3, "backward", 1.5)),
        )
    ],
    closes=True,
    gap=0.0001,
    gap_rank=0,
    collectives=[CollectiveRow(0, "dp", 2, "all_reduce", 20, 8e6, 0.5, None, 0.25)],
    goodput=Goodput(10.0, {"productive": 6.0, "start": 4.0}),
)
VALUES = {
    "name": "digits", "status": "FINISHED", "verdict": "done", "workers": 2, "strategy": "ddp", "steps": 40, "final_loss": 0.25,
    "metrics": {"val/accuracy": 0.98}, "samples_per_s": 100.0, "tokens_per_s": None, "step_time_s": 0.01, "input_wait_share": 0.0,
    "time_to_first_step_s": 3.0, "training_time_s": 1.0, "total_time_s": 5.0, "peak_memory_bytes": [1, 2], "nonfinite_steps": 0,
    "sample_order": "exact", "config": {"seed": 1}, "config_hash": "ab", "derived": {"betas": [0.9, 0.99]}, "data": {"train": {"rows": 5}},
    "environment": {}, "environment_hash": "cd", "tracking_uri": "sqlite:///x", "experiment_id": "1", "run_id": "2", "mlflow_link": "",
    "run_dir": "/x", "events": ["a restart"], "resumed_after": [20], "compilation": {}, "noise": {"scale": 12.0}, "memory": [{}], "marks": ["emulated"], "start": {"Ray": 3.0}, "best": {"step": 3}, "profile": PROFILE, "alerts": [{"name": "hang"}],
    "evaluations": {"val/accuracy": [[20, 0.9], [40, 0.98]]}, "weights": {"weights.pt": {"sha256": "00", "num_bytes": 5}}, "checkpoints": {"step-000000040": "00"}, "attributes": {"1/negative_slope": 0.2}, "unsent_file": None, "schema_version": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", "x"),
        ("metrics", {"a": "b"}),
        ("metrics", [1]),
        ("memory", {}),
        ("peak_memory_bytes", ["a"]),
        ("events", [1]),
        ("derived", 5),
        ("workers", None),
        ("samples_per_s", {}),
    ],
)
def test_a_record_with_another_type_is_refused_by_its_key(key, value):
    """Reports and comparisons ended in a traceback."""
    values = json.loads(study_examples.run_record().to_json())
    with pytest.raises(TypeError, match=rf"^{key}"):
        RunRecord.from_json(json.dumps({**values, key: value}))
    values["metrics"] = {"validation/loss": None}  # it was not finite
    assert RunRecord.from_json(json.dumps(values)).metrics == {"validation/loss": None}


def test_a_record_reads_what_it_wrote(tmp_path):
    record = RunRecord(**VALUES)
    (tmp_path / "record.json").write_text(record.to_json())
    assert RunRecord.read(tmp_path / "record.json") == record
    assert set(VALUES) == {field.name for field in dataclasses.fields(RunRecord)}


def test_a_certificate_reads_what_it_wrote_and_names_a_key_that_is_missing():
    mismatch = Mismatch(3, "gradient", "weight", 0.5, "dtype", "narrower")
    outcomes = [Outcome("ddp", 2, 1, "differs", comparison=Comparison(loss=0.5), mismatch=mismatch)]
    certificate = recorded_runs.a_certificate(outcomes=outcomes)
    read = EqualityCertificate.from_json(certificate.to_json())
    (outcome,) = read.outcomes
    assert math.isnan(outcome.comparison.grad_norm) and outcome.comparison.loss == 0.5 and outcome.mismatch == mismatch
    assert dataclasses.replace(read, outcomes=[]) == dataclasses.replace(certificate, outcomes=[])
    values = certificate.to_dict()
    for more, problem in (({}, "bound is missing"), ({"bound": 0.0, "date": "today"}, "date is 'today': ")):
        with pytest.raises(ValidationError) as error:
            EqualityCertificate.from_json(json.dumps({k: v for k, v in values.items() if k != "bound"} | more))
        assert first_problem(error.value).startswith(problem)


def test_a_record_of_before_profiles_has_none():
    values = RunRecord(**VALUES).to_dict()
    del values["profile"]
    assert RunRecord.from_json(json.dumps(values)).profile is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_has_no_word_for_what_is_not_finite(value):
    record = RunRecord(**{**VALUES, "final_loss": value, "metrics": {"val/loss": value, "list": [value, 1.0]}})
    found = json.loads(record.to_json(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert found["final_loss"] is None and found["metrics"] == {"val/loss": None, "list": [None, 1.0]}


def test_what_json_does_not_know_becomes_text():
    found = json.loads(RunRecord(**{**VALUES, "config": {1: ("a", {2}, None, True)}}).to_json())
    assert found["config"] == {"1": ["a", "{2}", None, True]}


def test_every_metric_has_a_name_of_its_own_with_section_unit_and_help():
    names = [metric.name for metric in metric_names.ALL]
    assert len(names) == len(set(names)) >= 10
    assert all("/" in metric.name and metric.unit and metric.help for metric in metric_names.ALL)
