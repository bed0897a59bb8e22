"""`scaleray plan --here --address`: the nodes of a Ray cluster as the planner's cluster."""

import pytest

from scaleray.cli.main import run_command
from scaleray.config.hardware.catalogue import CATALOGUE
from scaleray.errors import ClusterError, UsageError
from scaleray.launch.cluster.connection import Node
from scaleray.planner.ask.this_machine import cluster_of_nodes

HEAD = Node("10.0.0.1", {"CPU": 8.0, "memory": 2.0**34}, {})


def gpu_node(number, name="H100", count=8):
    return Node(f"10.0.1.{number}", {"CPU": 96.0, "GPU": float(count), f"accelerator_type:{name}": 1.0}, {})


def test_gpu_nodes_are_counted_and_what_ray_does_not_know_is_noted():
    cluster = cluster_of_nodes([HEAD, *(gpu_node(number) for number in range(4))], CATALOGUE)
    assert (cluster.gpu.name, cluster.gpus_per_node, cluster.num_nodes, cluster.network.gb_per_s) == ("h100", 8, 4, 400)
    assert any("1 nodes without GPUs" in note for note in cluster.notes) and any(
        "network" in note for note in cluster.notes
    )
    said = cluster_of_nodes([gpu_node(0), gpu_node(1)], CATALOGUE, network="100G")
    assert said.network.gb_per_s == 12.5 and not any("network" in note for note in said.notes)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("A100-40G", "a100-40"),
        ("A100-80G", "a100-80"),
        ("A100", "a100-80"),
        ("L40S", "l40s"),
        ("T4", "t4"),
        ("AMD-Instinct-MI300X-OAM", "mi300x"),
    ],
)
def test_rays_names_are_the_catalogues(name, gpu):
    assert cluster_of_nodes([gpu_node(0, name)], CATALOGUE).gpu.name == gpu


def test_a_label_names_the_gpu_where_no_resource_does():
    node = Node("10.0.1.1", {"CPU": 8.0, "GPU": 2.0}, {"ray.io/accelerator-type": "H200"})
    assert cluster_of_nodes([node], CATALOGUE).gpu.name == "h200"


def test_nodes_without_gpus_are_their_processors():
    cluster = cluster_of_nodes([HEAD], CATALOGUE)
    assert (cluster.gpu.name, cluster.num_gpus, cluster.gpu.memory_gib) == ("cpu", 8, 2.0)
    several = cluster_of_nodes([HEAD, HEAD], CATALOGUE)
    assert several.network.gb_per_s == 1.25 and any("network 10G" in note for note in several.notes)
    assert cluster_of_nodes([gpu_node(0)], CATALOGUE, has_gpus=False).gpu.name == "cpu"


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([gpu_node(0), gpu_node(1, "A100-80G")], "H100:8x1, A100-80GB:8x1"),
        ([gpu_node(0), gpu_node(1, count=4)], "one type and number"),
        ([gpu_node(0, "H9000")], "nearest|known"),
        ([Node("a", {"GPU": 4.0, "CPU": 8.0}, {})], "specify them with --cluster"),
        ([gpu_node(0, "A10"), gpu_node(1, "A10")], "--network"),
        ([HEAD, Node("b", {"CPU": 4.0}, {})], "8 on 1 of them, 4 on 1 of them"),
        ([], "none"),
    ],
)
def test_nodes_that_make_no_cluster_are_one_message(nodes, says):
    with pytest.raises((ClusterError, UsageError), match=says):
        cluster_of_nodes(nodes, CATALOGUE)


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--cluster", "h100:8", "--address", "auto"], "--here"), (["--here", "--network", "100G"], "--address")],
)
def test_options_that_would_have_no_effect_are_refused(capsys, words, says):
    assert run_command(["plan", "--model", "gpt2", *words]) == 2
    assert says in capsys.readouterr().err
