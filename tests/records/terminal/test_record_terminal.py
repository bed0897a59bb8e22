"""A study's or a sweep's result on a terminal of any width, and in a pipe."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
import study_examples
from rich.console import Console

from scaleray.records.terminal.printed_record import show_record
from scaleray.records.text.headlines import study_headline, sweep_headline


def test_the_terminal_shows_the_same_table_and_verdict_and_where_everything_is():
    record = dataclasses.replace(
        study_examples.study(marks=("oversubscribed",)), mlflow_link="http://x/#/y", tracking_uri="sqlite:///a b.db"
    )
    text = printed(record)
    assert "oversubscribed" in text and study_headline(record) in text
    assert "39.7 ms" in text and "(5.87–6.23)" in text
    assert text.splitlines()[-3:] == [
        "MLflow:  scaleray tracking ui --uri 'sqlite:///a b.db'   then open http://x/#/y",
        "report:  runs/digits-study/report.html",
        "record:  runs/digits-study/record.json",
    ]
    text = printed(study_examples.sweep())
    assert "Fastest: batch 1024" in text and "2 of 2" in text


def printed(record, **console):
    buffer = io.StringIO()
    show_record(Console(file=buffer, color_system=None, **console), record)
    return buffer.getvalue()


def test_a_pipe_gets_every_column_each_sentence_in_one_line_and_no_spaces_at_line_ends():
    record = study_examples.study()
    text = printed(record, width=80)
    lines = text.splitlines()
    assert record.curves[0].verdict in lines and len(record.curves[0].verdict) > 100
    assert not [line for line in lines if line != line.rstrip()] and "\x1b" not in text
    assert "want of room" not in text and all(figure in text for figure in ("0.4303", "3.73 GiB", "missed"))


@pytest.mark.parametrize("width", [80, 200])
def test_a_terminal_gets_lines_of_its_width(width):
    for record in (study_examples.study(), study_examples.sweep()):
        text = printed(record, width=width, force_terminal=True)
        lines = [line for line in text.splitlines() if not line.startswith(("report:", "record:"))]
        assert max(map(len, lines)) <= width
        headline = study_headline(record) if record.name == "digits-study" else sweep_headline(record)
        assert headline in re.sub(r"\s+", " ", text)
