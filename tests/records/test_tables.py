"""Tables of studies and sweeps, and the settings that they stand on."""

from __future__ import annotations

import dataclasses
import re

import pytest
import study_examples
from hypothesis import given
from hypothesis import settings as how_often
from hypothesis import strategies as st

from scaleray.records.settings import best, best_by_batch, settings
from scaleray.records.study_record import Estimate
from scaleray.records.text.study_sweep_tables import escaped, study_tables, sweep_table
from scaleray.records.text.units import count, memory, seconds, with_interval


def test_seeds_are_one_setting_whose_figures_are_medians():
    record = study_examples.sweep(batches=(64,), rules=("sqrt",), factors=(1.0,), seeds=(0, 1, 2))
    (only,) = settings(record)
    assert [t.seed for t in only.trials] == [0, 1, 2] and only.num_reached == 3
    assert only.samples_to_target == sorted(t.samples_to_target for t in record.trials)[1]
    assert only.value == sorted(t.value for t in record.trials)[1]


def test_a_lucky_seed_does_not_speak_for_those_that_missed_the_target():
    record = study_examples.sweep(batches=(64,), rules=("sqrt",), factors=(1.0,), seeds=(0, 1, 2))
    missed = [dataclasses.replace(t, samples_to_target=None, time_to_target_s=None) for t in record.trials[1:]]
    (only,) = settings(dataclasses.replace(record, trials=[record.trials[0], *missed]))
    assert only.samples_to_target is None and only.num_reached == 1


def test_trials_with_another_key_set_are_another_setting():
    record = study_examples.sweep(batches=(64,), rules=("sqrt",), factors=(1.0,), seeds=(0, 1))
    other = dataclasses.replace(record.trials[1], settings={**record.trials[1].settings, "optimizer.momentum": 0.5})
    assert len(settings(dataclasses.replace(record, trials=[record.trials[0], other]))) == 2


def test_the_best_needs_the_fewest_samples_and_without_a_target_has_the_best_value():
    record = study_examples.sweep(batches=(32, 64), rules=("sqrt", "none"))
    found = settings(record)
    assert best(found, "min").samples_to_target == min(s.samples_to_target for s in found if s.samples_to_target)
    no_target = [dataclasses.replace(s, samples_to_target=None) for s in found]
    assert best(no_target, "min").value == min(s.value for s in found if s.value is not None)
    assert best(no_target, "max").value == max(s.value for s in found if s.value is not None)
    assert best([], "min") is None


def test_failed_trials_are_no_settings():
    record = study_examples.sweep(batches=(64,), rules=("sqrt",))
    failed = [dataclasses.replace(t, status="failed") for t in record.trials]
    assert settings(dataclasses.replace(record, trials=failed)) == []
    assert best_by_batch(dataclasses.replace(record, trials=failed)) == {}
    assert sweep_table(dataclasses.replace(record, trials=failed)).rows == ()


def test_a_studys_table_has_a_row_for_each_point_and_only_columns_with_figures():
    strong, weak = study_tables(study_examples.study())
    assert [row[0] for row in strong.rows] == ["1", "2", "4", "8"]
    assert "time to target" in strong.columns and "time to target" not in weak.columns
    assert "tokens/s" not in strong.columns and "marks" not in strong.columns
    assert strong.rows[3][strong.columns.index("time to target")] == "missed"
    assert strong.title == "Strong scaling, ddp, 512 samples a step" and weak.title.endswith(
        "128 samples a step and worker"
    )
    assert all(len(row) == len(strong.columns) for row in strong.rows)


@given(st.floats(1e-7, 1e6))
@how_often(max_examples=100)
def test_a_duration_is_shown_to_three_digits(value):
    number, unit = seconds(value).split()
    factor = {"h": 3600, "min": 60, "s": 1, "ms": 1e-3, "µs": 1e-6}[unit]
    assert float(number) * factor == pytest.approx(value, rel=0.006)


@given(st.floats(0.01, 1e14))
@how_often(max_examples=100)
def test_a_count_is_shown_to_three_digits(value):
    number, _, suffix = count(value).partition(" ")
    factor = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[suffix]
    assert float(number) * factor == pytest.approx(value, rel=0.006)


def test_units_are_said_once_in_an_interval():
    assert with_interval(Estimate(0.124, 0.122, 0.127), seconds) == "124 ms (122–127 ms)"
    assert with_interval(Estimate(1.0, 0.99, 1.2), seconds) == "1 s (990 ms–1.2 s)"
    assert with_interval(Estimate(2.0, 2.0, 2.0), seconds) == "2 s"
    assert with_interval(Estimate(0.5, 0.4, 0.6), lambda v: f"{v:.0%}") == "50% (40%–60%)"
    assert memory(3 * 2**30) == "3 GiB" and memory(5 * 2**20) == "5 MiB" and memory(0) == ""
    assert memory(1013 * 2**20) == "0.989 GiB" and memory(999.4 * 2**20) == "999 MiB"


@given(st.text(max_size=60))
@how_often(max_examples=200)
def test_no_text_breaks_out_of_a_cell_of_markdown(text):
    shown = escaped(text)
    assert "\n" not in shown and "<" not in shown
    assert not re.search(r"(?<!\\)(\\\\)*[|`*_\[\]#!]", shown)
