"""A pytest plugin that writes down which test runs which line, in gloo processes too: `-p jobs.mutation.contexts`.

pytest-cov names the test in its own process alone; a pool process learns the name with each task. SCALERAY_MUTATION_OUTCOMES
is the file that outcomes and durations of tests go to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OUTCOMES = "SCALERAY_MUTATION_OUTCOMES"
RUN = "|run"  # as pytest-cov marks the call of a test among its phases

_outcomes: dict[str, dict[str, Any]] = {}
_now = ""


class Named:
    """A task of the pool under the name of its test."""

    def __init__(self, function: Callable[..., Any], test: str) -> None:
        self.function, self.test = function, test

    def __call__(self, place: Any, *args: Any) -> Any:
        """Run it, in a pool process."""
        import coverage

        measured = coverage.Coverage.current()
        if measured is not None:
            measured.switch_context(self.test + RUN)
        return self.function(place, *args)


def pytest_configure(config: pytest.Config) -> None:
    """Hand the name of the test that runs to the pool's processes."""
    import gloo_pool

    attempt = gloo_pool.GlooPool.attempt

    def named(self: Any, world_size: int, function: Callable[..., Any], *args: Any) -> Any:
        return attempt(self, world_size, Named(function, _now), *args)

    gloo_pool.GlooPool.attempt = named


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins."""
    global _now
    _now = nodeid


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One of a test's three phases is over."""
    found = _outcomes.setdefault(report.nodeid, {"passed": True, "seconds": 0.0})
    found["passed"] &= report.passed
    found["seconds"] += report.duration


def pytest_runtest_setup(item: Any) -> None:
    """Which tests need the pool."""
    _outcomes.setdefault(item.nodeid, {"passed": True, "seconds": 0.0})["pool"] = "gloo" in item.fixturenames


def pytest_sessionfinish() -> None:
    """Write what was found."""
    Path(os.environ[OUTCOMES]).write_text(json.dumps(_outcomes))
