"""Machines of which one is slow in computing and another one behind a slow link: what doctor says of the whole cluster."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from machines import machines
from ray_machines import RayMachines

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

WITHOUT_VECTORS = {"MKL_CBWR": "COMPATIBLE"}
"""Matrix products of a node take the instructions that every processor has: an eighth of the speed on one with AVX-512."""


def test_a_slow_node_and_a_slow_link_are_named_each_by_its_check_and_nothing_else_is_red(tmp_path):
    with machines(3, tmp_path) as [head, slow, behind]:
        ray = RayMachines(head, tmp_path)
        ray.start("--num-cpus=1")
        joins = [(slow, WITHOUT_VECTORS), (behind, {})]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda one: ray.join(one[0], "--num-cpus=1", **one[1]), joins))
        behind.limit("20mbit")
        words = ["doctor", "--address", ray.address, "--storage", str(tmp_path / "runs"), "--json"]
        process = ray.scaleray(head, "doctor", *words, "--uri", f"sqlite:///{tmp_path}/mlflow.db")
        code = process.wait(timeout=400)
    text = (tmp_path / "doctor.log").read_text()
    record, _ = json.JSONDecoder().raw_decode(text, text.index("{\n"))  # below what it says while it works
    checks = {check["name"]: check for check in record["checks"]}
    for check in checks.values():
        print(f"{check['verdict']}: {check['name']}: {check['found']}")
    print(f"doctor took {record['duration_s']:.1f} s")
    red = {name for name, check in checks.items() if check["verdict"] == "red"}
    products, links = checks["matrix products"], checks["links between nodes"]
    # how red a slow node is depends on what else wants the cores of this machine
    assert code == 1 and "links between nodes" in red and red <= {"matrix products", "links between nodes"}
    assert products["verdict"] != "green" and f"slow: a core of {slow.address}" in products["found"]
    assert f"slow: {behind.address} to all others" in links["found"]
    assert slow.address not in links["found"] and behind.address not in products["found"]
