"""Nodes that a cluster starts when somebody asks for them: asked for and waited for before a run, up to a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from scaleray.config import RunConfig
from scaleray.errors import ClusterError
from scaleray.launch.cluster.capacity import check_capacity, check_option_fits, num_workers_possible
from scaleray.launch.cluster.connection import Node, alive_nodes
from scaleray.progress import stage

LOOK_S = 2.0


def nodes_for(config: RunConfig, *, option: str = "", look: Callable[[], list[Node]] = alive_nodes) -> list[Node]:
    """The nodes of the connected cluster, as soon as they can hold the run; at once where `scale.wait_for_nodes_s` is
    0, whether they can or not.

    option: where the number of workers was given, if not in the config. look: gives the nodes that are alive. Raises
    ClusterError at the deadline, with what there is then.
    """
    nodes, wait_s = look(), config.scale.wait_for_nodes_s
    if not wait_s or _missing(config, nodes, option) is None:
        return nodes
    deadline = time.monotonic() + wait_s
    _ask_for(config)
    try:
        needed = config.scale.min_workers
        with stage("waiting for nodes of the cluster", total=needed, unit="workers have room") as shown:
            while (missing := _missing(config, nodes, option)) is not None:
                shown.done = min(needed, num_workers_possible(config, nodes))
                shown.note = f"{len(nodes)} node{'s' if len(nodes) != 1 else ''} up"
                if time.monotonic() > deadline:
                    raise ClusterError(
                        missing.what,
                        missing.found,
                        f"{missing.allowed} after {wait_s:g} s of waiting (scale.wait_for_nodes_s)",
                        f"{missing.hint}; what the cluster does to get nodes: ray status --address ADDRESS",
                    ) from missing
                time.sleep(LOOK_S)
                nodes = look()
    finally:
        _ask_for(None)  # from now on the run's own workers ask
    return nodes


def _missing(config: RunConfig, nodes: Sequence[Node], option: str) -> ClusterError | None:
    try:
        check_option_fits(option, config, nodes) if option else check_capacity(config, nodes)
    except ClusterError as exc:
        return exc
    return None


def bundles_of(config: RunConfig) -> list[dict[str, Any]]:
    """What Ray's autoscaler is asked for: the workers' resources, and those of the input."""
    scale = config.scale
    worker = {"CPU": scale.cpus_per_worker, **({"GPU": scale.gpus} if scale.gpus else {})}
    more = [{"CPU": config.data.reserved_cpus}] if config.data.reserved_cpus else []
    return [dict(worker) for _ in range(scale.max_workers)] + more


def _ask_for(config: RunConfig | None) -> None:
    """Ask the cluster's autoscaler, where it has one, for what the run needs; None takes the question back."""
    from ray.autoscaler.sdk import request_resources

    if config is None:
        request_resources(bundles=[])
        return
    bundles = bundles_of(config)
    labels = dict(config.scale.label_selector)
    if labels:
        selectors = [labels] * config.scale.max_workers + [{}] * (len(bundles) - config.scale.max_workers)
        request_resources(bundles=bundles, bundle_label_selectors=selectors)
    else:
        request_resources(bundles=bundles)
