"""Speed and data of today's runs against the promoted ones: planted changes fail, missing evidence is inconclusive."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest

from scaleray.data import ArraySource
from scaleray.data.column_distributions import columns_of
from scaleray.data.ragged import Ragged
from scaleray.release.gates import compared
from scaleray.release.gates.drift import data_gate, speed_gate
from scaleray.release.gates.policy import DriftPolicy
from tests.recorded_runs import ENVIRONMENT, a_run

POLICY = DriftPolicy()


def runs(speeds, *, data=None, **more):
    return [
        dataclasses.replace(a_run(f"run{number}", data=data, **more), samples_per_s=speed)
        for number, speed in enumerate(speeds)
    ]


WORDS = np.array(["cat", "dog", "elk", "emu"])


def tokens(random, rows):
    lengths = random.integers(1, 400, size=rows)
    return Ragged(random.integers(50_000, size=lengths.sum()), np.concatenate([[0], np.cumsum(lengths)]))


KINDS = {
    "normal": lambda random, rows: random.normal(size=rows),
    "log-normal": lambda random, rows: np.exp(random.normal(size=rows)),
    "ages": lambda random, rows: np.clip(random.normal(40, 15, rows), 0, 99).astype(int),
    "counts of small mean": lambda random, rows: random.poisson(3, rows),
    "counts of large mean": lambda random, rows: random.poisson(20, rows),
    "rare labels": lambda random, rows: np.where(random.random(rows) < 0.001, 9, random.integers(5, size=rows)),
    "missing values": lambda random, rows: np.where(random.random(rows) < 0.001, np.nan, random.normal(size=rows)),
    "mostly missing": lambda random, rows: np.where(random.random(rows) < 0.999, np.nan, random.normal(size=rows)),
    "mostly empty": lambda random, rows: Ragged(
        np.ones(n := random.binomial(rows, 0.001)), np.clip(np.arange(rows + 1), 0, n)
    ),
    "texts": lambda random, rows: np.array(["w" * length for length in random.integers(1, 200, rows)]),
    "text labels": lambda random, rows: WORDS[random.integers(4, size=rows)],
    "images": lambda random, rows: random.integers(256, size=(rows, 8, 8)).astype(np.uint8),
    "tokens": tokens,
}


def split_of(columns):
    found = columns_of(ArraySource(columns, allows_text=True))
    return {"train": {"rows": len(next(iter(columns.values()))), "sha256": None, "columns": found}}


def data_of(rows=2000, *, scale=1.0, shift=0.0, seed=0, sha256="aa", labels=3, words=3, letters=0, **columns):
    random = np.random.default_rng(seed)
    values = {
        "x": (scale * random.normal(size=(rows, 4)) + shift).astype(np.float32),
        "label": random.integers(labels, size=rows),
        "word": WORDS[random.integers(words, size=rows)],
        "text": np.array(["w" * length for length in random.integers(1 + letters, 99, size=rows)]),
        **columns,
    }
    found = columns_of(ArraySource(values, allows_text=True))
    return {"train": {"rows": rows, "sha256": sha256, "hashed": "content", "columns": found}}


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
            and "exceeds the margin of 10 %" in check.words
        )

    def test_the_margin_is_one_of_the_ratio_of_geometric_means(self):
        assert speed_gate(runs([910.9, 911, 911.1]), runs([1000, 1000.1, 999.9]), policy=POLICY).answer == "pass"
        result = speed_gate(runs([905, 905.1, 904.9]), runs([1000, 1000.1, 999.9]), policy=POLICY)
        assert result.answer == "fail"
        (check,) = [check for check in result.checks if check.what.startswith("s per sample")]
        assert check.what == "s per sample: not worse, within 10 %"
        assert check.numbers["worse"] == pytest.approx(1000 / 905 - 1, rel=1e-4)
        assert check.numbers["baseline"] == pytest.approx(1e-3, rel=1e-4)

    @pytest.mark.combination
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
        assert result.answer == "inconclusive" and "requires 3" in result.checks[-1].words

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
        result = self.gate({"train": {"rows": 2000, "sha256": "aa", "hashed": "content"}})
        assert [check.words for check in result.checks] == ["the same bytes"]

    def test_newer_rows_of_the_same_kind_pass(self):
        result = self.gate(data_of(3000, seed=1, sha256="bb"))
        assert result.answer == "pass", answers(result)

    @pytest.mark.always("normal", "rare")
    @pytest.mark.parametrize("kind", KINDS)
    def test_data_that_have_not_drifted_pass_whatever_their_distribution(self, kind):
        found = []
        for seed in range(30):
            random = np.random.default_rng(seed)
            sides = [split_of({kind: KINDS[kind](random, 2048)}) for _ in range(2)]
            found.append(self.gate(*sides).answer)
        assert found.count("fail") == 0 and found.count("pass") >= 27, (kind, found)

    @pytest.mark.combination
    def test_many_columns_and_runs_that_have_not_drifted_do_not_fail_by_their_number(self):
        random = np.random.default_rng(0)
        then, *today = (split_of({f"c{n}": random.normal(size=1000) for n in range(40)}) for _ in range(11))
        every = [run for one in today for run in runs([1.0], data=one)]
        result = data_gate(every, runs([1.0], data=then), policy=POLICY)
        assert len(result.checks) > 400 and result.answer != "fail"

    @pytest.mark.parametrize("rows", [4, 32, 100])
    def test_few_rows_of_the_promoted_data_fail_nothing_that_has_not_drifted(self, rows):
        random = np.random.default_rng(3)
        label = lambda number: np.where(random.random(number) < 0.05, 9, random.integers(5, size=number))
        result = self.gate(split_of({"label": label(2048)}), split_of({"label": label(rows)}))
        assert result.answer == "inconclusive", answers(result)

    def test_runs_of_one_name_do_not_hide_each_other(self):
        same, moved = data_of(seed=1, sha256="bb"), data_of(seed=2, sha256="cc", shift=1.0)
        for order in ((same, moved), (moved, same)):
            today = [dataclasses.replace(a_run("nightly", data=one), samples_per_s=1.0) for one in order]
            assert data_gate(today, runs([1.0], data=data_of()), policy=POLICY).answer == "fail"

    def test_labels_that_have_become_too_many_to_count_do_not_pass(self):
        many = np.array([f"{number:03}" for number in range(200)] * 10)
        found = answers(self.gate(data_of(sha256="bb", seed=1, word=many), data_of()))
        assert found["values of word in train of run0"] == "inconclusive"

    def test_facts_of_an_earlier_version_are_inconclusive(self):
        before = data_of()
        for facts in before["train"]["columns"].values():
            facts.pop("quantiles", None)
            facts["values"] = [1, 2, 3]
        result = self.gate(data_of(sha256="bb", seed=1), before)
        assert result.answer == "inconclusive" and "earlier version" in result.checks[1].words

    @pytest.mark.parametrize(
        ("planted", "named"),
        [
            ({"more": np.zeros(2000)}, "more is new"),
            ({"x": np.zeros((2000, 4), np.float64)}, "x is float64, was float32"),
            ({"x": np.zeros((2000, 5), np.float32)}, "x is of rows of 5, was of rows of 4"),
        ],
    )
    def test_a_changed_column_fails_and_is_named(self, planted, named):
        result = self.gate(data_of(sha256="bb", **planted))
        assert result.answer == "fail" and named in result.checks[0].words

    def test_a_column_that_is_missing_fails(self):
        result = self.gate(data_of(), data_of(sha256="bb", more=np.zeros(2000)))
        assert "more is missing" in result.checks[0].words

    @pytest.mark.parametrize(
        ("planted", "what"),
        [
            ({"shift": 0.5}, "distribution of x"),
            ({"scale": 3.0}, "distribution of x"),
            ({"scale": 255.0}, "distribution of x"),
            ({"labels": 4}, "values of label"),
            ({"words": 4}, "values of word"),
            ({"letters": 30}, "lengths of text"),
        ],
    )
    def test_values_that_moved_fail(self, planted, what):
        found = answers(self.gate(data_of(sha256="bb", seed=1, **planted)))
        assert [name for name, answer in found.items() if answer == "fail" and name.startswith(what)], found

    @pytest.mark.parametrize("labels", ["elsewhere", "new"])
    def test_rows_in_succession_that_resemble_each_other_pass_at_the_margin_at_most_as_often_as_alpha_says(
        self, labels
    ):
        """15 % of the rows have another label, or 1 % a new one, and neighbours correlate by 0.3: 11 and 5 % passed."""
        random, passed, rows = np.random.default_rng(5), 0, 1000
        limits = {"elsewhere": (-0.1891, 0.1891), "new": (-99.0, -2.3263)}[labels]
        for _ in range(400):
            sides = []
            for limit in limits:
                drawn = random.normal(size=rows)
                for row in range(1, rows):
                    drawn[row] = 0.3 * drawn[row - 1] + 0.9539 * drawn[row]
                counts = {"a": int((drawn >= limit).sum()), "b": int((drawn < limit).sum())}
                facts = {"dtype": "text", "shape": [], "rows": rows, "values": {k: v for k, v in counts.items() if v}}
                sides.append({"train": {"rows": rows, "columns": {"label": facts}}})
            found = data_gate(runs([1.0], data=sides[1]), runs([1.0], data=sides[0]), policy=POLICY)
            passed += found.answer == "pass"
        assert passed <= 400 * 0.05

    @pytest.mark.parametrize(("share", "answer"), [(0.002, "pass"), (0.05, "fail")])
    def test_values_that_are_not_finite_fail_above_the_share_that_may_be_new(self, share, answer):
        broken = np.ones((2000, 4), np.float32) * np.arange(2000)[:, None]
        whole = broken.copy()
        broken[: int(share * 2000), 2] = np.nan
        found = answers(self.gate(data_of(sha256="bb", x=broken), data_of(x=whole)))
        assert found["finite values of x in train of run0"] == answer

    @pytest.mark.parametrize(("today", "then", "answer"), [(1.0, 0.998, "pass"), (1.0, 0.8, "fail"), (0.8, 1.0, "fail"),
                                                           (1.0, 1.0, "pass"), (1.0, 0.0, "fail")])  # fmt: skip
    def test_columns_without_a_finite_row_are_judged_by_their_share_of_missing_values(self, today, then, answer):
        sides = [split_of({"x": np.where(np.arange(2000) < share * 2000, np.nan, 1.0)}) for share in (today, then)]
        assert self.gate(*sides).answer == answer

    def test_a_handful_of_rows_is_too_few_to_judge_and_says_how_many_it_takes(self):
        result = self.gate(data_of(8, sha256="bb"))
        (check,) = [one for one in result.checks if one.what == "distribution of x in train of run0"]
        assert check.answer == "inconclusive" and check.needed_of == "rows of each side" and check.runs_needed == 507

    def test_records_without_columns_are_inconclusive_and_a_split_that_is_gone_fails(self):
        bare = {"train": {"rows": 200, "sha256": "bb", "hashed": "content"}}
        assert self.gate(bare).answer == "inconclusive"
        assert self.gate({"test": bare["train"]}).answer == "fail"

    def test_a_hash_of_names_does_not_make_data_the_same(self):
        named = {"train": {**data_of()["train"], "hashed": "names and sizes"}}
        assert self.gate(named, named).checks[0].what.startswith("columns and types")
