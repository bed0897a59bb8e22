"""Combinations of settings in turn: nothing is lost, and what is always run shows every value."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
from cases_in_turn import by_function, is_in_part, showing_each_value


def test_each_combination_is_in_one_part_wherever_it_is_asked():
    names = [f"tests/test_a.py::test_b[{number}-{name}]" for number in range(50) for name in ("ddp", "fsdp")]
    parts = [[name for name in names if is_in_part(name, f"{number}/8")] for number in range(1, 9)]
    assert sorted(itertools.chain(*parts)) == sorted(names) and all(parts)
    assert is_in_part("tests/test_a.py::test_b[0-ddp]", "2/8")  # not by Python's hash, which differs between processes


@pytest.mark.parametrize("part", ["0/8", "9/8", "3", "a/8"])
def test_a_part_that_does_not_exist_is_no_empty_run(part):
    with pytest.raises(ValueError, match=r"PART is|unpack|literal"):
        is_in_part("a", part)


def test_few_cases_show_each_value():
    sizes, names, more = [1, 2, 4], ["ddp", "fsdp", "zero1", "tensor"], [{}, {"a": 1}]
    cases = [{"size": s, "name": n, "more": m} for s, n, m in itertools.product(sizes, names, more)]
    always = [cases[number] for number in showing_each_value(cases)]
    assert len(always) == 4
    assert {case["size"] for case in always} == set(sizes) and {case["name"] for case in always} == set(names)
    assert all(any(case["more"] is value for case in always) for value in more)
    assert list(showing_each_value([])) == []


def test_tests_of_one_function_are_found_by_their_name():
    assert by_function(["a.py::f[1]", "a.py::g[1]", "a.py::f[2[x]]"]) == {"a.py::f": [0, 2], "a.py::g": [1]}


def test_all_files_of_tests_can_be_collected_together():
    """pytest imports a file of tests by its name alone, so that two of one name are an error where both are collected."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert [name for name, count in Counter(names).items() if count > 1] == []
