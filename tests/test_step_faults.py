"""The random faults of jobs/faults.py --spares: drawn from a seed, and without consequence."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "jobs"))

from fault_suite import step_faults
from fault_suite.members import FORWARD, KEPT, Traps
from fault_suite.spared import SparedTraining
from fault_suite.step_faults import KINDS, LAST, Report, drawn


def test_a_fault_follows_from_the_seed_and_its_number_alone() -> None:
    first = [drawn(number, 3, KINDS, 3) for number in range(200)]
    assert first == [drawn(number, 3, KINDS, 3) for number in range(200)]
    assert first != [drawn(number, 4, KINDS, 3) for number in range(200)]
    assert {fault.kind for fault in first} == set(KINDS)
    assert all(fault.rank != fault.other for fault in first)


def test_no_fault_follows_the_end_of_the_coordinator() -> None:
    waiting = [drawn(number, 0, KINDS, 3) for number in range(60)]
    while waiting:
        dealt = step_faults._dealt(waiting, 5)
        assert not any(fault.kind in LAST for fault in dealt[:-1])
        waiting = [fault for fault in waiting if fault not in dealt]


def test_a_fault_happens_once_to_its_rank_at_its_point() -> None:
    traps = Traps(multiprocessing.get_context("forkserver"))
    traps.set(0, 2, KEPT, 0.5)
    assert traps.spring(2, FORWARD) is traps.spring(1, KEPT) is None
    assert traps.spring(2, KEPT) == (0, 0.5)
    assert traps.spring(2, KEPT) is None
    traps.set(0, 0, FORWARD, 0.0)
    traps.clear()
    assert traps.spring(0, FORWARD) is None


def test_a_stand_still_belongs_to_the_fault_before_it() -> None:
    training = SparedTraining.__new__(SparedTraining)
    training.ended = {step: 0.1 * step for step in range(1, 11)}
    training.ended |= {11: 2.0, 12: 2.1, 13: 2.2, 14: 7.2, 15: 7.3}
    assert training.still_s(1.05, 2.25) == pytest.approx(0.9)
    assert training.still_s(2.25, float("inf")) == pytest.approx(4.9)
    assert training.still_s(7.25, float("inf")) == pytest.approx(0.0)


@pytest.mark.slow
def test_kills_in_an_evaluation_and_between_buckets_have_no_consequence() -> None:
    kinds = ["killed in an evaluation", "killed between two buckets", "coordinator and a worker killed"]
    report: Report = step_faults.run_step_faults(3, seed=1, kinds=kinds, only=(), minutes=9.0, say=print)
    assert len(report.faults) == 3
    assert report.is_good
