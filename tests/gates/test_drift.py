"""Speed and data of today's runs against the promoted ones: planted changes fail, missing evidence is inconclusive."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest

from scaleray.data import ArraySource
from scaleray.data.described import columns_of
from scaleray.gates import compared
from scaleray.gates.drift import data_gate, speed_gate
from scaleray.gates.policy import DriftPolicy
from tests.recorded_runs import ENVIRONMENT, a_run

POLICY = DriftPolicy()


def runs(speeds, *, data=None, **more):
    return [
        dataclasses.replace(a_run(f"run{number}", data=data, **more), samples_per_s=speed)
        for number, speed in enumerate(speeds)
    ]


def data_of(rows=200, *, scale=1.0, shift=0.0, seed=0, sha256="aa", labels=3, **columns):
    random = np.random.default_rng(seed)
    values = {
        "x": (scale * random.normal(size=(rows, 4)) + shift).astype(np.float32),
        "label": random.integers(labels, size=rows),
        **columns,
    }
    return {"train": {"rows": rows, "sha256": sha256, "hashed": "content", "columns": columns_of(ArraySource(values))}}


def answers(result):
    return {check.what: check.answer for check in result.checks}


class TestSpeed:
    def test_runs_as_fast_as_then_pass(self):
        assert speed_gate(runs([1000, 1010, 990]), runs([1005, 995, 1000]), policy=POLICY).answer == "pass"

    def test_slower_runs_fail_with_both_numbers(self):
        result = speed_gate(runs([700, 710, 690]), runs([1005, 995, 1000]), policy=POLICY)
        assert result.answer == "fail"
        (check,) = [check for check in result.checks if check.answer == "fail"]
        assert (
            check.numbers["candidate"] == pytest.approx(1 / 700, rel=0.01)
            and "beyond the margin of 10 %" in check.words
        )

    def test_the_margin_is_one_of_the_ratio_of_geometric_means(self):
        assert speed_gate(runs([910, 911, 912]), runs([1000, 1001, 999]), policy=POLICY).answer == "pass"
        result = speed_gate(runs([905, 906, 904]), runs([1000, 1001, 999]), policy=POLICY)
        assert result.answer == "fail"
        (check,) = [check for check in result.checks if check.what.startswith("s per sample")]
        assert check.what == "s per sample: not worse, within 10 %"
        assert check.numbers["worse"] == pytest.approx(1000 / 905 - 1, rel=1e-4)
        assert check.numbers["baseline"] == pytest.approx(1e-3, rel=1e-4)

    def test_slowdowns_of_a_busy_machine_pass_at_the_margin_no_more_often_than_alpha_says(self, monkeypatch):
        monkeypatch.setattr(compared, "runs_needed", lambda enough: None)  # most of the time, and no part of the answer
        random, passed, trials = np.random.default_rng(0), 0, 1500
        for _ in range(trials):
            today, then = (np.exp(random.normal(0, 0.68, number)) for number in (3, 10))
            passed += (
                speed_gate(runs(list(1000 / 1.1 / today)), runs(list(1000 / then)), policy=POLICY).answer == "pass"
            )
        assert passed <= 0.05 * trials

    def test_two_runs_beside_many_are_too_few_whatever_their_speed(self):
        result = speed_gate(runs([1000, 1001]), runs([1000] * 9 + [1001]), policy=POLICY)
        assert result.answer == "inconclusive" and "asks for 3" in result.checks[-1].words

    def test_one_run_says_nothing_of_its_noise(self):
        result = speed_gate(runs([700]), runs([1005, 995, 1000]), policy=POLICY)
        assert result.answer == "inconclusive" and result.checks[-1].runs_needed == 3

    def test_noise_that_hides_the_margin_is_inconclusive(self):
        result = speed_gate(runs([700, 1300, 1000]), runs([800, 1200, 1000]), policy=POLICY)
        assert result.answer == "inconclusive"

    def test_other_hardware_is_named_and_never_passes(self):
        other = {**copy.deepcopy(ENVIRONMENT), "accelerators": {"names": ["L4"]}}
        result = speed_gate(runs([1000, 1010, 990], environment=other), runs([1005, 995, 1000]), policy=POLICY)
        assert result.answer == "inconclusive" and "on L4 today" in result.checks[0].words

    def test_runs_that_were_too_short_and_no_runs_are_inconclusive(self):
        assert speed_gate(runs([None, 1000]), runs([1000, 1000]), policy=POLICY).answer == "inconclusive"
        assert speed_gate([], runs([1000, 1000]), policy=POLICY).answer == "inconclusive"


class TestData:
    def gate(self, today, then=None):
        return data_gate(runs([1.0], data=today), runs([1.0], data=then or data_of()), policy=POLICY)

    def test_the_same_bytes_pass_without_a_look_at_the_columns(self):
        result = self.gate({"train": {"rows": 200, "sha256": "aa", "hashed": "content"}})
        assert [check.words for check in result.checks] == ["the same to the byte"]

    def test_newer_rows_of_the_same_kind_pass(self):
        result = self.gate(data_of(400, seed=1, sha256="bb"))
        assert result.answer == "pass", answers(result)

    @pytest.mark.parametrize(
        ("planted", "named"),
        [
            ({"more": np.zeros(200)}, "more is new"),
            ({"x": np.zeros((200, 4), np.float64)}, "x is float64, was float32"),
            ({"x": np.zeros((200, 5), np.float32)}, "x is of rows of 5, was of rows of 4"),
        ],
    )
    def test_a_changed_column_fails_and_is_named(self, planted, named):
        result = self.gate(data_of(sha256="bb", **planted))
        assert result.answer == "fail" and named in result.checks[0].words

    def test_a_column_that_is_missing_fails(self):
        result = self.gate(data_of(), data_of(sha256="bb", more=np.zeros(200)))
        assert "more is missing" in result.checks[0].words

    @pytest.mark.parametrize(
        ("planted", "what"),
        [
            ({"shift": 0.5}, "mean of x"),
            ({"scale": 3.0}, "deviation of x"),
            ({"scale": 255.0}, "deviation of x"),
            ({"labels": 4}, "values of label"),
        ],
    )
    def test_values_that_moved_fail(self, planted, what):
        found = answers(self.gate(data_of(sha256="bb", seed=1, rows=1000, **planted), data_of(rows=1000)))
        assert [name for name, answer in found.items() if answer == "fail" and name.startswith(what)], found

    def test_values_that_are_not_finite_fail_where_none_was(self):
        broken = np.ones((200, 4), np.float32)
        broken[3] = np.nan
        found = answers(self.gate(data_of(sha256="bb", x=broken), data_of()))
        assert found["finite values of x in train of run0"] == "fail"

    def test_a_handful_of_rows_is_too_few_to_judge_their_mean(self):
        found = answers(self.gate(data_of(8, sha256="bb")))
        assert found["mean of x in train of run0"] == "inconclusive"

    def test_records_without_columns_are_inconclusive_and_a_split_that_is_gone_fails(self):
        bare = {"train": {"rows": 200, "sha256": "bb", "hashed": "content"}}
        assert self.gate(bare).answer == "inconclusive"
        assert self.gate({"test": bare["train"]}).answer == "fail"

    def test_a_hash_of_names_does_not_make_data_the_same(self):
        named = {"train": {**data_of()["train"], "hashed": "names and sizes"}}
        assert self.gate(named, named).checks[0].what.startswith("columns and types")
