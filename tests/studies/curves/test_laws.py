"""Amdahl's, Gustafson's and the Universal Scalability Law, and their fits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaleray.studies.curves.laws import GivenLaw, amdahl, gustafson, laws_for, usl

shares = st.floats(0, 1)
sizes = st.floats(1, 1e4)


@given(f=shares)
def test_one_worker_is_one_under_every_law(f: float):
    assert amdahl(1, f) == pytest.approx(1)
    assert gustafson(1, f) == pytest.approx(1)
    assert usl(1, f, f) == pytest.approx(1)


@given(r=sizes, f=shares)
def test_efficiency_is_above_zero_and_at_most_one(r: float, f: float):
    for speedup in (amdahl(r, f), gustafson(r, f), usl(r, f, f)):
        assert 0 < speedup / r <= 1 + 1e-9


@given(r=sizes, more=st.floats(1, 10), f=shares)
def test_amdahl_and_gustafson_never_fall_and_amdahl_stays_below_its_bound(r: float, more: float, f: float):
    assert amdahl(r * more, f) >= amdahl(r, f) * (1 - 1e-9)
    assert gustafson(r * more, f) >= gustafson(r, f) * (1 - 1e-9)
    if f > 0:
        assert amdahl(r, f) <= 1 / f * (1 + 1e-9)


@given(r=sizes, f=shares)
def test_the_usl_without_coherency_is_amdahls_law(r: float, f: float):
    assert usl(r, f, 0.0) == pytest.approx(amdahl(r, f))


def test_known_numbers():
    assert amdahl(8, 0.05) == pytest.approx(5.9259, abs=1e-4)
    assert gustafson(8, 0.05) == pytest.approx(7.65)
    assert usl(8, 0.05, 0.01) == pytest.approx(8 / 1.91)


@given(f=st.floats(0, 0.9), sigma=st.floats(0, 0.5), kappa=st.floats(0, 0.05), unit=st.floats(1e-6, 1e9))
@settings(max_examples=25, deadline=None)
def test_a_fit_finds_the_planted_law_exactly_whatever_the_unit(f: float, sigma: float, kappa: float, unit: float):
    r = np.array([1.0, 2, 4, 8, 16])
    laws = {law.name: law for law in laws_for(5)}
    planted = {"amdahl": amdahl(r, f), "gustafson": gustafson(r, f), "usl": usl(r, sigma, kappa)}
    truth = {"amdahl": {"f": f}, "gustafson": {"f": f}, "usl": {"sigma": sigma, "kappa": kappa}}
    for name, law in laws.items():
        coefficients = law.fit(r, np.log(unit * planted[name]), np.ones(5))
        assert law.parameters(coefficients) == pytest.approx(truth[name], abs=1e-5)
        assert law.log_throughput(coefficients, r) == pytest.approx(np.log(unit * planted[name]), abs=1e-6)


@given(values=st.lists(st.floats(-3, 3), min_size=4, max_size=4))
@settings(max_examples=25, deadline=None)
def test_whatever_the_points_parameters_keep_their_meaning(values: list[float]):
    r = np.array([1.0, 2, 4, 8])
    for law in laws_for(4):
        coefficients = law.fit(r, np.log(r) + np.array(values), np.ones(4))
        found = law.parameters(coefficients)
        assert all(value >= 0 for value in found.values())
        assert found.get("f", 0.0) <= 1
        assert found.get("sigma", 0.0) <= 1
        assert np.isfinite(law.log_throughput(coefficients, r)).all()


@given(values=st.lists(st.floats(-0.3, 0.3), min_size=5, max_size=5))
@settings(max_examples=15, deadline=None)
def test_no_other_parameters_fit_better(values: list[float]):
    r, weights = np.array([1.0, 2, 4, 8, 16]), np.array([1.0, 2, 1, 4, 1])
    goal = np.log(amdahl(r, 0.1)) + np.array(values)
    for law in laws_for(5):
        coefficients = law.fit(r, goal, weights)

        def misfit(c: np.ndarray, law=law) -> float:
            return float(weights @ (law.log_throughput(c, r) - goal) ** 2)

        best = misfit(coefficients)
        for number in range(len(coefficients)):
            for change in (0.99, 1.01):
                other = coefficients.copy()
                other[number] *= change
                assert misfit(other) >= best - 1e-9


def test_under_four_points_the_usl_has_no_coherency():
    r = np.array([1.0, 2, 4])
    law = next(law for law in laws_for(3) if law.name == "usl")
    assert law.parameters(law.fit(r, np.log(usl(r, 0.1, 0.05)), np.ones(3)))["kappa"] == 0


def test_a_given_law_keeps_its_shape_and_is_asked_for_whole_numbers_of_workers():
    asked = []

    def model(workers: float) -> float:
        asked.append(workers)
        return 7.0 * workers**0.8

    law = laws_for(2, [GivenLaw("planner", model)], base_workers=4)[0]
    r = np.array([1.0, 2.0])
    coefficients = law.fit(r, np.log(100 * r**0.8), np.ones(2))
    assert asked == [4.0, 8.0]  # once each: a model may be slow
    assert law.log_throughput(coefficients, r) == pytest.approx(np.log(100 * r**0.8))
