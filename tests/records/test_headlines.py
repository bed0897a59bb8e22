"""The answer of a study in one line: how many workers to use."""

import dataclasses
import re

import pytest
import study_examples

from scaleray.records.page.page import render
from scaleray.records.study_record import Estimate
from scaleray.records.text.headlines import MUCH_FASTER, study_headline, worth_using, would_pay
from scaleray.studies.study_page import study_page


def study(speedups, **more):
    """A study of 1, 2, 4, ... workers with these (value, low, high) of speed-up."""
    record = study_examples.study(sizes=tuple(2**k for k in range(len(speedups))), modes=("strong",), **more)
    (curve,) = record.curves
    points = []
    for at, (value, low, high) in zip(curve.points, speedups, strict=True):
        n = at.point.workers
        share = Estimate(value / n, low / n, high / n)
        points.append(dataclasses.replace(at, speedup=Estimate(value, low, high), efficiency=share))
    return dataclasses.replace(record, curves=[dataclasses.replace(curve, points=points)])


@pytest.mark.parametrize(
    ("speedups", "headline"),
    [
        ([(1, 1, 1), (1.05, 1.0, 1.1)], "Stay on 1 worker: 2 workers are 1.05× as fast as 1, 52% of ideal (strong scaling)"),
        ([(1, 1, 1), (0.7, 0.6, 0.8)], "Stay on 1 worker: 2 workers are 0.7× as fast as 1, 35% of ideal (strong scaling)"),
        ([(1, 1, 1), (1.9, 1.8, 2.0)], "Use 2 workers: 1.9× as fast as 1, 95% of ideal (strong scaling)"),
        ([(1, 1, 1), (1.9, 1.8, 2.0), (2.0, 1.9, 2.1)], "Stay on 2 workers: 4 workers are 2× as fast as 1, 50% of ideal (strong scaling)"),
        ([(1, 1, 1), (1.3, 0.9, 1.6)], "Whether 2 workers are worthwhile is unclear: 2 workers are 1.3× as fast as 1 (0.9–1.6×)"),
        ([(1, 1, 1), (1.4, 0.5, 2.4)], "How many workers to use is unclear: 2 workers are 1.4× as fast as 1, known only within 0.5–2.4×"),
    ],
)  # fmt: skip
def test_the_headline_is_the_answer(speedups, headline):
    assert study_headline(study(speedups)) == headline


def test_a_size_that_is_slower_for_itself_does_not_hide_a_larger_one_that_pays():
    record = study([(1, 1, 1), (1.05, 0.9, 1.2), (3.0, 2.8, 3.2)])
    assert worth_using(record.curves[0]).point.workers == 4


@pytest.mark.parametrize(("mode", "ms", "needed"), [("strong", (6.0, 9.0), 14.67), ("weak", (6.0, 12.0), 7.333)])
def test_a_curve_without_a_gain_says_from_which_step_time_on_there_would_be_one(mode, ms, needed):
    (curve,) = study([(1, 1, 1), (0.7, 0.6, 0.8)]).curves
    points = [
        dataclasses.replace(at, point=dataclasses.replace(at.point, step_time_s=Estimate(*[t / 1e3] * 3)))
        for at, t in zip(curve.points, ms, strict=True)
    ]
    text = would_pay(dataclasses.replace(curve, mode=mode, points=points))
    assert (
        text
        == f"A step takes 6 ms on 1 worker: from about {needed:.3g} ms, with more work in it, 2 would be worthwhile"
    )
    # at that step time, with the same time extra, 2 workers are just MUCH_FASTER
    extra = ms[1] - (ms[0] / 2 if mode == "strong" else ms[0])
    then = needed / 2 + extra if mode == "strong" else needed + extra
    assert (1 if mode == "strong" else 2) * needed / then == pytest.approx(MUCH_FASTER, rel=1e-3)
    (gains,) = study([(1, 1, 1), (1.9, 1.8, 2.0)]).curves
    assert would_pay(gains) == ""


@pytest.mark.combination
def test_the_answer_and_the_next_doubling_are_said_once():
    html = render(study_page(study_examples.study()))
    assert len(re.findall(r"doubling to 16", html)) == 1 and html.count("<h1") == 1


@pytest.mark.combination
def test_a_law_of_too_few_points_is_neither_drawn_nor_listed():
    record = study([(1, 1, 1), (1.9, 1.8, 2.0)])
    (curve,) = record.curves
    assert curve.fits, "the example has one"
    judged = [dataclasses.replace(fit, held_out_error=0.02) for fit in curve.fits]
    unjudged = [dataclasses.replace(fit, held_out_error=None) for fit in curve.fits]
    for fits, is_there in ((judged, True), (unjudged, False)):
        html = render(study_page(dataclasses.replace(record, curves=[dataclasses.replace(curve, fits=fits)])))
        assert ("Laws fitted to the curve" in html) is is_there
        assert (f"{curve.best_law} fit" in html) is is_there


@pytest.mark.combination
@pytest.mark.parametrize(("value", "is_there"), [(1.9, False), (2.24, True)])
def test_an_efficiency_beyond_all_of_it_has_a_number_on_the_axis_only_where_it_was_measured(value, is_there):
    html = render(study_page(study([(1, 0.9, 1.1), (value, value * 0.95, value * 1.05)])))
    figure = next(svg for svg in re.findall(r"<svg.*?</svg>", html, re.S) if "Efficiency." in svg[:200])
    ticks = {float(text) for text in re.findall(r">(\d+)%<", figure)}
    assert (max(ticks) > 100) is is_there


@pytest.mark.combination
def test_a_page_follows_the_systems_dark_setting_and_tables_say_that_they_go_on():
    html = render(study_page(study_examples.study()))
    assert (
        "@media screen and (prefers-color-scheme: dark)" in html
        and '<meta name="color-scheme" content="light dark">' in html
    )
    assert re.search(r'<p class="cue"[^>]*>\d+ columns: scroll sideways', html)
