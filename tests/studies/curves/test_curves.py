"""Curves put together from points: fits, the next doubling, refusals and the verdict in words."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_curves import planted, point, turns_around
from pydantic import TypeAdapter

from scaleray.errors import UsageError
from scaleray.records.study_record import Curve
from scaleray.studies.curves import efficiency, fitting
from scaleray.studies.curves.curves import GivenLaw, as_curve
from scaleray.studies.curves.fitting import fit_laws
from scaleray.studies.curves.laws import amdahl, gustafson, usl


def test_a_planted_curve_comes_back_whole():
    curve = as_curve("strong", list(reversed(planted(lambda n: amdahl(n, 0.05), [1, 2, 4, 8], seed=1))))
    assert [p.point.workers for p in curve.points] == [1, 2, 4, 8]
    assert curve.points[-1].efficiency.low <= amdahl(8, 0.05) / 8 <= curve.points[-1].efficiency.high
    assert {fit.law for fit in curve.fits} == {"amdahl", "gustafson", "usl"}
    assert curve.best_law in ("amdahl", "usl")
    truth = amdahl(16, 0.05) / amdahl(8, 0.05)
    doubling = curve.next_doubling
    assert doubling is not None
    assert doubling.workers == 16
    assert doubling.gain.low < truth < doubling.gain.high
    assert doubling.efficiency.low < amdahl(16, 0.05) / 16 < doubling.efficiency.high
    assert doubling.cost_factor == 2
    said = f"Strong scaling: the next doubling to 16 workers would give {doubling.gain.value:.2f}x ("
    assert curve.verdict.startswith(said)
    assert "for 2x the cost; too little work for each worker is the limit" in curve.verdict


def test_the_same_points_give_the_same_curve_and_it_survives_json():
    points = planted(lambda n: gustafson(n, 0.02), [1, 2, 4], mode="weak")
    curve = as_curve("weak", points)
    assert curve == as_curve("weak", points)
    text = json.dumps(dataclasses.asdict(curve))
    assert TypeAdapter(Curve).validate_json(text) == curve


@pytest.mark.combination
@pytest.mark.parametrize("law", ["amdahl", "gustafson"])
def test_parameters_intervals_hold_the_truth_about_as_often_as_they_say(law: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fitting, "NUM_FITS", 60)
    monkeypatch.setattr(efficiency, "NUM_DRAWS", 60)
    speedup = {"amdahl": lambda n: amdahl(n, 0.08), "gustafson": lambda n: gustafson(n, 0.08)}[law]
    held = 0
    for seed in range(40):
        fitted = fit_laws(planted(speedup, [1, 2, 4, 8], seed=seed, steps=10))
        estimate = next(f for f in fitted if f.law.name == law).parameters()["f"]
        held += estimate.low <= 0.08 <= estimate.high
        assert estimate.value == pytest.approx(0.08, abs=0.05)
    assert held >= 34  # 95 % of 40, and 3 standard errors below


def test_the_peak_of_the_usl_is_found_and_told_from_amdahl():
    points = planted(lambda n: usl(n, 0.02, 0.01), [1, 2, 4, 8, 16], between=0.005)
    curve = as_curve("strong", points)
    assert curve.best_law == "usl"
    kappa = next(fit for fit in curve.fits if fit.law == "usl").parameters["kappa"]
    assert kappa.low <= 0.01 <= kappa.high
    assert kappa.low > 0


@pytest.mark.combination
@given(f=st.floats(0, 0.4), count=st.integers(2, 4), seed=st.integers(0, 99))
@settings(max_examples=6, deadline=None)
def test_bands_surround_their_law_and_reach_one_doubling_further(f: float, count: int, seed: int):
    curve = as_curve("strong", planted(lambda n: amdahl(n, f), [2**k for k in range(count)], seed=seed))
    for fit in curve.fits:
        assert fit.band[0][0] == 1
        assert fit.band[-1][0] == 2**count
        assert {p.point.workers for p in curve.points} <= {n for n, _ in fit.band}
        assert all(0 < e.low <= e.value <= e.high for _, e in fit.band)
        widths = [np.log(e.high / e.low) for n, e in fit.band if n >= 2 ** (count - 1)]
        assert widths[-1] >= widths[0]


def test_an_extrapolation_is_no_surer_than_published_curves_allow():
    quiet = planted(lambda n: amdahl(n, 0.001), [1, 2, 4, 8], between=0.0001, within=0.0001)
    gain = as_curve("strong", quiet).next_doubling.gain
    assert 0.05 < np.log(gain.high / gain.low) / 2 < 0.12  # 1.96 x 0.04, had the points no noise at all


def test_more_loss_so_far_makes_the_next_doubling_less_sure():
    gains = [
        as_curve("strong", planted(lambda n, f=f: amdahl(n, f), [1, 2, 4, 8], between=0.001)).next_doubling.gain
        for f in (0.002, 0.02)
    ]
    assert gains[1].high - gains[1].low > gains[0].high - gains[0].low


def test_a_given_law_is_chosen_when_it_predicts_best():
    def step_at_a_node(n: float) -> float:  # no law of three parameters bends so
        return n * (1.0 if n <= 4 else 0.9)

    curve = as_curve("strong", planted(step_at_a_node, [1, 2, 4, 8, 16]), laws=[GivenLaw("planner", step_at_a_node)])
    assert curve.best_law == "planner"
    gain = curve.next_doubling.gain
    assert gain.value == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_a_given_law_that_gives_no_throughput_is_a_slip_of_its_maker(value: float):
    with pytest.raises(ValueError, match="planner"):
        as_curve("strong", planted(lambda n: n, [1, 2]), laws=[GivenLaw("planner", lambda n: value)])


def test_two_points_are_fitted_by_the_law_of_the_mode():
    assert as_curve("strong", planted(lambda n: amdahl(n, 0.1), [1, 2])).best_law == "amdahl"
    weak = as_curve("weak", planted(lambda n: gustafson(n, 0.1), [1, 2], mode="weak"))
    assert weak.best_law == "gustafson"
    assert all(fit.held_out_error is None for fit in weak.fits)
    assert weak.next_doubling is not None


def test_one_point_is_a_curve_about_which_nothing_is_predicted():
    curve = as_curve("strong", planted(lambda n: n, [2]))
    assert (curve.fits, curve.next_doubling, curve.best_law, curve.limit) == ([], None, None, "")
    assert "one point, 2 workers, shows no curve" in curve.verdict


def test_throughput_that_falls_at_the_end_is_past_its_peak():
    curve = as_curve("strong", planted(lambda n: {1: 1, 2: 1.9, 4: 1.5}[n], [1, 2, 4]))
    assert curve.next_doubling is None
    assert "4 workers gave 0.7" in curve.verdict
    assert "more workers are slower" in curve.verdict


def test_throughput_that_falls_and_rises_again_is_no_curve():
    curve = as_curve("strong", planted(lambda n: {1: 1, 2: 0.7, 4: 3}[n], [1, 2, 4]))
    assert curve.next_doubling is None
    assert "which no curve explains" in curve.verdict


def test_a_fall_within_noise_is_no_fall():
    points = planted(lambda n: {1: 1, 2: 1.9, 4: 1.88}[n], [1, 2, 4], between=0.05)
    assert "slower" not in as_curve("strong", points).verdict


def test_the_first_doubling_that_leaves_a_node_is_not_predicted():
    points = planted(lambda n: amdahl(n, 0.02), [1, 2, 4, 8])
    curve = as_curve("strong", points, workers_per_node=8)
    assert curve.next_doubling is None
    assert "16 workers would be the first to span nodes" in curve.verdict
    assert as_curve("strong", points, workers_per_node=16).next_doubling is not None
    assert as_curve("strong", points, workers_per_node=4).next_doubling is not None


def test_points_close_together_and_intervals_too_wide_are_refused():
    close = as_curve("strong", planted(lambda n: n, [6, 8]))
    assert "span less than one doubling" in close.verdict
    loose = as_curve("strong", planted(lambda n: n, [1, 2], num_turns=2, between=0.1, seed=3))
    assert loose.next_doubling is None
    assert "the interval is too wide" in loose.verdict


def test_price_and_marks_stand_in_the_verdict():
    points = [
        dataclasses.replace(p, marks=["emulated", "reused"]) for p in planted(lambda n: amdahl(n, 0.01), [1, 2, 4])
    ]
    verdict = as_curve("strong", points, price_per_worker_hour=3.6).verdict
    # 4 workers at 3.6 an hour are 0.004 a second, for about 9600 amdahl(4) samples
    assert f"instead of {0.004 * 1e6 / points[-1].samples_per_s.value:.3g}" in verdict
    assert verdict.endswith("(emulated).")


@pytest.mark.parametrize(
    ("mode", "points", "word"),
    [
        ("strong", [], "at least one"),
        ("strong", planted(lambda n: n, [2, 2]), "has duplicate numbers of workers"),
        ("strong", planted(lambda n: n, [1], mode="weak"), "the strong curve has a weak point"),
        ("strong", [point(1, [[0.1]]), point(2, [[0.1]], batch=64)], "it must be 960"),
        ("weak", [point(1, [[0.1]], mode="weak", batch=8), point(2, [[0.1]], mode="weak", batch=8)], "it must be 16"),
    ],
)
def test_points_that_cannot_stand_on_one_curve_are_refused(mode: str, points: list, word: str):
    with pytest.raises(UsageError, match=word):
        as_curve(mode, points)


def test_points_of_one_step_are_taken():
    curve = as_curve("strong", [point(n, [turns_around(1 / n, seed=n)[0][:1]]) for n in (1, 2, 4)])
    assert curve.points[-1].speedup.value > 1
