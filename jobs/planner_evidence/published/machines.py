"""The machine that a published row ran on, from what its source says of it."""

from __future__ import annotations

import re
from typing import Any

from jobs.planner_evidence.published.fields import number, text, whole
from scaleray.config.hardware.catalogue import CATALOGUE
from scaleray.config.hardware.hardware_kinds import Cluster, Gpu, Network
from scaleray.errors import ConfigError


def cluster_of(hardware: dict[str, Any], *, num_gpus: int | None = None) -> Cluster:
    """The cluster of a row, from `gpu`, `gpus`, `gpus_per_node` and what is said about the network.

    Raises ConfigError where too little is said.
    """
    name = text(hardware, "gpu", "accelerator")
    if not name:
        raise ConfigError("hardware.gpu", None, "a row must name its GPU")
    gpu = CATALOGUE.find_gpu(name)
    if (
        gpu.name.startswith("v100")
        and "ethernet" in str(hardware.get("inter_node", "")).lower()
        and not hardware.get("intra_node")
    ):
        # machines with V100 and plain Ethernet are the cloud's, without NVLink unless it is named
        gpu = CATALOGUE.find_gpu("v100-pcie")
    size = whole(hardware, "gpus_per_node")
    nodes = whole(hardware, "nodes")
    gpus = (
        num_gpus
        or whole(hardware, "gpus", "num_gpus", "chips")
        or (nodes * (size or gpu.gpus_per_node) if nodes else 0)
    )
    if not gpus:
        raise ConfigError("hardware.gpus", None, "a row must say how many GPUs it used")
    usual = gpu.gpus_per_node
    if gpu.name.startswith("tpu"):
        # chips of a TPU slice are all joined by the same links, whatever hosts they sit on
        size = gpus // (whole(hardware, "slices", "num_slices") or 1) or 1
        size = min(size, gpu.gpus_per_node)
    if gpu.name == "mi250x" and size == 8:
        gpu = CATALOGUE.find_gpu("mi250x-gcd")  # a node has four packages: eight are dies
    per_node = min(gpus, size or usual)
    if size is None and gpus % per_node:
        # the GPUs are a part of each rack, the same of all: 64 of 72 GPUs that NVLink joins
        per_node = next(width for width in range(per_node, 0, -1) if gpus % width == 0)
    num_nodes = -(-gpus // per_node)
    network = network_of(hardware, gpu, per_node) if num_nodes > 1 else None
    return Cluster(
        gpu=gpu,
        gpus_per_node=per_node,
        num_nodes=num_nodes,
        link=link_of(hardware, gpu),
        network=network,
        board_gpus=int(size or gpu.gpus_per_node),
    )


def link_of(hardware: dict[str, Any], gpu: Gpu) -> Any:
    """The GPU's usual link, unless the row says that it sits on PCIe."""
    said = text(hardware, "intra_node").lower()
    if (
        "pcie" in said
        and "nvlink" not in said.replace("no nvlink", "")
        and CATALOGUE.find_link(gpu.link).name[:4] != "pcie"
    ):
        return CATALOGUE.find_link("pcie4" if "bf16" in gpu.peak_tflops else "pcie3")
    return CATALOGUE.find_link(gpu.link)


def network_of(hardware: dict[str, Any], gpu: Gpu, gpus_per_node: int) -> Network:
    """The network of a row, from gigabits where they are given, else from what the text names, else the GPU's usual
    network."""
    said = text(hardware, "inter_node")
    measured = re.search(r"measured (\d+(?:\.\d+)?) to (\d+(?:\.\d+)?) GB/s", said)
    if measured:
        return Network(name=said, gb_per_s=(float(measured[1]) * float(measured[2])) ** 0.5, transport="measured")
    effective = number(hardware, "effective_inter_node_gbit")
    if effective:
        return Network(name=said, gb_per_s=effective / 8, transport="measured")
    board = whole(hardware, "gpus_per_node") or gpu.gpus_per_node
    gbit = number(hardware, "inter_node_gbit_per_node", "inter_node_gbit")
    per_gpu = number(hardware, "inter_node_gbit_per_gpu")
    if gbit is None and per_gpu:
        gbit = per_gpu * board
    words = said.lower()
    is_rdma = any(word in words for word in ("infiniband", "roce", "rdma", "omni-path", "slingshot"))
    transport = (
        "efa" if "efa" in words else "tcp" if "tcp" in words or ("ethernet" in words and not is_rdma) else "rdma"
    )
    if gbit is None:
        gbit = _gbit_in(said)
        if gbit is not None and re.search(r"per (gpu|chip|accelerator)", words):
            gbit *= board
    if gbit is None and "low bandwidth" in words:
        raise ConfigError("hardware.inter_node", said, "its speed must be given")
    if gbit is None:
        if not gpu.network:
            raise ConfigError("hardware.inter_node", said or None, f"it must be given, {gpu.name} has no usual network")
        usual = CATALOGUE.find_network(gpu.network)
        return Network(
            name=gpu.network, gb_per_s=usual.gb_per_s * min(1.0, gpus_per_node / gpu.gpus_per_node), transport=transport
        )
    return Network(name=said or f"{gbit}G", gb_per_s=float(gbit) / 8, transport=transport)


def _gbit_in(said: str) -> float | None:
    """Gigabits a second that a text names: `4 x 200 Gb/s`, `8x400G`, `3.2 Tb/s`, `100 GbE`, `50 GB/s`."""
    unit = r"(?:Gb/s|Gbps|Gbit/s|GbE|G)\b"
    many = re.search(rf"(\d+) ?x ?(\d+) ?{unit}", said)
    if many:
        return float(int(many[1]) * int(many[2]))
    for pattern, factor in (
        (r"(\d+(?:\.\d+)?) ?(?:Tb/s|Tbps)", 1000.0),
        (rf"(\d+(?:\.\d+)?) ?{unit}", 1.0),
        (r"(\d+(?:\.\d+)?) ?GB/s", 8.0),
    ):
        found = re.search(pattern, said)
        if found and float(found[1]) > 0:
            return float(found[1]) * factor
    return None


def placed_cluster(hardware: dict[str, Any], placement: str) -> Cluster:
    """The part of the machine that a scheduler gave: `134` are 1, 3 and 4 GPUs on three nodes.

    A ring crosses each node's network once however uneven the nodes are, so even nodes of the mean size stand for them.
    """
    counts = [int(digit) for digit in placement]
    if not counts or not all(counts):
        raise ConfigError("placement", placement, "it must be the number of GPUs on each node, one digit for each")
    gpu = CATALOGUE.find_gpu(text(hardware, "gpu"))
    num_nodes = len(counts)
    per_node = -(-sum(counts) // num_nodes)
    network = network_of(hardware, gpu, per_node) if num_nodes > 1 else None
    return Cluster(
        gpu=gpu,
        gpus_per_node=per_node,
        num_nodes=num_nodes,
        link=link_of(hardware, gpu),
        network=network,
        board_gpus=whole(hardware, "gpus_per_node") or gpu.gpus_per_node,
    )


def system_of(text: str) -> tuple[dict[str, Any], int]:
    """`DGX-1 (8x V100 16GB)` as the fields of a row's hardware, and the GPUs of one such machine."""
    match = re.search(r"(\d+)x ([A-Z]+\d+ \d+GB)", text)
    if match is None:
        raise ConfigError("hardware.system", text, "it must name the GPUs, as in `DGX-1 (8x V100 16GB)`")
    network = {"DGX-1": 400, "DGX-2": 800, "DGX-2H": 800, "DGX A100": 1600}.get(text.split(" (")[0].strip(), 800)
    hardware = {
        "gpu": match[2],
        "gpus_per_node": int(match[1]),
        "inter_node": "InfiniBand",
        "inter_node_gbit_per_node": network,
    }
    return hardware, int(match[1])
