"""A cluster as short text: `h100:8x16`, `a100-80:8x64,net=200G`, `v100:4x2,net=10G-tcp,link=pcie3,price=2.5`."""

import re
from dataclasses import replace

from scaleray.config.hardware.catalogue import CATALOGUE
from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.config.hardware.lookup import Catalogue
from scaleray.errors import ConfigError

FORM = "it must be GPU:PERNODExNODES, as in h100:8x16 or a100-80:8x64,net=200G"


def parse_cluster(text: str, catalogue: Catalogue = CATALOGUE) -> Cluster:
    """Parse a cluster's text. Missing values are assumed and noted. Raises ConfigError or UsageError."""
    head, *options = [part.strip() for part in text.split(",")]
    match = re.fullmatch(r"(?P<gpu>[^:]+?)(?::(?P<per_node>\d+)(?:x(?P<nodes>\d+))?)?", head)
    if match is None:
        raise ConfigError("--cluster", text, FORM)
    gpu = catalogue.find_gpu(match["gpu"])
    notes: list[str] = []
    per_node = int(match["per_node"] or gpu.gpus_per_node)
    num_nodes = int(match["nodes"] or 1)
    if match["per_node"] and not match["nodes"] and per_node > gpu.gpus_per_node and per_node % gpu.gpus_per_node == 0:
        # h100:64 is eight nodes of eight
        per_node, num_nodes = gpu.gpus_per_node, per_node // gpu.gpus_per_node
        notes.append(f"{num_nodes} nodes of {per_node}, as usual for machines with {gpu.name}")
    values: dict[str, str] = {}
    for option in options:
        key, sign, value = option.partition("=")
        if not sign or key not in ("net", "link", "price"):
            raise ConfigError("--cluster", option, "only net=, link= and price= may follow the GPUs")
        values[key] = value
    link = catalogue.find_link(values.get("link", gpu.link))
    network = None
    if num_nodes > 1:
        if "net" not in values and not gpu.network:
            raise ConfigError(
                "--cluster",
                text,
                f"{num_nodes} nodes need a network, and {gpu.name} has no default",
                "add net=100G, or net=8x400G",
            )
        if "net" not in values:
            notes.append(f"network {gpu.network}, as usual for machines with {gpu.name}")
        network = catalogue.find_network(values.get("net", gpu.network))
    price = None
    if "price" in values:
        try:
            price = float(values["price"])
        except ValueError:
            raise ConfigError("--cluster", f"price={values['price']}", "it must be a price per GPU and hour") from None
    cluster = Cluster(
        gpu=gpu,
        gpus_per_node=per_node,
        num_nodes=num_nodes,
        link=link,
        network=network,
        price_per_gpu_hour=price,
        board_gpus=max(per_node, gpu.gpus_per_node),
    )
    return replace(cluster, notes=tuple(notes))
