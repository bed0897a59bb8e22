"""How many trials a cluster holds at a time, and what is missing where it holds none."""

from __future__ import annotations

from collections.abc import Sequence

from scaleray.config import RunConfig
from scaleray.errors import ClusterError
from scaleray.launch.cluster import Node, check_capacity


def check_trial_fits(config: RunConfig, nodes: Sequence[Node]) -> None:
    """Refuse trials that these nodes can never hold; Ray would wait for ever. config: of a trial. Raises ClusterError."""
    try:
        check_capacity(config, nodes)
    except ClusterError as exc:
        raise ClusterError(
            "--workers-per-trial", f"{config.scale.max_workers}, which needs {exc.found}", exc.allowed,
            exc.hint.replace("--scale.workers", "--workers-per-trial"),
        ) from exc  # fmt: skip


def num_concurrent(config: RunConfig, nodes: Sequence[Node]) -> int:
    """How many trials fit beside each other, with `data.reserved_cpus` left free; at least 1 for one that fits.

    A trial needs its workers on one node with STRICT_PACK, on as many nodes with STRICT_SPREAD, and anywhere else.
    """
    scale, workers = config.scale, config.scale.max_workers
    fitting = [n for n in nodes if all(n.labels.get(k) == v for k, v in scale.label_selector.items())]
    bundles = [_bundles(config, node) for node in fitting]
    if scale.placement == "STRICT_PACK":
        trials = sum(count // workers for count in bundles)
    elif scale.placement == "STRICT_SPREAD":
        trials = max(
            (t for t in range(1, sum(bundles) + 1) if sum(min(c, t) for c in bundles) >= t * workers), default=0
        )
    else:
        trials = sum(bundles) // workers
    cpus = sum(n.resources.get("CPU", 0.0) for n in nodes) - config.data.reserved_cpus
    by_cpu = int(cpus / (scale.cpus_per_worker * workers) + 1e-9)
    return max(1, min(trials, by_cpu))


def _bundles(config: RunConfig, node: Node) -> int:
    scale = config.scale
    by_cpu = node.resources.get("CPU", 0.0) / scale.cpus_per_worker + 1e-9
    by_gpu = node.resources.get("GPU", 0.0) / scale.gpus_per_worker + 1e-9 if scale.gpus_per_worker else float("inf")
    return int(min(by_cpu, by_gpu))
