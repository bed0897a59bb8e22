"""Workers of Ray Train that are lost and replaced by spares while the others keep their state."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path

import psutil
import pytest
from test_train_on_ray import losses, settings
from waiting import wait_until

import scaleray
from scaleray.checkpoints.memory_store import MemoryStore
from scaleray.training.recovery import node_holders

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("mlflow_database")]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_spare_takes_the_place_of_a_lost_worker(strategy, ray_session, tmp_path):
    common = {"scale.workers": 2, "recovery.spares": 1, "deterministic": True, "strategy.name": strategy}
    if strategy == "fsdp":
        common["checkpoint.memory"] = {"every": "1 step", "copies": 1}
    plain = scaleray.train(settings(tmp_path / "plain", "Failing", **common, **{"workload.args.at_call": 0}))
    marker = tmp_path / "was_killed"
    fault = {"how": "kill", "at_call": 8, "marker": str(marker)}
    arguments = {f"workload.args.{name}": value for name, value in fault.items()}
    found = scaleray.train(settings(tmp_path / "disturbed", "Failing", **common, **arguments))
    assert marker.exists()
    assert losses(found) == losses(plain)
    with open(Path(found.run_dir) / "steps.csv", newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, 13))
    weights = [final_weights(record.run_dir) for record in (plain, found)]
    assert weights[0] == weights[1] and weights[0]
    assert any("other workers took over" in event for event in found.events)
    assert not any("from the newest checkpoint" in event for event in found.events)


def test_a_holder_whose_process_is_lost_has_a_successor_at_its_address(ray_session, tmp_path, monkeypatch):
    monkeypatch.setattr("scaleray.checkpoints.memory_store.RETRY_S", 0.0)
    place = node_holders.holder_here(str(tmp_path), label="node")
    try:
        store = node_holders.stores_of(str(tmp_path))[0]
        store.reserve("a worker", 100)
        store.write("before", [b"1"])
        os.kill(
            next(c.pid for c in psutil.net_connections("tcp") if c.laddr.port == place.port and c.status == "LISTEN"),
            signal.SIGKILL,
        )
        wait_until(lambda: writes(store, "after"), seconds=60)
        assert store.names() == ["after"]
        assert node_holders.other_holders(str(tmp_path)) == [place]
    finally:
        node_holders.end_holders(str(tmp_path))


def writes(store: MemoryStore, name: str) -> bool:
    """Whether a store accepts a file."""
    try:
        store.write(name, [b"2"])
    except OSError:
        return False
    return True


def final_weights(folder: str) -> list[bytes]:
    """Bytes of the final weights, in one file or in one for each worker."""
    return [path.read_bytes() for path in sorted([*Path(folder).glob("weights.pt"), *Path(folder).glob("weights/*")])]
