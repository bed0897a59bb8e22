"""Law for a measured scaling curve: the planner's throughput as a function of the number of workers.

Compute is scaled to one measured size. Between the given sizes, throughput is a power of the number of workers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scaleray.common.printed import quantity
from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.errors import UsageError
from scaleray.planner.answers.calibration import calibrate
from scaleray.planner.cost.layout import Layout
from scaleray.planner.cost.step_time import step_time
from scaleray.planner.models.block_counts import ModelProfile

MOST_MISS = 0.02
"""Largest relative error of the step time accepted after calibration."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Number of workers, and the batch of one step. global_batch_size: samples over all workers."""

    workers: int
    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int


def predicted_throughput(
    model: ModelProfile, layout: Layout, node: Cluster, sizes: Sequence[Size], *, measured_step_s: float
) -> Callable[[float], float]:
    """Return a function from workers to samples/s, interpolated between the `sizes` and constant beyond them.

    layout: for all sizes, except for its degrees and micro-batches. node: one node of the cluster, with the network
    between nodes. measured_step_s: step time of the smallest size. Raises UsageError if the prediction cannot match
    that step time, or if sizes need an unknown network."""
    ordered = sorted(sizes, key=lambda size: size.workers)
    base = ordered[0]
    measured = calibrate(model, _layout(layout, base), _cluster(node, base.workers), measured_step_s)
    found = [
        step_time(model, _layout(layout, size), _cluster(node, size.workers), measured=measured).total_s
        for size in ordered
    ]
    if abs(found[0] - measured_step_s) > MOST_MISS * measured_step_s:
        raise UsageError(
            f"a step on {quantity(base.workers, 'worker')}",
            f"{1e3 * measured_step_s:.3g} ms",
            f"the closest prediction for this model and hardware is {1e3 * found[0]:.3g} ms",
        )
    at = np.log([size.workers for size in ordered])
    rates = np.log([size.global_batch_size / seconds for size, seconds in zip(ordered, found, strict=True)])

    def throughput(workers: float) -> float:
        return math.exp(float(np.interp(math.log(workers), at, rates)))

    return throughput


def _layout(layout: Layout, size: Size) -> Layout:
    # HSDP has the same number of replicas at all sizes
    replicas = max(1, layout.data // layout.shard) if layout.sharding == "zero3" else 1
    shard = max(1, size.workers // replicas) if layout.sharding == "zero3" else 1
    return replace(
        layout, data=size.workers, shard=shard, micro_batch=size.micro_batch_size, accumulation=size.accumulation_steps
    )


def _cluster(node: Cluster, workers: int) -> Cluster:
    """The cluster with this number of workers, with nodes filled one after another."""
    per_node = min(workers, node.gpus_per_node)
    num_nodes = math.ceil(workers / node.gpus_per_node)
    if num_nodes > 1 and node.network is None:
        raise UsageError.problem(
            "The network between nodes", f"is unknown, and {workers} workers need {num_nodes} nodes"
        )
    return replace(
        node,
        gpus_per_node=per_node,
        num_nodes=num_nodes,
        network=node.network if num_nodes > 1 else None,
        board_gpus=node.board_gpus or node.gpus_per_node,
    )
