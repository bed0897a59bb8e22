"""A stand-in for Ray, for tests that count tasks or compare what they read."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest


class Ray:
    """A stand-in for Ray whose tasks run when their result is asked for."""

    def __init__(self):
        self.exceptions = SimpleNamespace(RayTaskError=type("RayTaskError", (Exception,), {"cause": None}))
        self.num_cpus, self.under_way, self.most_under_way, self.steps = None, 0, 0, []

    def remote(self, function):
        def options(*, num_cpus, scheduling_strategy):
            self.num_cpus = num_cpus
            return SimpleNamespace(remote=lambda *arguments: self.start(function, *arguments))

        return SimpleNamespace(options=options)

    def start(self, function, sources, part, steps):
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.steps.append(steps)
        return lambda: function(sources, part, steps)

    def put(self, value):
        return value

    def get(self, value):
        if not callable(value):
            return value
        self.under_way -= 1
        return value()


@pytest.fixture
def ray(monkeypatch):
    stand_in = Ray()
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    monkeypatch.setattr("scaleray.data.ray_blocks._source_in_task", lambda reference: reference)
    return stand_in
