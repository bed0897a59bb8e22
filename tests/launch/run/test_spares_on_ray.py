"""Workers of Ray Train that are lost and replaced by spares while the others keep their state."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from test_train_on_ray import losses, settings

import scaleray

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


def final_weights(folder: str) -> list[bytes]:
    """Bytes of the final weights, in one file or in one for each worker."""
    return [path.read_bytes() for path in sorted([*Path(folder).glob("weights.pt"), *Path(folder).glob("weights/*")])]
