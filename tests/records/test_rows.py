"""What records measure, as rows: of known metrics, each once, and with the intervals that were measured."""

from __future__ import annotations

import dataclasses

import pytest
import study_examples

from scaleray.common import metric_names as names
from scaleray.records.rows import as_columns, by_metric

STUDY, SWEEP = study_examples.study(), study_examples.sweep(batches=(32, 64), rules=("sqrt",))
MEASURED = {
    "run": study_examples.run_record(metrics={}),
    "point": STUDY.curves[0].points[1].point,
    "point of a curve": STUDY.curves[0].points[1],
    "trial": SWEEP.trials[0],
    "batch size": SWEEP.goodput[0],
}


@pytest.mark.parametrize("what", MEASURED)
def test_every_row_is_of_a_metric_that_stands_in_the_table_of_metrics_and_there_once(what):
    known = [value for value in vars(names).values() if isinstance(value, names.Metric)]
    metrics = [row.metric for row in MEASURED[what].rows()]
    assert all(metric in known for metric in metrics)
    assert len({row.key for row in MEASURED[what].rows()}) == len(metrics) == len(set(metrics))


def test_a_row_has_the_unit_the_direction_and_the_interval_of_what_it_measures():
    at = STUDY.curves[0].points[1]
    row = by_metric(at.rows())[names.POINT_SAMPLES_PER_S]
    assert (row.name, row.unit, row.better) == ("point/samples_per_s", "samples/s", "higher")
    rate = at.point.samples_per_s
    assert (row.value, row.interval) == (rate.value, (rate.low, rate.high))
    columns = as_columns([row])
    assert columns == {"samples_per_s": rate.value, "samples_per_s_low": rate.low, "samples_per_s_high": rate.high}


def test_a_point_that_missed_its_target_has_no_time_to_it():
    missed = STUDY.curves[0].points[-1]
    assert missed.point.to_target is not None and not missed.point.to_target.is_reached
    rows = by_metric(missed.rows())
    assert rows[names.POINT_TIME_TO_TARGET_S].value is None and rows[names.RECORD_TARGET_REACHED].value is False


def test_a_trial_whose_noise_was_not_measured_has_the_columns_of_its_interval_all_the_same():
    trial = dataclasses.replace(SWEEP.trials[0], noise_scale=None, noise_interval=None)
    columns = as_columns(trial.rows())
    assert {columns[f"noise_scale{end}"] for end in ("", "_low", "_high")} == {None}
    measured = dataclasses.replace(trial, noise_scale=200.0, noise_interval=(100.0, None))
    columns = as_columns(measured.rows())
    assert [columns[f"noise_scale{end}"] for end in ("", "_low", "_high")] == [200.0, 100.0, None]


def test_a_run_ends_with_its_evaluations_by_name():
    record = study_examples.run_record(metrics={"validation/loss": 0.3, "test/accuracy": 0.9})
    assert [(row.name, row.value) for row in record.rows()[-2:]] == [("test/accuracy", 0.9), ("validation/loss", 0.3)]


def test_what_a_record_alone_has_stands_in_no_list_of_mlflows_metrics():
    alone = [row.metric for row in MEASURED["run"].rows() if not row.metric.is_in_mlflow]
    assert names.RECORD_TOTAL_TIME_S in alone and not set(alone) & set(names.ALL)
