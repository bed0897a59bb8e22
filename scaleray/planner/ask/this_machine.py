"""The available hardware as a cluster: this machine, with the GPUs that the driver reports or else its CPUs, or the
nodes of a Ray cluster.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import psutil

from scaleray.common import nvml
from scaleray.config.hardware.hardware_kinds import Cluster, Gpu, Network
from scaleray.config.hardware.lookup import Catalogue
from scaleray.errors import ClusterError
from scaleray.records.text.units import GIB

if TYPE_CHECKING:
    from scaleray.launch.cluster.connection import Node

USUAL_NETWORK = "10G"  # of machines without GPUs, and slow rather than fast


def this_machine(catalogue: Catalogue, *, has_gpus: bool = True) -> Cluster:
    """Return this machine with the GPUs and link that the driver reports, or else with its CPUs. has_gpus: False for
    workers without GPUs. Raises ClusterError if the GPUs differ."""
    if not has_gpus:
        return _processors(catalogue, "the workers have no GPUs")
    try:
        driver = nvml.opened()
    except Exception as exc:  # no driver, or one that fails: use the processors
        return _processors(catalogue, f"no NVIDIA driver answered ({type(exc).__name__})")
    count = driver.nvmlDeviceGetCount()
    handles = [driver.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    if not handles:
        return _processors(catalogue, "the driver has no GPU")
    names = [nvml.name_of(driver, handle) for handle in handles]
    if len(set(names)) > 1:
        raise ClusterError.problem(
            "The GPUs",
            f"here must be of one type, not {', '.join(sorted(set(names)))}",
            "plan each type with --cluster",
        )
    gpu = catalogue.find_gpu(names[0])
    joined = nvml.num_nvlinks(driver, handles[0])
    # a GPU that could have NVLink but has none communicates over PCIe
    link = gpu.link if joined or not gpu.link.startswith("nvlink") else "pcie4"
    notes = (f"{count} x {names[0]}, {joined} NVLinks each", "one node: other nodes of the cluster are not counted")
    return Cluster(gpu=gpu, gpus_per_node=count, num_nodes=1, link=catalogue.find_link(link), network=None, notes=notes)


def _processors(catalogue: Catalogue, reason: str) -> Cluster:
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    known = catalogue.find_gpu("cpu")
    share = psutil.virtual_memory().total / GIB / cores
    core = Gpu(**{**known.__dict__, "memory_gib": share})
    notes = (f"{reason}: {cores} processor cores of roughly known speed; measure it with --step-time",)
    return Cluster(
        gpu=core, gpus_per_node=cores, num_nodes=1, link=catalogue.find_link(core.link), network=None, notes=notes
    )


def ray_cluster(address: str, catalogue: Catalogue, *, network: str | None = None, has_gpus: bool = True) -> Cluster:
    """Return the GPU nodes of the Ray cluster at `address`. Only this function imports Ray.

    Raises ClusterError like `cluster_of_nodes`.
    """
    from scaleray.launch.cluster.connection import joined

    with joined(address) as nodes:
        return cluster_of_nodes(nodes, catalogue, network=network, has_gpus=has_gpus)


def cluster_of_nodes(
    nodes: Sequence[Node], catalogue: Catalogue, *, network: str | None = None, has_gpus: bool = True
) -> Cluster:
    """Combine nodes with the same type and number of GPUs or, if there are none, the CPUs of all nodes. Ray reports
    neither links nor networks, so those of the usual machine are assumed, unless `network` is given. has_gpus: False
    for workers without GPUs.

    Raises ClusterError if nodes differ, or if several have no known network; UsageError for a GPU that is not in the
    catalogue.
    """
    with_gpus = [node for node in nodes if has_gpus and node.resources.get("GPU", 0) >= 1]
    kinds = Counter((_accelerator(node), int(node.resources["GPU"])) for node in with_gpus)
    if not kinds:
        return _processors_of(nodes, catalogue, network)
    if len(kinds) > 1:
        named = [f"{name}:{count}x{number}" for (name, count), number in kinds.items()]
        raise ClusterError.problem(
            "The nodes' GPUs",
            f"must be of one type and number, not {', '.join(named)}",
            "plan each type with --cluster",
        )
    (name, per_node), num_nodes = next(iter(kinds.items()))
    if not name:
        raise ClusterError.problem(
            "The type",
            f"of the {per_node} GPUs on each of {num_nodes} nodes is not reported by Ray",
            "specify them with --cluster",
        )
    gpu = catalogue.find_gpu(name)
    notes = [f"link {gpu.link}, as usual for machines with {gpu.name}: Ray does not report it"]
    notes += [f"{len(nodes) - num_nodes} nodes without GPUs are ignored"] if len(nodes) > num_nodes else []
    joined_by = _network(network, gpu.network, num_nodes, catalogue)
    if joined_by is not None and network is None:
        notes.append(f"network {gpu.network}, as usual for machines with {gpu.name}: Ray does not report it")
    return Cluster(
        gpu=gpu,
        gpus_per_node=per_node,
        num_nodes=num_nodes,
        link=catalogue.find_link(gpu.link),
        network=joined_by,
        board_gpus=max(per_node, gpu.gpus_per_node),
        notes=tuple(notes),
    )


def _accelerator(node: Node) -> str:
    """The GPU's name in the catalogue's form, since Ray writes A100-80G for 80 GB."""
    name = next((key.partition(":")[2] for key in node.resources if key.startswith("accelerator_type:")), "")
    return re.sub(r"-(\d+)G$", r"-\1GB", name or node.labels.get("ray.io/accelerator-type", ""))


def _network(said: str | None, usual: str, num_nodes: int, catalogue: Catalogue) -> Network | None:
    if num_nodes == 1:
        return None
    if not (said or usual):
        raise ClusterError.problem(
            "The network", f"between {num_nodes} nodes is unknown to Ray", "add --network 100G, or 8x400G"
        )
    return catalogue.find_network(said or usual)


def _processors_of(nodes: Sequence[Node], catalogue: Catalogue, network: str | None) -> Cluster:
    counts = Counter(int(node.resources.get("CPU", 0)) for node in nodes)
    counts.pop(0, None)
    if len(counts) != 1:
        raise ClusterError.problem(
            "The nodes",
            "have no GPUs and differ in processor cores: "
            + (", ".join(f"{count} on {number} of them" for count, number in counts.items()) or "Ray reports none"),
            "plan each type with --cluster",
        )
    (cores, num_nodes), known = next(iter(counts.items())), catalogue.find_gpu("cpu")
    share = min(node.resources.get("memory", 0.0) for node in nodes if node.resources.get("CPU", 0) >= 1) / GIB / cores
    core = Gpu(**{**known.__dict__, "memory_gib": share or known.memory_gib})
    notes = (
        f"no node has a GPU: {cores} processor cores each, whose speed is known only to an order of magnitude;  "
        "measure with --step-time",
        *([f"network {USUAL_NETWORK}, since Ray does not report it"] if network is None and num_nodes > 1 else []),
    )
    return Cluster(
        gpu=core,
        gpus_per_node=cores,
        num_nodes=num_nodes,
        link=catalogue.find_link(core.link),
        network=_network(network, USUAL_NETWORK, num_nodes, catalogue),
        notes=notes,
    )
