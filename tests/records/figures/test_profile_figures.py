"""Figures of a profile: every rank, every part and every class is drawn under its name, and what is unknown is not."""

from __future__ import annotations

import dataclasses

import pytest
from study_examples import run_record

from scaleray.launch.run.run_page import profile_section
from scaleray.profiling.goodput import CLASSES
from scaleray.profiling.report.profile_figure import COLOURS, GOODPUT_COLOURS, profile_drawings
from scaleray.records.phases import PARTS
from scaleray.records.profile_record import Buckets, Goodput, MemoryNumbers, MemoryPeak, RankProfile, RunProfile, Spread


def spread(median, *, steps=20, buckets=4):
    return Spread(median * steps, median, 1.2 * median, [median] * buckets)


def profile(num_ranks=2, *, late=False, closes=True, **more):
    ranks = [
        RankProfile(
            rank,
            f"node{rank}",
            "cpu",
            20,
            spread(0.1 + 0.01 * rank),
            {
                "forward": spread(0.03),
                "backward": spread(0.05),
                "exposed_communication": spread(0.02),
                "host": spread(0.0001),
            },
            0.0,
            late_s=spread(0.004 * rank) if late else None,
            memory=MemoryNumbers(resident_bytes=5 * 2**20, peak=MemoryPeak(9 * 2**20, 7, "backward", 1.5)),
        )
        for rank in range(num_ranks)
    ]
    return RunProfile(Buckets(2, 5, 4), ranks, closes, 0.0004 if closes else 0.2, 0, **more)


def section_of(found):
    return profile_section(dataclasses.replace(run_record(), profile=found))


def drawn(found, name):
    return next(one for one in profile_drawings(found) if one.name == name)


def test_every_part_and_every_class_of_time_has_a_colour():
    assert set(COLOURS) == set(PARTS) and set(GOODPUT_COLOURS) == set(CLASSES)
    assert len(set(COLOURS.values())) == len(PARTS)


@pytest.mark.combination
def test_the_parts_of_a_step_are_drawn_by_name_and_the_caption_says_whether_they_close():
    parts = drawn(profile(), "parts-by-rank")
    assert all(words in parts.svg for words in ("forward", "backward", "exposed communication", "host, launching"))
    assert "optimizer" not in parts.svg, "what was not measured is not drawn"
    assert "within 0.04%" in parts.caption
    assert "do not add up" in drawn(profile(closes=False), "parts-by-rank").caption


def test_one_step_is_that_of_the_slowest_rank_without_parts_too_small_to_see():
    step = drawn(profile(3), "one-step")
    assert step.title == "One step, on rank 2"
    assert "50 ms · 50%" in step.svg and "host, launching" not in step.svg and "1 parts below" in step.caption


@pytest.mark.always("True")
@pytest.mark.parametrize("late", [False, True])
def test_ranks_over_time_have_lateness_where_it_is_known(late):
    heat_map = drawn(profile(4, late=late), "ranks-over-time")
    assert "step time in ms" in heat_map.svg and ("lateness in ms" in heat_map.svg) is late
    assert "mean of 5 steps" in heat_map.caption and ("Lateness was not measured" in heat_map.caption) is not late


def test_of_many_ranks_the_slowest_are_drawn():
    parts = drawn(profile(100), "parts-by-rank")
    assert "32 slowest of 100 ranks" in parts.caption and ">98<" in parts.svg.replace("\n", "")


@pytest.mark.combination
def test_goodput_is_drawn_with_the_shares_of_what_there_was():
    goodput = Goodput(10.0, {"productive": 6.0, "start": 3.0, "repeated": 1.0, "restart": 0.0}, 2, 5)
    found = drawn(profile(goodput=goodput), "goodput")
    assert "productive 60.0%" in found.svg and "restart" not in found.svg
    assert "2 attempts" in found.caption and "5 steps were repeated" in found.caption
    assert all(one.name != "goodput" for one in profile_drawings(profile()))


@pytest.mark.combination
def test_memory_that_cannot_be_measured_is_told_as_such_and_not_as_0():
    (section,) = section_of(profile(1, notes=["rank 0: no arrivals"]))
    table, notes = section.tables
    assert table.rows == (("0", "n/a", "n/a", "n/a", "n/a", "5 MiB", "9 MiB", "7", "backward", "1.5 s"),)
    assert notes.rows == (("rank 0: no arrivals",),)
    unknown = dataclasses.replace(profile(1).ranks[0], memory=MemoryNumbers())
    (section,) = section_of(dataclasses.replace(profile(1), ranks=[unknown]))
    assert section.tables[0].rows[0][5:] == ("n/a", "?", "?", "?", "?")
    assert section_of(None) == []
