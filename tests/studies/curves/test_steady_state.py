"""Where a warm-up ends, and which runs are not steady."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from scaleray.studies.curves.steady_state import LEAST_STEPS, LEAST_WARMUP, steady_state


def noise(count: int, *, seed: int = 0, spread: float = 0.05) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return 0.1 * np.exp(spread * draw.normal(size=count))


def test_steady_steps_lose_their_first_three_and_no_more():
    found = steady_state(list(noise(200)))
    assert (found.first, found.is_steady, found.why) == (LEAST_WARMUP, True, "")


def test_a_warmup_is_cut_off_where_it_ends():
    found = []
    for seed in range(30):
        times = noise(300, seed=seed)
        times[:60] *= 1 + 2 * np.exp(-np.arange(60) / 10)
        found.append(steady_state(times))
    assert min(f.first for f in found) >= 20  # 27 % are left of it there, 4 % at 40
    assert float(np.median([f.first for f in found])) <= 60
    assert sum(f.is_steady for f in found) >= 27


def test_single_slow_steps_neither_move_the_cut_nor_the_verdict():
    times = noise(300)
    times[[40, 90, 91, 170, 299]] *= 20
    found = steady_state(times)
    assert found.first == LEAST_WARMUP
    assert found.is_steady


@pytest.mark.parametrize(("growth", "word"), [(0.3, "rise"), (-0.3, "fall")])
def test_a_drift_is_said(growth: float, word: str):
    found = steady_state(noise(400) * np.linspace(1, 1 + growth, 400))
    assert not found.is_steady
    assert found.drift == pytest.approx(growth, abs=0.15)
    assert word in found.why or "settled" in found.why


def test_a_level_that_changes_late_is_not_steady():
    times = noise(400)
    times[280:] *= 1.2
    assert not steady_state(times).is_steady


def test_a_warmup_longer_than_half_of_the_run_is_not_steady():
    found = steady_state(noise(200) * (1 + 3 * np.exp(-np.arange(200) / 80)))
    assert not found.is_steady
    assert found.first <= 100


def test_a_drift_too_small_to_matter_is_left_alone_however_significant():
    found = steady_state(noise(5000, spread=0.01) * np.linspace(1, 1.02, 5000))
    assert found.is_steady
    assert found.drift == pytest.approx(0.02, abs=0.005)


@pytest.mark.parametrize("count", [0, 1, 2, 5, LEAST_STEPS])
def test_few_steps_are_said_to_be_too_few(count: int):
    found = steady_state(noise(count))
    assert not found.is_steady
    assert "too few" in found.why or "no steps" in found.why
    assert 0 <= found.first <= count // 2


def test_steady_runs_are_mostly_called_steady():
    verdicts = [steady_state(noise(100, seed=seed)).is_steady for seed in range(100)]
    assert sum(verdicts) >= 93


def test_the_clocks_array_is_taken_as_it_is():
    assert steady_state(array("d", [0.1] * 50)).is_steady
