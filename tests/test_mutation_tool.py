"""The mutation tool: what it changes in a file, what it leaves alone, which mutants it draws, and what its page says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent))

from jobs.mutation import results
from jobs.mutation.__main__ import planted
from jobs.mutation.choice import draw
from jobs.mutation.coverage_map import CoverageMap, KnownTest
from jobs.mutation.judge import Outcome, verdict_of
from jobs.mutation.mutants import Mutant, compiles, mutants_of

ROOT = Path(__file__).parent.parent
SOURCE = '''
"""Text with 1 and not and min."""

LIMIT = 3


class Counter:
    def add(self, values: list[int], *, size: int = 4) -> int:
        """Adds 1."""
        if not values or (len(values) > size and
                          size >= 2):
            raise ValueError(f"{len(values)} is more than {size + 1}")
        for value in values:
            if value == 0:
                continue
            self.total = self.total + min(value, self.rank)
        self.send(self.total, dst=0, wait=True)
        return self.total  # é 5
'''


def changes():
    return [(m.operator, m.before, m.after) for m in mutants_of("f.py", SOURCE)]


@pytest.mark.parametrize(
    "change",
    [
        ("not", "not values", "values"),
        ("and, or", "or", "and"),
        ("and, or", "and", "or"),
        ("comparison", ">", ">="),
        ("comparison", ">=", ">"),
        ("comparison", "==", "!="),
        ("constant", "2", "3"),
        ("constant", "2", "1"),
        ("constant", "True", "False"),
        ("condition", "value == 0", "not (value == 0)"),
        ("jump", "continue", "break"),
        ("arithmetic", "+", "-"),
        ("name", "min", "max"),
        ("name", "self.rank", "self.local_rank"),
        ("arguments", "value, self.rank", "self.rank, value"),
        ("argument", "dst=0, ", ""),
        ("argument", "wait=True", ""),
        ("statement", "self.send(self.total, dst=0, wait=True)", "pass"),
        ("statement", "self.total = self.total + min(value, self.rank)", "pass"),
        ("return", "self.total", "None"),
    ],
)
def test_what_a_test_ought_to_notice_is_changed(change):
    assert change in changes()


def test_text_types_messages_and_what_is_outside_functions_stay():
    lines = {mutant.line for mutant in mutants_of("f.py", SOURCE)}
    assert lines.isdisjoint({2, 4, 7, 9, 12})
    assert ("constant", "3", "4") not in changes() and not any("size + 1" in before for _, before, _ in changes())


def test_every_mutant_is_one_edit_and_nearly_all_are_python():
    found = mutants_of("f.py", SOURCE)
    assert len(found) == len({mutant.applied(SOURCE) for mutant in found}) > 20
    assert sum(compiles(mutant.applied(SOURCE)) for mutant in found) > 0.9 * len(found)
    with pytest.raises(ValueError, match="not what it was"):
        found[0].applied(SOURCE.replace("values", "numbers"))


def test_a_draw_is_spread_over_functions_and_the_same_for_a_seed(tmp_path):
    code = "".join(f"def f{n}(a, b):\n    return a + b + {n} - (a * b)\n" for n in range(20))
    (tmp_path / "x.py").write_text(code)
    by_file = {"x.py": mutants_of("x.py", code)}
    first, again, other = (draw(by_file, 12, seed=seed, tree=tmp_path) for seed in (1, 1, 2))
    assert first == again != other and len(set(first)) == 12
    assert max(sum(m.function == f"f{n}()" for m in first) for n in range(20)) <= 2


def test_the_tests_of_a_line_are_run_the_quickest_first_and_those_with_processes_last(tmp_path):
    tests = [
        KnownTest("slow", 2.0, False),
        KnownTest("pool", 0.1, True),
        KnownTest("quick", 0.5, False),
        KnownTest("other", 0.1, False),
    ]
    CoverageMap(tests, {"f.py": {3: [0, 1], 4: [2], 9: [3]}}).write(tmp_path / "map.json")
    known = CoverageMap.read(tmp_path / "map.json")
    assert [test.name for test in known.tests_of("f.py", 3, 4)] == ["quick", "slow", "pool"]
    assert known.tests_of("f.py", 5, 8) == known.tests_of("g.py", 3, 4) == []


def test_tests_that_came_later_join_the_map_and_replace_their_older_selves():
    before = CoverageMap([KnownTest("a", 1.0, False), KnownTest("b", 2.0, False)], {"f.py": {1: [0, 1], 2: [1]}})
    later = CoverageMap([KnownTest("b", 0.5, True), KnownTest("c", 3.0, False)], {"f.py": {1: [0], 3: [1]}})
    both = before.with_more(later)
    assert [test.name for test in both.tests_of("f.py", 1, 1)] == ["a", "b"]
    assert both.tests_of("f.py", 2, 2) == []  # b no longer runs it
    assert both.tests_of("f.py", 3, 3) == [KnownTest("c", 3.0, False)]


def test_a_survivor_counts_against_the_tests_unless_it_is_argued_to_change_nothing():
    mutants = [Mutant("scaleray/data/x.py", n, 0, "f()", "comparison", "<", "<=") for n in range(4)]
    mutants[3] = Mutant("scaleray/data/x.py", 3, 0, "f()", "name", "min", "max")
    outcomes = [
        Outcome(verdict, "tests/t.py::test_a|b", 3, 1.0) for verdict in ("killed", "timed out", "survived", "survived")
    ]
    reasons = {mutants[3].key: "both are 1 there"}
    rows = [results.row_of(mutant, outcome, reasons) for mutant, outcome in zip(mutants, outcomes, strict=True)]
    assert [row["verdict"] for row in rows] == ["killed", "timed out", "survived", "equivalent"]
    assert results.share_killed(rows) == pytest.approx(2 / 3)
    page = results.page(rows, title="Pass", about=["today"])
    assert "**66.7% killed** of 3." in page and "| data | 1 | 1 | 1 | 0 | 1 |" in page
    assert "both are 1 there" in page and "`test_a\\|b`" in page


def test_only_a_test_that_fails_or_a_process_that_is_lost_kills_a_mutant():
    codes = {0: "survived", 1: "killed", 2: "killed", 3: "not judged", 4: "not judged", 5: "not judged", -9: "killed"}
    assert {code: verdict_of(code) for code in codes} == codes


def test_planted_mutants_stand_in_the_code_and_are_python():
    found = planted()
    assert len(found) >= 7
    for mutant in found:
        assert compiles(mutant.applied((ROOT / mutant.file).read_text())), mutant.operator


@pytest.mark.combination
def test_what_is_called_equivalent_is_still_a_mutant_of_the_code():
    for one in json.loads(results.EQUIVALENT.read_text()):
        file, *_ = one["mutant"]
        assert one["reason"]
        assert tuple(one["mutant"]) in {mutant.key for mutant in mutants_of(file, (ROOT / file).read_text())}, one
