"""Times between marks, by the host's clock and by events of a device that lags behind."""

from __future__ import annotations

import pytest

from scaleray.records.phases import PARTS, Phase
from scaleray.training.profile import marks as marks_module
from scaleray.training.profile.marks import DeviceMarks, HostMarks


class FakeClock:
    """A clock that stands still until it is told."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(marks_module, "time", clock)
    return clock


class FakeDevice:
    """A device that passes an event `lag` seconds after the host has recorded it, once the host's clock is there."""

    def __init__(self, clock, lag=0.0):
        self.clock, self.lag, self.made = clock, lag, 0

    def event(self):
        self.made += 1
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device):
        self.device, self.passed_at = device, None

    def record(self):
        self.passed_at = self.device.clock.now + self.device.lag

    def query(self):
        return self.device.clock.now >= self.passed_at

    def synchronize(self):
        self.device.clock.now = max(self.device.clock.now, self.passed_at)

    def elapsed_time(self, after):
        return 1e3 * (after.passed_at - self.passed_at)


def take(marks, clock, *spans):
    for phase, seconds in spans:
        marks.mark(phase)
        clock.now += seconds
    marks.end_step(sum(seconds for _, seconds in spans), clock.now)


def as_dict(known):
    return {part: round(seconds, 9) for part, seconds in zip(PARTS, known[1], strict=True) if seconds}


STEP = [(Phase.INPUT, 1.0), (Phase.FORWARD, 2.0), (Phase.BACKWARD, 3.0), (Phase.FORWARD, 0.5), (Phase.END, 0.25)]
PARTS_OF_STEP = {Phase.INPUT: 1.0, Phase.FORWARD: 2.5, Phase.BACKWARD: 3.0, Phase.OTHER: 0.25}


def test_parts_of_a_step_are_the_times_between_marks(clock):
    marks = HostMarks()
    for _ in range(2):
        take(marks, clock, *STEP)
        known = marks.next_known()
        assert known[0] == 6.75 and as_dict(known) == PARTS_OF_STEP
        assert marks.next_known() is None


def test_a_device_is_read_when_it_has_passed_and_its_events_are_used_again(clock):
    device = FakeDevice(clock, lag=5.0)
    marks = DeviceMarks(device.event)
    found = []
    for _ in range(20):
        take(marks, clock, *STEP)
        while (known := marks.next_known()) is not None:
            found.append(known)
    assert found, "it is not waited for"
    assert len(found) < 20, "nor is a step read before the device has passed its end"
    made = device.made
    marks.wait()
    while (known := marks.next_known()) is not None:
        found.append(known)
    assert len(found) == 20 and all(as_dict(known) == PARTS_OF_STEP for known in found)
    take(marks, clock, *STEP)
    assert device.made == made, "events of steps that were read are free"


@pytest.mark.parametrize("kind", ["host", "device"])
def test_an_evaluation_between_two_steps_is_one_part_of_the_next(clock, kind):
    marks = HostMarks() if kind == "host" else DeviceMarks(FakeDevice(clock).event)
    take(marks, clock, *STEP)
    marks.next_known()
    for phase, seconds in [(Phase.OTHER, 0.5), (Phase.EVALUATION, 1.0), (Phase.INPUT, 2.0)]:
        marks.mark(phase)
        clock.now += seconds
    assert marks.as_evaluation(clock.now) == 3.5
    take(marks, clock, *STEP)
    expected = {**PARTS_OF_STEP, Phase.EVALUATION: 3.0, Phase.OTHER: 0.75}
    assert as_dict(marks.next_known()) == expected


def test_steps_of_a_host_wait_in_line_until_they_are_asked_for(clock):
    """Code that runs once in many steps is not fetched anew in each of them."""
    marks = HostMarks()
    for _ in range(3):
        take(marks, clock, *STEP)
    assert [as_dict(marks.next_known()) for _ in range(3)] == [PARTS_OF_STEP] * 3
    assert marks.next_known() is None
    assert (HostMarks.at_a_time, DeviceMarks.at_a_time) == (64, 1), "a device's events are to be used again"


def test_a_step_of_many_micro_batches_and_a_long_evaluation_wait_in_line_with_few_marks(clock):
    marks = HostMarks()
    for _ in range(1000):
        marks.mark(Phase.EVALUATION)
        clock.now += 1.0
        marks.mark(Phase.OTHER)
        clock.now += 0.5
    assert marks.as_evaluation(clock.now) == 1500.0
    take(marks, clock, *STEP * 100)
    marks.mark(Phase.OTHER)
    ((_, waiting, _),) = marks._under_way
    assert len(waiting) <= len(PARTS)
    expected = {part: 100 * seconds for part, seconds in PARTS_OF_STEP.items()}
    expected[Phase.OTHER] += 500.0
    assert as_dict(marks.next_known()) == {**expected, Phase.EVALUATION: 1000.0}
