"""`scaleray plan --here --address` on a real Ray cluster."""

import json

import pytest

from scaleray.cli.main import run_command

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def test_the_nodes_of_a_running_cluster_are_planned_on(ray_session, capsys):
    import ray

    cores = sum(int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"])
    words = [
        "plan",
        "--model",
        "resnet-18",
        "--here",
        "--address",
        ray_session.address,
        "--precision",
        "fp32",
        "--json",
    ]
    words += ["--global-batch", str(16 * cores)]
    code = run_command(words)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    record = json.loads(captured.out)
    assert record["gpu"] == "cpu" and record["num_gpus"] == cores
