"""Check whether a cluster can hold a run, and how many trials fit at once; name the missing resources if none fits."""

from collections.abc import Sequence

from scaleray.common.printed import quantity
from scaleray.config import RunConfig
from scaleray.config.scale import ScaleSettings
from scaleray.errors import ClusterError
from scaleray.launch.cluster.connection import Node


def check_capacity(config: RunConfig, nodes: Sequence[Node]) -> None:
    """Refuse a run that these nodes can never hold, for which Ray would wait forever. Raises ClusterError.

    The run needs `workers` bundles of CPUs and GPUs on nodes with the right labels, and CPUs for the input."""
    scale = config.scale
    spares = config.recovery.spares
    possible, needed = _possible(config, nodes), scale.min_workers + spares
    asked = f"{'at least ' if scale.is_elastic else ''}{quantity(scale.min_workers, 'worker')}"
    asked += f" and {quantity(spares, 'spare')}" if spares else ""
    asked += f" of {scale.cpus_per_worker:g} CPU"
    asked += f" and {scale.gpus:g} GPU" if scale.gpus else ""
    asked += f" ({scale.placement})" if scale.placement.startswith("STRICT") else ""
    asked += f" on nodes labelled {dict(scale.label_selector)}" if scale.label_selector else ""
    cpus = sum(n.resources.get("CPU", 0.0) for n in nodes)
    gpus = sum(n.resources.get("GPU", 0.0) for n in nodes)
    has = f"the cluster has {quantity(len(nodes), 'node')} with {cpus:g} CPUs and {gpus:g} GPUs in all"
    most = _beside_the_input(config, nodes)
    if possible < needed:
        where = f", {len(_fitting(scale, nodes))} with these labels" if scale.label_selector else ""
        raise ClusterError(
            "the requested scale",
            asked,
            f"{has}{where} and can hold {possible}",
            _fewer(config, min(possible, most) - spares),
        )
    if most < needed:
        raise ClusterError(
            "the requested scale",
            asked,
            f"{has}, and {config.data.reserved_cpus:g} must stay free for the input tasks (data.reserved_cpus)",
            f"{_fewer(config, most - spares)}; or --data.reserved-cpus 0 if the workers read their rows themselves",
        )


def num_workers_possible(config: RunConfig, nodes: Sequence[Node]) -> int:
    """Maximum number of workers of a run on these nodes, with `data.reserved_cpus` left free."""
    return max(0, min(_possible(config, nodes), _beside_the_input(config, nodes)))


def check_option_fits(option: str, config: RunConfig, nodes: Sequence[Node], *, hint: str | None = None) -> None:
    """Refuse an option's number of workers if these nodes can never hold it. Raises ClusterError.

    hint: advice in place of that of `check_capacity`, unless None."""
    try:
        check_capacity(config, nodes)
    except ClusterError as exc:
        raise ClusterError(
            option,
            f"{config.scale.max_workers}, which needs {exc.found}",
            exc.allowed,
            exc.hint.replace("--scale.workers", option) if hint is None else hint,
        ) from exc


def num_concurrent(config: RunConfig, nodes: Sequence[Node]) -> int:
    """Number of trials that fit at once, with `data.reserved_cpus` left free; at least 1 if a trial fits alone.

    STRICT_PACK places a trial's workers on one node, STRICT_SPREAD each on its own node, and other placements anywhere.
    """
    scale, workers = config.scale, config.scale.max_workers
    bundles = [_bundles(scale, node) for node in _fitting(scale, nodes)]
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


def _fitting(scale: ScaleSettings, nodes: Sequence[Node]) -> list[Node]:
    return [n for n in nodes if all(n.labels.get(k) == v for k, v in scale.label_selector.items())]


def _possible(config: RunConfig, nodes: Sequence[Node]) -> int:
    per_node = [_bundles(config.scale, n) for n in _fitting(config.scale, nodes)]
    if config.scale.placement == "STRICT_PACK":
        return max(per_node, default=0)
    if config.scale.placement == "STRICT_SPREAD":
        return sum(1 for count in per_node if count)
    return sum(per_node)


def _beside_the_input(config: RunConfig, nodes: Sequence[Node]) -> int:
    cpus = sum(n.resources.get("CPU", 0.0) for n in nodes)
    return int((cpus - config.data.reserved_cpus) / config.scale.cpus_per_worker + 1e-9)


def _bundles(scale: ScaleSettings, node: Node) -> int:
    by_cpu = node.resources.get("CPU", 0.0) / scale.cpus_per_worker + 1e-9
    by_gpu = node.resources.get("GPU", 0.0) / scale.gpus + 1e-9 if scale.gpus else float("inf")
    return int(min(by_cpu, by_gpu))


def _fewer(config: RunConfig, possible: int) -> str:
    if possible >= 1:
        smaller = "a smaller --scale.cpus-per-worker"
        smaller = f"{smaller}, or only CPUs (--scale.gpus-per-worker 0)" if config.scale.gpus else smaller
        return f"use --scale.workers {possible}, or {smaller}"
    return (
        "use smaller workers (scale.cpus_per_worker, scale.gpus_per_worker) or a larger cluster; for one that "
        "starts nodes on demand: --scale.wait-for-nodes-s 600"
    )
