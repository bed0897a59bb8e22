"""Speed-up and efficiency as figures: the ideal line, bars that go on, and bands that are drawn whole or not at all."""

from __future__ import annotations

import dataclasses
import re

import pytest
import study_examples
from hypothesis import given
from hypothesis import settings as how_often
from hypothesis import strategies as st

from scaleray.records.study_record import Estimate
from scaleray.studies.speedup_figure import efficiency, speedup


@pytest.mark.filterwarnings("error::UserWarning")
def test_intervals_that_say_nothing_do_not_press_a_curve_flat():
    record = study_examples.study(modes=("strong",), sizes=(1, 2))
    curve = record.curves[0]
    wild = Estimate(1.2, 1e-310, 3e302)
    points = [curve.points[0], dataclasses.replace(curve.points[1], speedup=wild, efficiency=Estimate(0.6, 0.0, 1e300))]
    fit = dataclasses.replace(curve.fits[0], band=[(n, Estimate(e.value, 0.0, 1e302)) for n, e in curve.fits[0].band])
    wild_curve = dataclasses.replace(curve, points=points, fits=[fit])
    for made, scale in ((speedup(wild_curve), 1.0), (efficiency(wild_curve), 100.0)):
        assert "Bars with an arrow extend beyond the frame." in made.caption
        ticks = [float(text.rstrip("%")) for text in re.findall(r">(\d+(?:\.\d+)?%?)</text>", made.svg)]
        assert max(ticks) <= 4 * scale
    drawn, plain = speedup(wild_curve), speedup(curve)
    assert "less than 0.01× to more than 1000×, is too wide to be drawn" in drawn.caption
    assert "FillBetween" in plain.svg and "FillBetween" not in drawn.svg
    assert "with its 95% interval" in plain.caption


def test_the_ideal_line_goes_from_the_base_to_as_many_times_its_speed_as_there_are_workers():
    curve = study_examples.study(modes=("strong",), sizes=(2, 4, 8)).curves[0]
    svg = speedup(dataclasses.replace(curve, next_doubling=None)).svg
    dashed = re.findall(r'd="M (\S+) (\S+)\s+L (\S+) (\S+)\s*"[^>]*stroke-dasharray[^>]*stroke: #616e7c', svg)
    ticks = re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)" style="fill: #c3cad2', svg)  # 2, 4, 8 workers, then times
    (x2, _), _, (x8, _), (_, y2), _, (_, y8) = ticks
    assert dashed == [(x2, y2, x8, y8)] and ">ideal<" in svg


@pytest.mark.combination
@given(st.floats(0.3, 1.2), st.floats(0.5, 6.0), st.floats(0.5, 6.0))
@how_often(max_examples=15, deadline=None)
def test_a_band_and_a_bar_are_drawn_whole_or_not_at_all(value, below, above):
    curve = study_examples.study(modes=("strong",), sizes=(1, 2)).curves[0]
    wide = Estimate(value, value * 10**-below, value * 10**above)
    fit = dataclasses.replace(curve.fits[0], band=[(1.0, Estimate(1.0, 0.9, 1.1)), (2.0, wide), (4.0, wide)])
    point = dataclasses.replace(curve.points[1], speedup=wide)
    made = speedup(dataclasses.replace(curve, points=[curve.points[0], point], fits=[fit], next_doubling=None))
    assert ("FillBetween" in made.svg) == ("too wide to be drawn" not in made.caption)
    assert ("extend beyond" in made.caption) == ("FillBetween" not in made.svg)
