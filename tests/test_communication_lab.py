"""The communication lab, as a user runs it for a few steps, and the arithmetic behind its advice."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
JOB = ROOT / "jobs" / "communication_lab.py"


@pytest.fixture(scope="module")
def lab():
    spec = importlib.util.spec_from_file_location("communication_lab", JOB)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def turn(lab, seconds, losses):
    curve = [(8 * (number + 1), seconds * (number + 1), loss) for number, loss in enumerate(losses)]
    return lab.Turn(curve, 100.0, 150.0, seconds)


def results(lab, **turns):
    equal = lab.losses_at_equal_time(turns)
    return [lab.Result(name.replace("_", "-"), found, equal[name]) for name, found in turns.items()]


@pytest.fixture
def run(lab, capsys, monkeypatch):
    """Run the lab's command line in this process: (exit code, what it prints)."""
    monkeypatch.chdir(ROOT)

    def run(*words):
        code = lab.main(words)
        return code, capsys.readouterr().out

    return run


@pytest.mark.combination
@pytest.mark.timeout(900)
def test_the_lab_runs_every_method_that_exists_and_writes_one_page(run, tmp_path):
    code, out = run(
        "-c",
        "jobs/digits.yaml",
        "--steps",
        "5",
        "--workers",
        "2",
        "--repeats",
        "1",
        "--methods",
        "all-reduce,int8,topk",
        "--slow-link",
        "1000",
        "--schedule.warmup",
        "0 steps",
        "--compression.density",
        "0.05",
        "--out",
        str(tmp_path / "page.html"),
    )
    assert code == 0, out
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if line.startswith("│")}
    assert rows.keys() == {"all-reduce", "int8", "topk"}
    sent = {name: float(row.split("│")[2].split()[0]) for name, row in rows.items()}
    parameters = 58634  # of the digits' network; float32, and for topk a place beside each value
    assert sent["all-reduce"] == pytest.approx(4 * parameters / 1024, abs=0.1)
    assert sent["topk"] == pytest.approx(8 * 0.05 * parameters / 1024, abs=0.1)
    assert 1.5 * parameters / 1024 < sent["int8"] < 1.55 * parameters / 1024  # two workers: once whole, once half
    page = (tmp_path / "page.html").read_text()
    assert "1000 Mbit/s (emulated)" in page
    assert "http" not in page.partition("<pre>")[0]  # nothing from elsewhere


def test_the_lab_says_what_it_does_not_know_or_have(run):
    code, out = run("-c", "jobs/digits.yaml", "--methods", "telepathy")
    assert code == 2
    assert "telepathy" in out and "all-reduce" in out


def test_loss_at_equal_time_is_read_between_evaluations(lab):
    fast, slow = turn(lab, 1.0, [4.0, 3.0, 2.0]), turn(lab, 2.0, [4.0, 3.0, 2.0])
    found = lab.losses_at_equal_time({"fast": [fast], "slow": [slow]})
    assert found == {"fast": [2.0], "slow": [3.5]}  # 3 s lie between the slow one's first and second evaluation


def test_the_advice_names_the_method_with_the_lowest_loss_after_equal_time_and_its_price(lab):
    found = results(lab, all_reduce=[turn(lab, 2.0, [4.0, 3.0, 2.0])] * 2, topk=[turn(lab, 1.0, [4.0, 3.0, 2.5])] * 2)
    assert lab.advice(found).startswith("Use topk here: after equal time its loss is 2.5 instead of 3.5")
    assert "0.5 higher" in lab.advice(found)


def test_the_advice_keeps_all_reduce_where_the_difference_is_within_that_of_the_turns(lab):
    found = results(
        lab,
        all_reduce=[turn(lab, 1.0, [4.0, 3.0]), turn(lab, 1.0, [4.0, 2.0])],
        int8=[turn(lab, 1.0, [4.0, 2.9]), turn(lab, 1.0, [4.0, 1.9])],
    )
    assert lab.advice(found).startswith("Keep all-reduce")


def test_the_advice_is_sure_where_even_the_worst_turn_is_better_than_the_best_of_all_reduce(lab):
    found = results(
        lab,
        all_reduce=[turn(lab, 1.0, [4.0, 3.0]), turn(lab, 1.0, [4.0, 1.8])],
        int8=[turn(lab, 1.0, [4.0, 1.7]), turn(lab, 1.0, [4.0, 1.2])],
    )
    assert lab.advice(found).startswith("Use int8 here")


@pytest.mark.parametrize(
    ("word", "method", "concerns"),
    [
        ("--batch.global-size=64", "none", True),
        ("--compression.density=0.1", "topk", True),
        ("--compression.density=0.1", "int8", False),
        ("--compression.start-step=5", "none", False),
        ("--compression.start-step=5", "int8", True),
        ("--compression.block-size=64", "adaptive", True),
    ],
)
def test_settings_of_compression_reach_the_methods_that_have_them(lab, word, method, concerns):
    assert lab._concerns(word, method) is concerns
