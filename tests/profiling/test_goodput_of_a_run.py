"""Goodput: the classes of a run's time, over its attempts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaleray.profiling.goodput import CLASSES, GoodputLedger


def ledger_of(*steps, started_at=100.0):
    """A first attempt: (step, seconds, waited, end) each."""
    ledger = GoodputLedger(started_at)
    ledger.begin(started_at)
    for step, step_s, waited_s, at in steps:
        ledger.add_step(step, step_s=step_s, waited_s=waited_s, at=at)
    return ledger


def seconds_of(ledger, now):
    found = ledger.goodput(now)
    assert sum(found.seconds.values()) == pytest.approx(found.elapsed_s, abs=1e-9)
    return {name: round(value, 9) for name, value in found.seconds.items() if value}


FIRST = [(1, 5.0, 0.0, 110.0), (2, 2.0, 0.5, 112.0), (3, 2.0, 0.0, 114.0)]


def test_a_run_without_trouble_has_start_steps_input_and_an_end():
    # of the first step's 5 seconds, 2 are a step like the next one
    assert seconds_of(ledger_of(*FIRST), 115.0) == {"start": 8.0, "productive": 5.5, "input": 0.5, "other": 1.0}


def test_an_evaluation_and_a_checkpoint_have_classes_of_their_own():
    ledger = ledger_of(*FIRST)
    ledger.add_evaluation(3.0, at=117.0)
    ledger.add_step(4, step_s=2.5, waited_s=0.0, at=119.5)
    ledger.add_checkpoint(3, 0.5, at=120.0)  # that step 4 has waited for
    ledger.add_checkpoint(4, 1.0, at=121.0)  # after the last step
    assert seconds_of(ledger, 121.0) == {
        "start": 8.0, "productive": 7.5, "input": 0.5, "evaluation": 3.0, "checkpoint": 1.5, "other": 0.5,
    }  # fmt: skip


def test_the_longest_work_that_no_checkpoint_held_is_measured_over_all_attempts():
    ledger = ledger_of(*FIRST)  # from 105 to 114
    assert ledger.goodput(114.0).longest_without_checkpoint_s == 9.0
    ledger.add_checkpoint(3, 0.5, at=116.0, took_s=2.0)  # it holds what was there at 114
    assert ledger.goodput(116.0).longest_without_checkpoint_s == 11.0
    ledger.add_step(4, step_s=2.0, waited_s=0.0, at=124.0)
    assert ledger.goodput(124.0).longest_without_checkpoint_s == 11.0
    later = GoodputLedger.of(json.loads(json.dumps(ledger.state())), started_at=200.0)
    later.begin(200.0)
    later.add_step(4, step_s=2.0, waited_s=0.0, at=210.0)
    later.add_step(5, step_s=2.0, waited_s=0.0, at=222.0)  # since 208: the time between attempts is no work
    assert later.goodput(222.0).longest_without_checkpoint_s == 14.0
    older = {key: value for key, value in ledger.state().items() if key != "longest_without_checkpoint_s"}
    assert GoodputLedger.of(older, started_at=200.0).goodput(224.0).repeated_steps == ledger.repeated_steps
    assert GoodputLedger.of(older, started_at=200.0).goodput(224.0).elapsed_s == 124.0
    assert GoodputLedger(100.0).goodput(101.0).longest_without_checkpoint_s is None


def test_steps_that_are_taken_again_do_not_count_and_the_way_back_is_a_restart():
    ledger = ledger_of(*FIRST)
    # lost workers: others go on after step 1, whose first step takes longer than the next one
    ledger.add_step(2, step_s=3.0, waited_s=0.0, at=124.0)
    ledger.add_step(3, step_s=2.0, waited_s=1.0, at=126.0)
    ledger.add_step(4, step_s=2.0, waited_s=0.0, at=128.0)
    found = ledger.goodput(128.0)
    assert found.attempts == 2 and found.repeated_steps == 2
    assert seconds_of(ledger, 128.0) == {
        "start": 8.0, "productive": 7.5, "input": 0.5, "restart": 8.0, "repeated": 4.0,
    }  # fmt: skip


def test_a_resumed_run_knows_its_earlier_attempts():
    state = json.loads(json.dumps(ledger_of(*FIRST).state()))
    resumed = GoodputLedger.of(state, started_at=200.0)
    resumed.begin(200.0)
    for number in (3, 4, 5):
        resumed.add_step(number, step_s=2.0, waited_s=0.0, at=204.0 + 2 * number)
    found = seconds_of(resumed, 214.0)
    # from the last sign of the first attempt (114) to the first step of the second one (210), but for its own 2 seconds
    assert found == {"start": 8.0, "productive": 9.5, "input": 0.5, "restart": 94.0, "repeated": 2.0}
    assert resumed.goodput(214.0).attempts == 2


@pytest.mark.parametrize("state", [None, {}, {"started_at": "x"}, {**GoodputLedger(1.0).state(), "seconds": None}])
def test_without_a_state_that_can_be_read_the_run_begins_now(state):
    assert GoodputLedger.of(state, started_at=5.0).goodput(7.0).elapsed_s == 2.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["step", "again", "evaluation", "checkpoint"]),
            st.floats(0, 1e4),
            st.floats(0, 1e4),
            st.floats(-10, 1e4),
        ),
        max_size=30,
    )
)
def test_whatever_happens_the_classes_sum_to_the_whole(happened):
    ledger, now, step = GoodputLedger(100.0), 100.0, 0
    for kind, took, waited, later in happened:
        now += later
        if kind in ("step", "again"):
            step = step + 1 if kind == "step" else max(1, step - 2)
            ledger.add_step(step, step_s=took, waited_s=waited, at=now)
        elif kind == "evaluation":
            ledger.add_evaluation(took, at=now)
        else:
            ledger.add_checkpoint(step, took, at=now)
    found = ledger.goodput(max(now, 100.0))
    assert set(found.seconds) == set(CLASSES) and min(found.seconds.values()) >= 0
    assert sum(found.seconds.values()) == pytest.approx(found.elapsed_s, rel=1e-12, abs=1e-9)
