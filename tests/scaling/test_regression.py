"""Slower, faster, or not to be told from noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from planted_curves import turns_around

from scaleray.scaling.regression import Change, change_of_pairs, change_of_turns
from scaleray.study_records import Estimate


def test_a_planted_slowdown_is_found_with_its_size():
    change = change_of_turns(turns_around(0.11, seed=1, between=0.01), turns_around(0.1, seed=2, between=0.01))
    assert change.verdict == "slower"
    assert change.time_ratio.low < 1.1 < change.time_ratio.high


def test_the_other_way_round_it_is_faster():
    change = change_of_turns(turns_around(0.1, seed=2, between=0.01), turns_around(0.11, seed=1, between=0.01))
    assert change.verdict == "faster"
    assert str(change).startswith("faster by ")


def test_two_measurements_of_the_same_are_rarely_called_different():
    found = [
        change_of_turns(turns_around(0.1, seed=2 * s), turns_around(0.1, seed=2 * s + 1)).verdict for s in range(60)
    ]
    assert found.count("no difference") >= 52  # 95 % of 60, and 3 standard errors below


def test_the_words():
    assert str(Change(Estimate(1.041, 1.029, 1.052))) == "slower by 4.1 % (2.9 to 5.2), beyond noise"
    assert str(Change(Estimate(0.959, 0.948, 0.971))) == "faster by 4.1 % (2.9 to 5.2), beyond noise"
    assert str(Change(Estimate(8.0, 7.0, 9.5))) == "takes 8 times as long (7 to 9.5), beyond noise"
    words = "no difference that can be told from noise (-1.2 to +2.3 %)"
    assert str(Change(Estimate(1.005, 0.988, 1.023))) == words


def test_pairs_under_the_same_settings_cancel_what_the_settings_do():
    draw = np.random.default_rng(0)
    bases = [0.01, 0.1, 1.0, 10.0, 100.0]
    pairs = [(1.05 * base * math.exp(0.005 * draw.normal()), base) for base in bases]
    change = change_of_pairs(pairs)
    assert change is not None
    assert change.verdict == "slower"
    assert change.time_ratio.value == pytest.approx(1.05, abs=0.01)
    assert change_of_pairs(pairs[:2]) is None
    assert change_of_pairs([(t, t) for _, t in pairs]).verdict == "no difference"
