"""Limiting factor of a curve's largest point, and its remedy.

The excess of a step over the ideal is the sum of the excess of its parts: the ideal of a part is the base's divided by
the growth of the workers on a strong curve, and the base's on a weak curve."""

from __future__ import annotations

from scaleray.profiling.verdict.advice import about_contention, about_little_work, advice_on
from scaleray.profiling.verdict.findings import Limit
from scaleray.profiling.verdict.signals import Facts
from scaleray.records.study_record import CurvePoint, Mode, Point

LEAST_LOSS = 0.05
"""Minimum lost share of the step time for a limit to be named."""
LARGE_SHARE = 0.2
"""Share of the step time from which communication or input is a limit although it has not grown since the base."""
WORDS = {
    "communication": "communication is the limit",
    "input": "the input is the limit",
    "contention": "workers getting in each other's way is the limit",
    "compute": "too little work for each worker is the limit",
    "computing or communication": "computing and communication, not measured separately here, are the limit",
    "nothing yet": "there is no limit yet",
}
"""Values of `Curve.limit`, each with the beginning of a sentence about it."""

AS_IN_PROFILES = {
    "communication": Limit.COMMUNICATION,
    "input": Limit.INPUT,
    "contention": Limit.STRAGGLER,
    "compute": Limit.COMPUTE,
    "computing or communication": Limit.COMMUNICATION,
    "nothing yet": Limit.COMPUTE,
}
"""Limits that a profile of such steps can have; a curve also detects too little work or too few cores."""


def limit_of(mode: Mode, base: Point, largest: CurvePoint) -> str:
    """Limit of the largest point: a key of WORDS, or "" for a curve of one point."""
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
    """Excess of each part over the ideal, as a share of the point's step time; below 0: better. They add up to `1 -
    efficiency`.

    waiting: time spent waiting for the slowest worker of a step."""
    ideal = base.workers / point.workers if mode == "strong" else 1.0
    whole = point.step_time_s.value
    return {
        "communication": ((point.exposed_comm_s or 0.0) - ideal * (base.exposed_comm_s or 0.0)) / whole,
        "input": (point.input_wait_s - ideal * base.input_wait_s) / whole,
        "compute": (point.compute_s - ideal * base.compute_s) / whole,
        "waiting": (point.other_s - ideal * base.other_s) / whole,
    }


def advice(limit: str, point: Point) -> str:
    """Remedy for a limit, with the keys of the config, as a profile advises it; "" if there is none."""
    about = Facts(
        point.workers,
        point.strategy,
        point.accumulation_steps,
        point.global_batch_size,
        is_oversubscribed="oversubscribed" in point.marks,
    )
    if limit == "contention":
        return about_contention(about).text
    if limit == "compute":
        return about_little_work(about).text
    return advice_on(AS_IN_PROFILES[limit], about).text
