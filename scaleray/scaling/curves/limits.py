"""What limits the largest point of a curve, and what could be changed about it.

The time that a step takes beyond the ideal is the sum of what each of its parts takes beyond the ideal: on a strong
curve a part is ideal at the base's divided by the growth of the workers, on a weak curve at the base's.
"""

from __future__ import annotations

from scaleray.config.strategy_traits import traits_of
from scaleray.records.study import CurvePoint, Mode, Point

LEAST_LOSS = 0.05
"""Lost share of the step time under which nothing limits yet."""
LARGE_SHARE = 0.2
"""Share of the step time from which on communication or input limits although it has not grown: as it does at the
base."""
WORDS = {
    "communication": "communication is the limit",
    "input": "the input is the limit",
    "contention": "workers getting in each other's way is the limit",
    "compute": "too little work for each worker is the limit",
    "computing or communication": "computing and communication together are the limit, "
    "which are not measured apart here",
    "nothing yet": "nothing limits it yet",
}
"""Values of `Curve.limit`, each with the beginning of a sentence about it."""


def limit_of(mode: Mode, base: Point, largest: CurvePoint) -> str:
    """What limits the largest point: a key of WORDS, or "" for a curve of one point."""
    point = largest.point
    if point.workers == base.workers:
        return ""
    shares = lost_shares(mode, base, point)
    is_lost = largest.efficiency.value <= 1 - LEAST_LOSS and largest.efficiency.high < 1
    if is_lost and max(shares.values()) > 0:
        worst = max(shares, key=lambda name: shares[name])
        if worst == "waiting":
            return "contention"
        if worst != "compute":
            return worst
        if point.exposed_comm_s is None:
            return "computing or communication"
        # each worker computes what one of the base computes, so that it can only be slower by sharing something
        return "contention" if mode == "weak" or "oversubscribed" in point.marks else "compute"
    parts = {"communication": point.exposed_comm_s or 0.0, "input": point.input_wait_s}
    largest_part = max(parts, key=lambda name: parts[name])
    return largest_part if parts[largest_part] >= LARGE_SHARE * point.step_time_s.value else "nothing yet"


def lost_shares(mode: Mode, base: Point, point: Point) -> dict[str, float]:
    """Shares of the point's step time by which each part is beyond the ideal; below 0: better. They add up to
    `1 - efficiency`.

    waiting: time spent waiting for the slowest worker of a step.
    """
    ideal = base.workers / point.workers if mode == "strong" else 1.0
    whole = point.step_time_s.value
    return {
        "communication": ((point.exposed_comm_s or 0.0) - ideal * (base.exposed_comm_s or 0.0)) / whole,
        "input": (point.input_wait_s - ideal * base.input_wait_s) / whole,
        "compute": (point.compute_s - ideal * base.compute_s) / whole,
        "waiting": (point.other_s - ideal * base.other_s) / whole,
    }


def advice(limit: str, point: Point) -> str:
    """What to change about a limit, with the keys of the config; "" where there is nothing to change."""
    if limit in ("communication", "computing or communication"):
        return _about_communication(point)
    if limit == "input":
        return (
            "more cores for reading (data.reserved_cpus), larger chunks (data.chunk_mib), "
            "or a source that is decoded already"
        )
    if limit == "contention":
        if "oversubscribed" in point.marks:
            return "measure with no more workers than cores to see how a cluster would scale"
        return (
            "fewer workers on a node, more cores for each (scale.cpus_per_worker), "
            "or shares.by speed where one is always slow"
        )
    if limit == "compute":
        share = max(1, point.global_batch_size // point.workers)
        samples = "sample" if share == 1 else "samples"
        return f"a larger global batch than {share} {samples} a worker, fewer workers, or compilation.what blocks"
    return ""


def _about_communication(point: Point) -> str:
    many = point.accumulation_steps > 1
    if point.strategy == "fsdp":
        first = "larger micro-batches (batch.micro_size), as each gathers anew, " if many else ""
        return f"{first}HSDP (fsdp.replicas), or fsdp.reshard_after_forward false where memory allows"
    if point.strategy == "tensor":
        return "a tensor.size that stays within a node, and replicas beyond it"
    if point.strategy == "pipeline":
        return "more micro-batches in a step, or pipeline.schedule interleaved_1f1b"
    if traits_of(point.strategy).averages_now_and_then:
        return "a larger local_sgd.sync_every"
    if traits_of(point.strategy).mixes_with_neighbours:
        return "a larger global batch, or local_sgd, which meets less often"
    return (
        "a larger global batch, larger buckets (strategy.bucket_size_mib), half the bytes (compression.name bf16), "
        "or fewer meetings (local_sgd)"
    )
