"""Pauses of the garbage collector."""

import gc

import pytest

from scaleray.training.profile import phase_times
from scaleray.training.profile.phase_times import Pauses


@pytest.mark.combination
def test_collections_count_until_the_watch_is_closed(monkeypatch):
    clock = iter(range(0, 1000, 2))  # every look at the clock is two seconds later
    before = list(gc.callbacks)
    watch = Pauses()
    gc.disable()
    try:
        monkeypatch.setattr(phase_times.time, "perf_counter", lambda: next(clock))
        gc.collect()
        gc.collect(0)
        found = watch.since_last(), watch.since_last()
        watch.close()
        watch.close()
        gc.collect()
    finally:
        gc.enable()
        monkeypatch.undo()
    assert found == (4.0, 0.0) and watch.since_last() == 0.0
    assert gc.callbacks == before
