"""Memory over time, and the moment of its peak, with a process whose memory is planted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from scaleray.records.phases import Phase
from scaleray.training.profile import memory_curve, used_memory
from scaleray.training.profile.memory_curve import MemoryCurve, numbers_of


@pytest.fixture
def process(monkeypatch):
    """A process with so many bytes at most, looked at on a clock that stands still."""
    state = SimpleNamespace(peak=1000, now=50.0, asked=0, read=0)

    def getrusage(who):
        state.asked += 1
        return SimpleNamespace(ru_maxrss=state.peak)

    monkeypatch.setattr(
        used_memory, "resource", SimpleNamespace(RUSAGE_SELF=0, getrusage=getrusage, getpagesize=lambda: 1)
    )
    monkeypatch.setattr(memory_curve, "time", SimpleNamespace(monotonic=lambda: state.now))
    monkeypatch.setattr(memory_curve, "steady_time", lambda: 1000 + state.now)

    def resident_bytes():
        state.read += 1
        return state.peak // 2

    monkeypatch.setattr(used_memory, "resident_bytes", resident_bytes)
    return state


def test_the_peak_has_its_step_its_phase_and_its_time(process):
    curve = MemoryCurve(torch.device("cpu"), started_at=1000.0)
    for step in range(1, 6):
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
            if curve.is_looking:
                curve.mark(phase)
            if step == 2 and phase == Phase.BACKWARD:
                process.peak, process.now = 3000, 52.0
        curve.end_step(step)
        process.now += 0.1
        curve.is_looking = curve.is_looking or step == 1  # the clock has it look at step 2
    assert (curve.peak.num_bytes, curve.peak.step, curve.peak.phase, curve.peak.at_s) == (
        3000 * 1024,
        2,
        "backward",
        52.0,
    )
    found = curve.numbers(first_step=2, width=1, count=4)
    assert found.resident_bytes == 1500 and found.cached_bytes is None
    assert list(found.series) == ["resident_bytes"]


def test_a_peak_in_a_step_that_is_not_looked_at_has_its_step_alone(process):
    curve = MemoryCurve(torch.device("cpu"), started_at=1000.0)
    for step in range(1, 4):
        curve.end_step(step)
    process.peak = 5000
    curve.is_looking = False
    curve.end_step(4)
    assert (curve.peak.step, curve.peak.phase) == (4, "")
    assert curve.is_looking, "it may grow again in the next step, whose phases are then told"


def test_most_steps_cost_one_question(process):
    curve = MemoryCurve(torch.device("cpu"), started_at=1000.0)
    curve.end_step(1)
    curve.end_step(2)
    before, read = process.asked, process.read
    for step in range(3, 103):
        assert not curve.is_looking
        curve.end_step(step)
    assert process.asked - before == 100
    assert process.read == read, "a file of the system is read for a sample alone: it costs four times as much"


def test_of_steps_that_come_close_after_each_other_few_are_told(process):
    curve, told = MemoryCurve(torch.device("cpu"), started_at=1000.0), []
    curve.end_step(1)
    curve.end_step(2)
    for step in range(3, 103):
        process.now += 0.01
        if step == 50:
            process.peak += 1
        if curve.is_due():
            told.append(step)
            curve.end_step(step)
    after = min(step for step in told if step >= 50)
    assert len(told) == 10 and curve.peak.step == after
    assert after + 1 in told, "the peak may grow again in the next step"


def test_books_of_a_device_are_read_at_most_once_a_second(process, monkeypatch):
    stats, calls = {"reserved_bytes.all.current": 8, "active_bytes.all.current": 3}, []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: calls.append("stats") or stats)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: calls.append("snapshot") or [])
    curve = MemoryCurve(torch.device("cuda"), started_at=1000.0)
    for step in range(1, 41):
        curve.end_step(step)
        process.now += 0.1
    assert calls.count("stats") in (4, 5) and calls.count("snapshot") == 1
    found = curve.numbers(first_step=2, width=40, count=1)
    assert found.cached_bytes == numbers_of(stats)["cached_bytes"] == 5
    assert found.largest_hole_bytes == 0 and found.rounding_bytes is None
