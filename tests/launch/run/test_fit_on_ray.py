"""Ray Data's preprocessors have the same values whether Ray Data fits them, or this process does."""

from __future__ import annotations

import numpy as np
import pytest
import ray
from fitted_preprocessors import FITTED, fitted

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def same(one, other):
    """Whether two values that were learned are the same, numbers within the rounding of sums in another order."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float | np.ndarray):
        return np.allclose(one, other, rtol=1e-12, atol=0)
    return type(one) is type(other) and one == other


def test_every_kind_of_preprocessor_learns_without_ray_what_it_learns_on_a_cluster(ray_session, monkeypatch):
    monkeypatch.setattr("scaleray.data.preprocessing.FITTED_ROWS", 128)
    on_ray = {kind: fitted(kind) for kind in FITTED}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for kind, parts in on_ray.items():
        here = fitted(kind)
        assert len(parts) == len(here) and all(map(same, parts, here)), (kind, parts, here)
