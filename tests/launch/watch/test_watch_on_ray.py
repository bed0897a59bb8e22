"""A run of a cluster as its recorder tells of it, while it trains."""

import contextlib

import pytest
from test_train_on_ray import settings

import scaleray
from scaleray.launch.watch import find
from scaleray.records.run_record import StepRecord


@pytest.fixture
def stack():
    """What holds connections that a look has made."""
    with contextlib.ExitStack() as made:
        yield made


pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("mlflow_database")]


@pytest.mark.combination
def test_a_run_that_trains_is_found_in_its_cluster_and_ends_as_its_folder_says(
    ray_session, tmp_path, monkeypatch, stack
):
    monkeypatch.setenv("RAY_ADDRESS", ray_session.address)
    monkeypatch.setenv("SCALERAY_CHECKPOINT__STORAGE_PATH", str(tmp_path / "not-there"))  # not found by its folder
    config = settings(
        tmp_path, "Slow", **{"workload.args": {"seconds": 0.3}, "scale.workers": 2, "tracking.run_name": "watched"}
    )
    watched, seen = [], []

    def look(messages):
        if any(isinstance(message, StepRecord) for message in messages):
            if not watched:
                watched.append(find.find_watched("watched", stack))
            seen.append(watched[0].look())

    record = scaleray.train(config, show=look)
    assert watched[0].where == f"cluster {ray_session.address}"
    assert {(state.run_id, state.total_steps, state.workers) for state in seen} == {(record.run_id, 12, 2)}
    assert seen[0].status == "RUNNING" and 1 <= seen[0].step <= 12 and [rank.rank for rank in seen[0].ranks] == [0, 1]
    last = watched[0].look()
    assert (last.status, last.step, last.verdict) == ("FINISHED", 12, "done")
