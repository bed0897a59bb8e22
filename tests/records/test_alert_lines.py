"""Alerts as lines of a file."""

from __future__ import annotations

import math

from scaleray.records.alert_record import Alert, counted, firing, parse_alerts

SPIKE = Alert("loss_spike", "warning", "firing", 5.0, 9.5, "the loss is 9.5 ...", recorded_at=6.0)
OVER = Alert("loss_spike", "warning", "resolved", 5.0, 9.5, "the loss is 9.5 ...", recorded_at=80.0)
HANG = Alert("no_progress", "critical", "firing", 90.0, None, "no step has ended", "stop", recorded_at=91.0)


def test_lines_are_read_as_they_were_written_and_half_a_line_is_left_out():
    text = "".join(alert.to_line() for alert in (SPIKE, OVER, HANG))
    assert parse_alerts(text) == [SPIKE, OVER, HANG]
    assert parse_alerts(text[:-20]) == [SPIKE, OVER]


def test_lines_of_a_newer_version_or_none_at_all_do_no_harm():
    newer = SPIKE.to_line().replace('"name"', '"page": 3, "name"')
    odd = ['{"name": "x"}', "[1]", "null", "not json", SPIKE.to_line().replace("firing", "waiting"), "[" * 5000]
    assert parse_alerts("\n".join([*odd, newer])) == [SPIKE]


def test_a_value_that_is_not_finite_becomes_null():
    infinite = Alert("loss_spike", "warning", "firing", 5.0, math.inf, "...")
    assert parse_alerts(infinite.to_line())[0].value is None


def test_what_fires_is_what_is_not_over_and_each_beginning_counts():
    assert firing([SPIKE, HANG, OVER]) == [HANG] and firing([SPIKE, OVER, SPIKE]) == [SPIKE]
    assert counted(["loss_spike", "no_progress", "loss_spike"]) == "loss_spike (2 times), no_progress"


def test_an_alert_reads_as_a_line():
    assert str(SPIKE) == "alert loss_spike (warning): the loss is 9.5 ..."
    assert str(HANG).endswith("; the run is stopped") and str(OVER) == "alert loss_spike is over"
