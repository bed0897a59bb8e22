"""A run is held against what a study of the same training has measured, where one lies beside it."""

import json
import os

import pytest

from scaleray.config import load_config
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.values import DataSize
from scaleray.launch.run.prediction import Prediction, prediction
from scaleray.launch.session.conditions import conditions_of
from scaleray.records.study_record import Curve, CurvePoint, Estimate, Point, StudyRecord


def config(**more):
    flags = {"workload.name": "x:Y", "batch.global_size": 16, "optimizer.learning_rate": 0.1, "stop.after": "9 steps"}
    return load_config(flags={**flags, "scale.workers": 2, "strategy.name": "ddp", **more}, environ={})


def known(value):
    return Estimate(value, value, value)


def write_study(storage, name, samples_per_s, *, at=1000, of=None, **more):
    """A study's record with a point on two workers."""
    given = {"strategy": "ddp", "workers": 2, "global_batch_size": 16, **more}
    point = Point(
        mode="strong", micro_batch_size=8, accumulation_steps=1, turns=[[0.1]], num_warmup_steps=0,
        step_time_s=known(0.1), samples_per_s=known(samples_per_s), compute_s=0.1, exposed_comm_s=0.0, input_wait_s=0.0,
        measured_at=0.0, **given,
    )  # fmt: skip
    curve = Curve(
        mode="strong", base_workers=2, points=[CurvePoint(point=point, speedup=known(1), efficiency=known(1))]
    )
    of = of or config()
    record = StudyRecord(
        name=name, command="", config=of.to_dict(), conditions=conditions_of(of, object(), {}), curves=[curve],
        started_at=0.0, duration_s=1.0,
    )  # fmt: skip
    (storage / name).mkdir(parents=True)
    (storage / name / "record.json").write_text(record.to_json())
    os.utime(storage / name / "record.json", (at, at))


def found(storage, of=None):
    of = of or config()
    return prediction(of, derive(of, DataSize(64)), run_path=str(storage / "run"))


def test_the_newest_study_of_the_same_training_counts(tmp_path):
    write_study(tmp_path, "study-old", 100.0, at=1000)
    write_study(tmp_path, "study-new", 120.0, at=2000)
    write_study(tmp_path, "study-of-another", 900.0, at=3000, of=config(**{"optimizer.learning_rate": 0.2}))
    assert found(tmp_path) == Prediction(120.0, "study-new")
    assert found(tmp_path).lines() == ["  compared with 120 samples/s, which study-new measured"]


@pytest.mark.parametrize("other", [{"workers": 4}, {"global_batch_size": 32}, {"strategy": "fsdp"}])
def test_a_point_of_another_size_says_nothing(tmp_path, other):
    write_study(tmp_path, "study-a", 100.0, **other)
    assert found(tmp_path) == Prediction() and found(tmp_path).lines() == []


def test_what_the_config_says_comes_first_and_is_not_announced(tmp_path):
    write_study(tmp_path, "study-a", 100.0)
    asked = found(tmp_path, config(**{"monitoring.expected_samples_per_s": 80.0}))
    assert asked == Prediction(80.0) and asked.lines() == []


def test_a_damaged_record_and_one_of_a_run_are_passed_over(tmp_path):
    write_study(tmp_path, "study-a", 100.0, at=1000)
    for name, text in (("study-b", "{"), ("study-c", json.dumps({"kind": "run"}))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(text)
    assert found(tmp_path) == Prediction(100.0, "study-a")
    assert found(tmp_path / "nowhere") == Prediction()
