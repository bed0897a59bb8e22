"""Fixtures for all rooms. Test modules have names of their own, as none of the folders is a package."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the processes of a test share few cores

import pytest
from gloo_pool import GlooPool
from hypothesis import settings

settings.register_profile("scaleray", deadline=None)  # a loaded machine is not a failure
settings.load_profile("scaleray")


@pytest.fixture(scope="session")
def gloo() -> Iterator[GlooPool]:
    """Gloo processes on the loopback interface: `gloo.run(world_size, function, *args)`."""
    pool = GlooPool()
    yield pool
    pool.stop()


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's config comes from the test alone."""
    for variable in list(os.environ):
        if variable.startswith("SCALERAY_"):
            monkeypatch.delenv(variable)
