"""Several machines, each with a network address of its own: where workers go, what crosses the network, and what a lost
machine does.

The machines are namespaces of this one (`machines.py`), so that root is needed. Tests on one Ray follow each other: each
loses a machine, and the next one goes on with those that are left.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import yaml
from machines import machines
from ray_machines import SLOW, WORKLOADS, RayMachines

import scaleray

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, empty_database):
    """A Ray of three machines: a head with one CPU, and two with two, which are for workers."""
    folder = tmp_path_factory.mktemp("several")
    shutil.copy(empty_database, folder / "mlflow.db")
    with machines(3, folder) as (head, *others):
        ray = RayMachines(head, folder)
        ray.start("--num-cpus=1", "--labels=kind=head")
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda machine: ray.join(machine, "--num-cpus=2", "--labels=kind=worker"), others))
        yield ray, others


ROWS, WIDTH = 20_000, 400


@pytest.fixture(scope="module")
def sharded(cluster):
    """A training on four workers with two replicas; gives the cluster, and how much each machine of workers received."""
    ray, others = cluster
    before = [machine.received_bytes() for machine in others]
    train_sharded(ray, "sharded", ray.folder / "layout")
    return ray, others, [machine.received_bytes() - one for machine, one in zip(others, before, strict=True)]


def train_sharded(ray, name, layout):
    layout.mkdir()
    options = {**of_sharded(layout), "scale.workers": "4", "scale.label-selector": "{kind: worker}"}
    fsdp = {"strategy.name": "fsdp", "parallel.replicate": "2", "fsdp.wrap": "class", "fsdp.wrap-classes": "[Linear]"}
    process = ray.train(ray.head, name, {**options, **fsdp})
    assert process.wait(timeout=500) == 0, ray.said(name)


def of_sharded(folder):
    return {
        "workload.name": f"{WORKLOADS}:Meshed", "workload.args": f"{{rows: {ROWS}, width: {WIDTH}, folder: {folder}}}",
        "batch.global-size": "500", "optimizer.learning-rate": "0.01", "stop.after": "2 epochs",
        "precision.dtype": "fp64",
    }  # fmt: skip


def test_ranks_follow_machines_and_each_machine_holds_a_whole_replica(sharded):
    ray, others, _ = sharded
    nodes = ray.nodes_of_ranks("sharded")
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert set(nodes) == {machine.address for machine in others}
    layouts = [json.loads((ray.folder / "layout" / f"{rank}.json").read_text()) for rank in range(4)]
    # what is gathered in every step stays on a machine; gradients alone, already summed there, cross the network
    assert layouts == [{"axes": ["replicate", "shard"], "ranks": [[0, 1], [2, 3]]}] * 4


def test_replicas_on_two_machines_train_what_one_process_does(sharded, tmp_path, uri):
    ray, _, _ = sharded
    here = {"checkpoint.storage_path": str(tmp_path / "runs"), "tracking.uri": uri}
    flags = {key.replace("-", "_"): yaml.safe_load(value) for key, value in of_sharded(tmp_path).items()}
    config = scaleray.load_config(flags={**flags, **here}, environ={})
    alone = Path(scaleray.train(config, local=True).run_dir)
    ours = [float(row["loss"]) for row in ray.rows("sharded")]
    lines = (alone / "steps.csv").read_text().splitlines()
    column = lines[0].split(",").index("loss")
    assert len(ours) == 80
    np.testing.assert_allclose(
        ours, [float(line.split(",")[column]) for line in lines[1:]], rtol=1e-9
    )  # sums in another order


def test_rows_come_to_a_machine_once_for_all_its_workers_and_epochs(sharded):
    size = ROWS * WIDTH * 4
    for received in sharded[2]:
        assert size < received < 1.6 * size  # with gradients, code, and what workers tell of themselves


def test_links_that_pass_200_mbit_change_no_loss(sharded):
    ray, others, _ = sharded
    for machine in others:
        machine.limit("200mbit")
    try:
        train_sharded(ray, "limited", ray.folder / "layout of limited")
        waited = [machine.held_back() for machine in others]
    finally:
        for machine in others:
            machine.lift_limit()
    assert all(coming > 10 for coming, _ in waited), "the rows alone are more than passes at once"
    ours, unlimited = ([float(row["loss"]) for row in ray.rows(name)] for name in ("limited", "sharded"))
    assert len(ours) == 80
    np.testing.assert_allclose(ours, unlimited, rtol=1e-12)  # the same ranks add up in the same order


def test_workers_fill_one_machine_and_go_on_on_another_when_it_is_lost(cluster):
    ray, others = cluster
    options = {**SLOW, "scale.label-selector": "{kind: worker}", "scale.workers": "2"}
    process = ray.train(ray.head, "lost", options)
    saved = ray.wait_for_checkpoint(process, "lost", 40)
    live = json.loads((ray.run_folder("lost") / "live.json").read_text())
    [node] = {rank["node"] for rank in live["ranks"]}
    [lost] = [machine for machine in others if machine.address == node]
    [left] = [machine for machine in others if machine is not lost]
    lost.switch_off()
    assert process.wait(timeout=500) == 0, ray.said("lost")
    record = ray.record("lost")
    assert record["status"] == "FINISHED"
    assert saved <= record["resumed_after"][-1] < 200, "no step before the newest checkpoint is repeated"
    assert [int(row["step"]) for row in ray.rows("lost")] == list(range(1, 201)), "every step once"
    assert ray.nodes_of_ranks("lost") == [left.address] * 2
    assert node in (ray.folder / "lost.log").read_text(), "the lost machine is named"


def test_a_run_whose_driver_is_lost_with_its_machine_goes_on_from_another(cluster):
    ray, others = cluster
    # the worker is on the head, and Ray must end it there, before the next one has room
    options = {**SLOW, "scale.label-selector": "{kind: head}", "scale.workers": "1", "data.reserved-cpus": "0"}
    [driver] = [machine for machine in others if machine.is_on()][-1:]
    process = ray.train(driver, "moved", options)
    saved = ray.wait_for_checkpoint(process, "moved", 40)
    driver.switch_off()
    assert process.wait(timeout=60) != 0
    process = ray.train(ray.head, "moved", options, ["--resume", "auto"])
    assert process.wait(timeout=500) == 0, ray.said("moved")
    record = ray.record("moved")
    assert record["status"] == "FINISHED" and saved <= record["resumed_after"][-1] < 200
    assert ray.nodes_of_ranks("moved") == [ray.head.address]
    assert [int(row["step"]) for row in ray.rows("moved")] == list(range(1, 201)), "every step once"
