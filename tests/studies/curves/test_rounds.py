"""Points that were measured in the same rounds are compared round by round, where that says more."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from planted_curves import point, turns_around

from scaleray.studies.curves import efficiency
from scaleray.studies.curves.curves import as_curve
from scaleray.studies.curves.efficiency import curve_points
from scaleray.studies.curves.fitting import fit_laws
from scaleray.studies.curves.paired_rounds import repeats_by_round, without_drift

ROUNDS = 5


def in_rounds(step_times, *, drift, seed, own=0.01, rounds=ROUNDS, within=0.03, steps=20):
    """Points by number of workers; drift: standard deviation of what a round does to all of them, own: to one of them."""
    shared = np.exp(drift * np.random.default_rng([seed, 77]).normal(size=rounds))
    names = [f"study/{number}" for number in range(rounds)]
    found = []
    for workers, step_time in step_times.items():
        turns = turns_around(
            step_time, seed=1000 * seed + workers, num_turns=rounds, between=own, within=within, steps=steps
        )
        drifted = [[t * float(factor) for t in turn] for turn, factor in zip(turns, shared, strict=True)]
        found.append(point(workers, drifted, rounds=names))
    return found


def unpaired(points):
    return [dataclasses.replace(p, rounds=[]) for p in points]


def width(interval):
    return math.log(interval.high / interval.low)


def test_a_drift_that_a_round_shares_cancels():
    points = in_rounds({1: 0.1, 2: 0.06}, drift=0.3, seed=1)
    paired, apart = (curve_points(p)[1].speedup for p in (points, unpaired(points)))
    assert paired.low < 1 / 0.6 < paired.high
    assert width(paired) < 0.15 < 0.5 < width(apart)


def test_the_order_of_turns_does_not_matter_but_their_rounds_do():
    one, two = in_rounds({1: 0.1, 2: 0.06}, drift=0.3, seed=1)
    turned = dataclasses.replace(two, turns=two.turns[::-1], rounds=two.rounds[::-1])
    assert curve_points([one, turned])[1].speedup == curve_points([one, two])[1].speedup
    mixed = dataclasses.replace(two, rounds=two.rounds[1:] + two.rounds[:1])
    assert width(curve_points([one, mixed])[1].speedup) > 3 * width(curve_points([one, two])[1].speedup)


@pytest.mark.always("0.2-3")
@pytest.mark.parametrize("rounds", [3, 5])
@pytest.mark.parametrize("drift", [0.0, 0.02, 0.2])
def test_intervals_hold_the_truth_whatever_the_rounds_share(drift, rounds, monkeypatch):
    monkeypatch.setattr(efficiency, "NUM_DRAWS", 200)
    held = 0
    for seed in range(100):
        points = in_rounds({1: 0.1, 2: 0.06}, drift=drift, seed=seed, own=0.02, rounds=rounds, steps=10)
        speedup = curve_points(points)[1].speedup
        held += speedup.low <= 1 / 0.6 <= speedup.high
    assert held >= 88  # 95 %, and 3 standard errors of 100 trials below


def test_rounds_that_share_nothing_leave_the_intervals_as_they_were():
    same = 0
    for seed in range(10):
        points = in_rounds({1: 0.1, 2: 0.06, 4: 0.04}, drift=0.0, seed=seed, own=0.03)
        same += curve_points(points) == [
            dataclasses.replace(at, point=p) for at, p in zip(curve_points(unpaired(points)), points, strict=True)
        ]
    assert same >= 9


@pytest.mark.parametrize(
    "rounds",
    [
        [],  # of an older record
        [f"another study/{number}" for number in range(ROUNDS)],
        ["study/0", "study/1", "study/2", "study/3", ""],  # one turn was launched alone
        ["study/0", "study/0", "study/1", "study/2", "study/3"],
        [f"study/{number}" for number in range(ROUNDS - 1)],
    ],
)
def test_turns_without_their_like_in_every_other_point_are_not_compared_by_rounds(rounds):
    one, two, four = in_rounds({1: 0.1, 2: 0.06, 4: 0.04}, drift=0.3, seed=2)
    other = dataclasses.replace(four, rounds=rounds)
    assert repeats_by_round([one, two, other]) is None
    found, apart = curve_points([one, two, other]), curve_points(unpaired([one, two, four]))
    assert [at.speedup for at in found] == [at.speedup for at in apart]
    assert repeats_by_round([one, two, four]) is not None


def test_of_two_points_the_ratio_is_the_median_of_the_rounds_ratios():
    one = point(1, [[0.1] * 4, [0.2] * 4, [0.13] * 4], rounds=["s/0", "s/1", "s/2"])
    two = point(2, [[0.05] * 4, [0.1] * 4, [0.09] * 4], rounds=["s/0", "s/1", "s/2"])
    (first, second) = without_drift(repeats_by_round([one, two]))
    assert np.median(first) / np.median(second) == pytest.approx(2.0)


def test_one_round_alone_is_no_comparison_of_rounds():
    points = in_rounds({1: 0.1, 2: 0.06}, drift=0.3, seed=3, rounds=1)
    assert repeats_by_round(points) is None
    assert curve_points(points)[1].speedup.low < curve_points(points)[1].speedup.high


def test_two_short_turns_that_disagree_leave_wide_but_finite_intervals():
    wild = [[0.001, 0.2], [0.3, 5.0]]
    points = [point(n, wild[:: (-1) ** n], rounds=["s/0", "s/1"]) for n in (1, 2)]
    curve = as_curve("strong", points)
    ends = [end for fit in curve.fits for _, e in fit.band for end in (e.low, e.high)]
    assert all(0 < end < math.inf for end in ends)
    assert curve.next_doubling is None


@pytest.mark.combination
def test_laws_and_the_next_doubling_are_surer_without_the_shared_drift():
    points = in_rounds({n: 0.1 * (0.05 + 0.95 / n) for n in (1, 2, 4, 8)}, drift=0.2, seed=4)
    paired, apart = as_curve("strong", points), as_curve("strong", unpaired(points))
    share, unsure = (
        next(f for f in fit_laws(p) if f.law.name == "amdahl").parameters()["f"] for p in (points, unpaired(points))
    )
    assert share.low <= 0.05 <= share.high
    assert share.high - share.low < (unsure.high - unsure.low) / 3
    assert paired.next_doubling is not None
    assert paired.next_doubling.gain.low < (0.05 + 0.95 / 8) / (0.05 + 0.95 / 16) < paired.next_doubling.gain.high
    at_eight = next(e for n, e in next(f for f in paired.fits if f.law == "amdahl").band if n == 8)
    assert width(at_eight) < 0.5 * width(
        next(e for n, e in next(f for f in apart.fits if f.law == "amdahl").band if n == 8)
    )
