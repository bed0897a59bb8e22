"""Request the nodes that a cluster starts on demand, and wait for them before a run, up to a deadline."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scaleray.common.progress import stage
from scaleray.config import RunConfig
from scaleray.errors import ClusterError
from scaleray.launch.cluster.capacity import check_capacity, check_option_fits, num_workers_possible
from scaleray.launch.cluster.connection import Node, alive_nodes

LOOK_S = 2.0


def nodes_for(config: RunConfig, *, option: str = "", look: Callable[[], list[Node]] = alive_nodes) -> list[Node]:
    """Return the nodes of the connected cluster once they can hold the run, or at once if `scale.wait_for_nodes_s` is
    0.

    option: command-line option that gives the number of workers, if the config does not. look: returns the living
    nodes. Raises ClusterError at the deadline, naming the nodes found."""
    nodes, wait_s = look(), config.scale.wait_for_nodes_s
    if not wait_s or _missing(config, nodes, option) is None:
        return nodes
    deadline, needed = time.monotonic() + wait_s, config.scale.min_workers
    with (
        _asking_for(config),
        stage("waiting for nodes of the cluster", total=needed, unit="workers have room") as shown,
    ):
        while (missing := _missing(config, nodes, option)) is not None:
            shown.done = min(needed, num_workers_possible(config, nodes))
            shown.note = f"{len(nodes)} node{'s' if len(nodes) != 1 else ''} up"
            if time.monotonic() > deadline:
                raise ClusterError(
                    missing.what,
                    missing.found,
                    f"{missing.allowed} after {wait_s:g} s of waiting (scale.wait_for_nodes_s)",
                    f"{missing.hint}; to see how the cluster tries to get nodes: ray status --address ADDRESS",
                ) from missing
            time.sleep(LOOK_S)
            nodes = look()
    return nodes


def _missing(config: RunConfig, nodes: Sequence[Node], option: str) -> ClusterError | None:
    try:
        check_option_fits(option, config, nodes) if option else check_capacity(config, nodes)
    except ClusterError as exc:
        return exc
    return None


def bundles_of(config: RunConfig) -> list[dict[str, Any]]:
    """Resource bundles to request from Ray's autoscaler, for the workers and for the input."""
    scale = config.scale
    more = [{"CPU": config.data.reserved_cpus}] if config.data.reserved_cpus else []
    if scale.placement == "STRICT_PACK":  # as one, that must find room on one node
        return [{name: amount * scale.min_workers for name, amount in _of_a_worker(config).items()}, *more]
    return [_of_a_worker(config) for _ in range(scale.max_workers + config.recovery.spares)] + more


def _of_a_worker(config: RunConfig) -> dict[str, Any]:
    scale = config.scale
    return {"CPU": scale.cpus_per_worker, **({"GPU": scale.gpus} if scale.gpus else {})}


@contextlib.contextmanager
def _asking_for(config: RunConfig) -> Iterator[None]:
    """Request the run's resources from the cluster's autoscaler, if any, until the run's own workers request them."""
    from ray.autoscaler.sdk import request_resources

    bundles, labels = bundles_of(config), dict(config.scale.label_selector)
    num_workers = len(bundles) - bool(config.data.reserved_cpus)
    selectors = [labels] * num_workers + [{}] * (len(bundles) - num_workers)
    request_resources(bundles=bundles, **({"bundle_label_selectors": selectors} if labels else {}))
    with _apart(config, labels):
        try:
            yield
        finally:
            request_resources(bundles=[])


@contextlib.contextmanager
def _apart(config: RunConfig, labels: dict[str, str]) -> Iterator[None]:
    """Request one node per worker under STRICT_SPREAD, since one large node could satisfy a plain resource request."""
    if config.scale.placement != "STRICT_SPREAD":
        yield
        return
    from ray.util import placement_group, remove_placement_group

    bundles = [_of_a_worker(config) for _ in range(config.scale.min_workers)]
    selectors = {"bundle_label_selector": [labels] * len(bundles)} if labels else {}
    group = placement_group(bundles, strategy="STRICT_SPREAD", **selectors)
    try:
        yield
    finally:
        remove_placement_group(group)
