"""Where the seconds between a command and its first step went."""

import dataclasses
import time
from types import SimpleNamespace

from study_examples import run_record

from scaleray.live.terminal.live_table import final_lines
from scaleray.records.start import (
    DATA,
    FIRST_STEP,
    IMPORTS,
    MODEL,
    RAY,
    WORKER_IMPORTS,
    StartClock,
    steady_time,
    to_text,
)
from scaleray.training.health.clock import Clock


def test_the_parts_of_a_start_add_up_to_the_time_to_its_first_step():
    clock = StartClock(100.0, {IMPORTS: 102.0, RAY: 105.0})
    clock.end(MODEL, 109.0)
    clock.end(FIRST_STEP, 110.0)
    clock.end(FIRST_STEP, 500.0)  # only the first one is one
    assert clock.seconds() == {IMPORTS: 2.0, RAY: 3.0, MODEL: 4.0, FIRST_STEP: 1.0}


def test_a_clock_of_another_node_that_is_behind_makes_no_part_negative():
    clock = StartClock(100.0, {DATA: 104.0, WORKER_IMPORTS: 103.0, MODEL: 106.0})
    assert clock.seconds() == {DATA: 4.0, WORKER_IMPORTS: 0.0, MODEL: 2.0}


def test_a_long_start_is_told_in_one_line_and_a_short_one_is_not():
    parts = {IMPORTS: 2.0, RAY: 6.5, DATA: 0.01}
    assert to_text(parts) == "first step after 8.5 s: imports 2.0 | Ray 6.5"
    record = dataclasses.replace(run_record(), start=parts)
    assert to_text(parts) in final_lines(record)
    assert not any("first step" in line for line in final_lines(dataclasses.replace(record, start={RAY: 1.0})))


def test_a_step_of_the_wall_clock_is_in_no_duration(monkeypatch):
    """An hour forward made a time to the first step of 3,641 s, and a total time of 3,645 s."""
    clock = StartClock(steady_time())
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    clock.end(IMPORTS)
    assert clock.seconds()[IMPORTS] < 3000
    steps = Clock(clock.started_at, clock.ends, SimpleNamespace(start=lambda now: None, cut=lambda took, now: None))
    steps.start(0.0)
    steps.tick(0.0)
    assert steps.first_step_s < 3000
