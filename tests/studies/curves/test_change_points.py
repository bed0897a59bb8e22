"""Where a series changes its level: found where it does, and rarely where it does not."""

import numpy as np
import pytest

from scaleray.records.experiment import Experiment
from scaleray.studies.curves.history import change_points, histories


@pytest.mark.combination
def test_noise_alone_is_rarely_taken_for_a_change():
    random = np.random.default_rng(1)
    wrong = sum(bool(change_points(random.normal(0, 1, 16), seed=trial)) for trial in range(60))
    assert wrong <= 7  # 5 % are 3 of 60; more than 7 happen once in 100


def test_a_change_of_four_deviations_is_found_at_its_place_with_its_levels():
    random = np.random.default_rng(2)
    for trial in range(10):
        series = np.r_[random.normal(0.9, 0.02, 12), random.normal(0.82, 0.02, 8)]
        found = change_points(series, seed=trial)
        assert any(abs(one.index - 12) <= 1 for one in found), (trial, found)
    first = change_points(series, seed=0)[0]
    assert first.before == pytest.approx(0.9, abs=0.02) and first.after == pytest.approx(0.82, abs=0.02)


def test_several_changes_are_found_in_order():
    random = np.random.default_rng(3)
    series = np.concatenate([random.normal(level, 0.01, 12) for level in (0.9, 0.7, 0.8)])
    assert [one.index for one in change_points(series)][:2] == [12, 24]


def test_short_and_constant_series_have_no_change():
    assert change_points([]) == [] == change_points([1.0]) == change_points([1.0] * 30)
    assert change_points([0.9, 0.9, 0.9, 0.5, 0.5]) == []  # too few on one side


def points(values, **more):
    return [
        Experiment(
            run_id=f"{number:032x}",
            values={
                "name": "strong-w008", "kind": "point", "started": f"2026-01-{1 + number:02d}T08:00:00", "model": "digits.Digits",
                "gpus": 8, "mode": "strong", "efficiency": value, "code": "new" if number >= 10 else "old", **more,
            },
        )
        for number, value in enumerate(values)
    ]  # fmt: skip


def test_a_course_says_what_else_changed_and_leaves_out_what_must_not_be_used():
    values = [
        0.90,
        0.91,
        0.90,
        0.92,
        0.91,
        0.90,
        0.89,
        0.91,
        0.90,
        0.91,
        0.78,
        0.77,
        0.79,
        0.78,
        0.77,
        0.78,
        0.79,
        0.77,
    ]
    [history] = histories([*points(values)[::-1], *points([0.1], invalid="the fan was off")], figure="efficiency")
    assert history.values == values
    [change] = history.changes
    assert change.index == 10 and history.is_worse(change) and history.explained(change) == ["code old -> new"]
    assert history.to_dict()["changes"][0]["at"] == "2026-01-11T08:00:00"


def test_other_machines_and_sizes_are_courses_of_their_own():
    found = histories(
        [*points([0.9] * 3), *points([0.5] * 2, gpus=16), *points([0.4] * 4, hardware="8 x A100")], figure="efficiency"
    )
    assert [(len(one.points), one.values[0]) for one in found] == [(4, 0.4), (3, 0.9), (2, 0.5)]


def test_a_page_shows_each_course():
    from scaleray.studies.history_page import history_headline, history_page

    found = histories(points([0.9, 0.91, 0.92, 0.9, 0.91, 0.6, 0.61, 0.6, 0.62, 0.61]), figure="efficiency")
    assert history_headline(found) == "10 points on 1 curve: 1 change beyond noise, 1 for the worse"
    page = history_page(found, command="scaleray tracking curve")
    assert "<svg" in page and "digits.Digits, 8 workers, strong" in page and "worse: 91.0% to 61.0%" in page
