"""What a study says of its points in words."""

from __future__ import annotations

import re

import pytest
from planted_curves import point

from scaleray.records.study_record import ToTarget
from scaleray.studies.conclusions import about_launches, about_steadiness, about_target


def trained(workers, value, *, is_reached):
    result = ToTarget(is_reached=is_reached, steps=6, samples=96, time_s=1.0, metric="val/loss", value=value)
    return point(workers, [[0.1] * 4], batch=16, to_target=result)


@pytest.mark.parametrize(
    ("reached", "words"),
    [
        ((True, True), None),
        ((True, False), r"val/loss <= 0\.5 was missed on strong 2 workers \(batch 16\); the closest result is val/loss 0\.7 after 96"),
        ((False, False), r"was never reached; the closest result is val/loss 0\.6 after 96 samples on 1 worker\. Train longer"),
    ],
)  # fmt: skip
def test_a_target_that_was_missed_is_one_sentence(reached, words):
    points = [trained(n, 0.5 + n / 10, is_reached=is_reached) for n, is_reached in zip((1, 2), reached, strict=True)]
    found = about_target("val/loss <= 0.5", points)
    assert len(found) == (words is not None)
    assert not found or re.search(words, found[0])


def test_of_a_metric_that_should_rise_the_largest_is_nearest():
    found = about_target("val/accuracy >= 2", [trained(n, n / 10, is_reached=False) for n in (1, 2)])
    assert "0.2 after 96 samples on 2 workers" in found[0]


def test_a_study_without_targets_says_nothing_of_them():
    assert about_target("None", [point(1, [[0.1] * 4])]) == []


def test_a_value_that_is_none_is_not_nearest():
    found = about_target(
        "val/loss <= 0.5", [trained(1, float("nan"), is_reached=False), trained(2, 9.0, is_reached=False)]
    )
    assert "9 after" in found[0]


@pytest.mark.parametrize(
    ("rounds", "marks", "is_said"),
    [
        ((["a/0", "a/1"], ["a/0", "a/1"]), [], False),
        ((["a/0", "a/1"], ["b/0", "b/1"]), [], True),
        ((["a/0", "b/0"], ["b/0", "b/1"]), [], False),  # both have turns of b
        ((["", ""], ["", ""]), ["relaunched"], True),
        (([], []), [], False),  # of an older version, which did not write it down
    ],
)
def test_sizes_of_different_launches_are_said_to_be_compared_without_what_launches_differ_by(rounds, marks, is_said):
    points = [point(n, [[0.1] * 4] * 2, rounds=r, marks=marks) for n, r in zip((1, 2), rounds, strict=True)]
    found = about_launches(points)
    assert len(found) == is_said
    assert not found or "Sizes of the strong curve were measured by different launches" in found[0]


def test_points_that_are_not_steady_are_named_with_what_to_do():
    points = [point(n, [[0.1] * 4], marks=marks) for n, marks in ((1, []), (2, ["not steady"]))]
    (sentence,) = about_steadiness(points)
    assert sentence.startswith("Not steady (strong 2 workers): ") and sentence.endswith("or give more --steps.")
    assert about_steadiness(points[:1]) == []
