"""Capacity for a study's workers: cores, Ray's CPUs, hardware, and the sizes that fit."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from scaleray.common.printed import quantity
from scaleray.config import RunConfig
from scaleray.config.hardware.catalogue import find_gpu
from scaleray.errors import ClusterError, UsageError
from scaleray.launch.cluster import connection as cluster
from scaleray.launch.cluster.awaited_nodes import nodes_for
from scaleray.launch.cluster.capacity import check_option_fits
from scaleray.launch.cluster.connection import Node
from scaleray.records.study_record import Repeat
from scaleray.studies.measure_sizes import StudySize

OVERSUBSCRIBED, RELAUNCHED = "oversubscribed", "relaunched"
"""Marks of points."""


def nodes_of(config: RunConfig, sizes: Sequence[int], workload: Any, *, oversubscribe: bool) -> list[Node]:
    """Nodes of the connected cluster. With `scale.wait_for_nodes_s`, waits until the largest number of workers fits, or
    the smallest if workers may share cores. Raises ClusterError at the deadline."""
    workers = max(sizes)
    if config.scale.wait_for_nodes_s and (oversubscribe or sleeps(workload)):
        workers = min(sizes)
    asked = config.changed({"scale.workers": workers})
    return nodes_for(asked, option="--world-sizes")


def topology_of(config: RunConfig, nodes: Sequence[Node] | None) -> dict[str, Any]:
    """Nodes and start method of workers, for the conditions. nodes: the cluster's nodes; None without Ray. Addresses
    are omitted, since they change when a cluster restarts but measurements do not."""
    if nodes is None:
        return {
            "launch": "gloo processes",
            "nodes": [{"cpus": psutil.cpu_count() or 1, "gpus": 0, "accelerator": None}],
        }
    found = [{k: v for k, v in node.items() if k != "node"} for node in cluster.topology(nodes)]
    return {
        "launch": "Ray Train",
        "nodes": sorted(found, key=str),
        "placement": config.scale.placement,
        "label_selector": dict(config.scale.label_selector),
    }


def num_cores(nodes: Sequence[Node] | None) -> int:
    """Cores of this machine, or Ray's CPUs of all nodes, which may exceed this machine's cores."""
    here = psutil.cpu_count() or 1
    if nodes is None:
        return here
    addresses = {address.address for found in psutil.net_if_addrs().values() for address in found}
    return sum(
        min(int(n.resources.get("CPU", 0)), here) if n.address in addresses else int(n.resources.get("CPU", 0))
        for n in nodes
    )


def workers_per_node(config: RunConfig, nodes: Sequence[Node] | None) -> int:
    """Number of workers that fit on the largest node; more workers communicate over a network."""
    scale = config.scale
    if nodes is None:
        return max(1, int((psutil.cpu_count() or 1) / scale.cpus_per_worker))
    kind, needed = ("GPU", scale.gpus) if scale.gpus else ("CPU", scale.cpus_per_worker)
    return max(1, max(int(node.resources.get(kind, 0.0) / needed) for node in nodes))


@dataclass(frozen=True)
class Room:
    """Sizes of a study that fit. sizes: the numbers of workers to measure. shares_cores: whether the largest one has
    fewer cores than workers. left_out: sentence on sizes that are not measured, or empty."""

    sizes: list[int]
    shares_cores: bool
    left_out: str = ""


def find_room(
    config: RunConfig, sizes: Sequence[int], workload: Any, nodes: Sequence[Node] | None, *, oversubscribe: bool
) -> Room:
    """Select sizes with a core for each worker. Others are measured only on request or if the workload only sleeps,
    since workers that share cores measure the machine's scheduler. Raises ClusterError if fewer than two sizes remain,
    too few for a curve."""
    cores, ordered = num_cores(nodes), sorted(sizes)
    if config.scale.gpus or ordered[-1] <= cores:
        return Room(ordered, False)
    if oversubscribe or sleeps(workload):
        return Room(ordered, True)
    kept, more = [n for n in ordered if n <= cores], [n for n in ordered if n > cores]
    has = f"{'this machine' if nodes is None else 'the cluster'} has {quantity(cores, 'core')}"
    reason = f"{has}, and workers that share a core give no valid measurement"
    ways_out = (
        "an emulated accelerator (scaleray.emulation) rehearses more; "
        "--oversubscribe measures them anyway and marks every value"
    )
    if len(kept) < 2:
        raise ClusterError("--world-sizes", more[-1], reason, f"use up to {cores} workers; {ways_out}")
    counts = f"{', '.join(map(str, more[:-1]))} and {more[-1]}" if len(more) > 1 else str(more[0])
    return Room(kept, False, f"Refused: {counts} workers, as {reason}; {ways_out}.")


def sleeps(workload: Any) -> bool:
    """Whether the workload's model is an emulated accelerator."""
    import torch

    from scaleray.emulation import is_emulated
    from scaleray.workload import call_user_code

    try:
        with torch.device("meta"):  # needs no memory; not every workload's code knows it
            return is_emulated(workload.build_model())
    except (Exception, SystemExit):
        return is_emulated(call_user_code(workload.build_model, what="build_model()", doing="building the model"))


def launch_config(config: RunConfig, room: Room, nodes: Sequence[Node] | None) -> RunConfig:
    """The config for launching the largest group of workers. nodes: the cluster's nodes; None without Ray. Raises
    ClusterError if the cluster can never hold it."""
    if nodes is None:
        return config
    workers = room.sizes[-1]
    scale: dict[str, Any] = {"scale.workers": workers, "scale.max_failures": 0}
    if room.shares_cores:
        cpus = sum(n.resources.get("CPU", 0.0) for n in nodes) - config.data.reserved_cpus
        if 0 < cpus < workers * config.scale.cpus_per_worker:
            scale["scale.cpus_per_worker"] = max(0.01, int(100 * cpus / workers) / 100)
    spread = config.changed(scale)
    where = "without GPUs: --scale.gpus-per-worker 0" if config.scale.gpus else "only on this machine with --local"
    check_option_fits("--world-sizes", spread, nodes, hint=f"omit the size, or measure {where}")
    return spread


def check_one_kind(study_sizes: Iterable[StudySize]) -> None:
    """Refuse sizes that were measured on different hardware, as separate launches may be. Raises ClusterError."""
    kinds = {size.name: size.turns[-1].hardware for size in study_sizes if size.turns}
    distinct = {json.dumps(kind, sort_keys=True): name for name, kind in kinds.items()}
    if len(distinct) > 1:
        (first, one), (second, other), *_ = distinct.items()
        raise ClusterError.problem(
            "the workers' hardware",
            f"differs: {first} for {one}, {second} for {other}; all points of a curve must be measured on the "
            "same hardware",
            "choose the nodes with scale.label_selector",
        )


def peak_flops(config: RunConfig, turns: Sequence[Repeat]) -> float | None:
    """Dense peak of one worker's device in FLOP/s, from the config or from the catalogue; None if neither has it."""
    if config.study.peak_tflops is not None:
        return config.study.peak_tflops * 1e12
    names = [
        name for turn in turns for kind in turn.hardware for name in (kind.get("accelerators") or {}).get("names", ())
    ]
    precision = "tf32" if config.precision.tf32 and config.precision.dtype == "fp32" else config.precision.dtype
    if not names or not config.scale.gpus or precision == "fp64":
        return None
    try:
        return find_gpu(names[0]).peak_flops(precision)
    except UsageError:
        return None
