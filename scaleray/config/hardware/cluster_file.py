"""A cluster as a YAML file: the content of `h100:8x16`, and settings that do not fit into one word.

gpu: h100
gpus_per_node: 8
num_nodes: 64
network: 8x400G
in_network: true             # switches sum all-reduces: NVLS in the node, SHARP between nodes; `node` for NVLS alone
collectives: all_reduce.txt  # output of nccl-tests on this cluster, or a list of such files; relative to this file
storage_gb_per_s: 50         # rate at which all nodes together write a checkpoint
gpu_mtbf_hours: 50000        # mean hours between two interruptions, times the number of GPUs
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from scaleray.common.parsing import load_yaml_with_lines, near_words
from scaleray.config.hardware.catalogue import CATALOGUE
from scaleray.config.hardware.cluster_text import parse_cluster
from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.config.hardware.lookup import Catalogue
from scaleray.config.hardware.measured_collectives import read_measured_tables
from scaleray.errors import ConfigError

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class ClusterFile:
    """Fields of a cluster file. Missing values are assumed as for `--cluster`, and noted; see
    `hardware_kinds.Cluster`."""

    gpu: str
    gpus_per_node: int | None = None
    """GPUs per node; None: the usual number for machines with this GPU."""
    num_nodes: int
    link: str | None = None
    network: str | None = None
    price_per_gpu_hour: float | None = None
    algorithms: tuple[str, ...] = ("ring", "tree")
    in_network: bool | Literal["none", "node", "all"] = "none"
    collectives: str | tuple[str, ...] = ()
    storage_gb_per_s: float | None = None
    gpu_mtbf_hours: float | None = None
    restart_s: float | None = None


def is_cluster_file(text: str) -> bool:
    """Whether the value of `--cluster` is a file path."""
    return text.lower().endswith(SUFFIXES)


def read_cluster_file(path: Path, catalogue: Catalogue = CATALOGUE) -> Cluster:
    """Read the cluster from a file.

    Raises ConfigError or UsageError if the file cannot be read, a field is unknown, missing or invalid, or a name is
    not in the catalogue.
    """
    fields = _fields_of(path)
    per_node = fields.gpus_per_node or catalogue.find_gpu(fields.gpu).gpus_per_node
    words = [f"{fields.gpu}:{per_node}x{fields.num_nodes}"]
    words += [f"net={fields.network}"] if fields.network else []
    words += [f"link={fields.link}"] if fields.link else []
    cluster = parse_cluster(",".join(words), catalogue)
    names = (fields.collectives,) if isinstance(fields.collectives, str) else fields.collectives
    in_network: Literal["none", "node", "all"] = "all"
    if isinstance(fields.in_network, str):
        in_network = fields.in_network
    elif not fields.in_network:
        in_network = "none"
    if in_network != "none" and cluster.link.switch_sum_gb_per_s is None and fields.gpus_per_node != 1:
        raise ConfigError(
            f"cluster file {path}: in_network",
            fields.in_network,
            f"the switches of {cluster.link.name} do not reduce, or the catalogue lacks their speed",
            "define a link with switch_sum_gb_per_s: --hardware FILE",
        )
    return dataclasses.replace(
        cluster,
        price_per_gpu_hour=fields.price_per_gpu_hour,
        algorithms=fields.algorithms,
        in_network=in_network,
        measured=tuple(table for name in names for table in read_measured_tables(path.parent / name)),
        storage_gb_per_s=fields.storage_gb_per_s,
        gpu_mtbf_hours=fields.gpu_mtbf_hours,
        restart_s=fields.restart_s,
    )


def _fields_of(path: Path) -> ClusterFile:
    try:
        content, lines = load_yaml_with_lines(path.read_text())
    except (OSError, ValueError) as exc:
        raise ConfigError("cluster file", str(path), f"it cannot be read: {exc}") from exc
    known = {one.name for one in dataclasses.fields(ClusterFile)}
    if not isinstance(content, dict):
        raise ConfigError(f"cluster file {path}", content, f"allowed fields are {', '.join(sorted(known))}")
    for name in content:
        if name not in known:
            near = near_words(str(name), known)
            raise ConfigError(
                f"cluster file {path}:{lines.get(str(name), 1)} {name}",
                content[name],
                f"allowed fields are {', '.join(sorted(known))}",
                f"did you mean {near[0]}?" if near else "",
            )
    missing = [name for name in ("gpu", "num_nodes") if name not in content]
    if missing:
        raise ConfigError(f"cluster file {path}: {missing[0]}", None, "", "for example gpu: h100, num_nodes: 16")
    try:
        return TypeAdapter(ClusterFile).validate_python(content)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = str(first["loc"][0]) if first["loc"] else ""
        at = f"{path}:{lines[where]}" if where in lines else str(path)
        raise ConfigError(f"cluster file {at} {where}", content.get(where), str(first["msg"])) from exc
