"""Rules for the resources of a run: memory, disk, checkpoints and MLflow."""

import itertools

import numpy as np

from scaleray.common import live_metrics as live
from scaleray.common import metric_names as names
from scaleray.common.metric import prometheus_name
from scaleray.config.alerts import AlertLimits
from scaleray.live.rules.promql import RANK, RUN, of_rank, of_run, over
from scaleray.live.rules.rule import OF_RANK, Match, Rule
from scaleray.live.rules.series_history import SeriesHistory

USED = '{kind="used"}'
CREEP_S, WITHIN_S = 1200.0, 300.0
"""Seconds between the two periods whose lowest memory is compared, and the length of each."""
CREEP_SHARE = 0.05
BLOCK_S, BLOCKS, USUAL_S, LEAST_GROWTH = 10.0, 4, 120.0, 0.002
"""Memory is filling if its lowest value grew in each block by at least this share of the total; a single large
allocation grows in one block only. It must also exceed all values before these blocks, to exclude memory that goes up
and down; a rank with a shorter history may still be filling its caches."""
LEAST_WRITE_S, UNKNOWN_WRITE_S, WRITES_WITHIN_S = 10.0, 30.0, 3600.0
"""Seconds by which a checkpoint's age may exceed the limit, as it is written during training: the longest write of the
last hour, but at least the first number; the second number if none was written yet."""
GIB = 2.0**30
MEMORY, MEMORY_LIMIT = prometheus_name(live.MEMORY_BYTES), prometheus_name(live.MEMORY_LIMIT_BYTES)
AGE, INTERVAL = prometheus_name(live.CHECKPOINT_AGE_S), prometheus_name(live.CHECKPOINT_INTERVAL_S)
WRITE = prometheus_name(names.CHECKPOINT_DURATION_S)
SPOOLED, DISK_FREE = prometheus_name(live.RECORDER_SPOOLED_POINTS), prometheus_name(live.DISK_FREE)


def _near_limit(seen: SeriesHistory, limits: AlertLimits) -> Match | None:
    most = seen.newest(MEMORY_LIMIT)
    shares = {of: used / most[of] for of, used in seen.newest(MEMORY).items() if most.get(of)}
    rank = max(shares, key=lambda of: shares[of], default=None)
    return Match(shares[rank], rank) if rank is not None and shares[rank] > limits.memory_share else None


def _filling_query(limits: AlertLimits) -> str:
    used, most = prometheus_name(live.MEMORY_BYTES) + USED, of_rank(live.MEMORY_LIMIT_BYTES)
    least = [
        f"max by ({RANK}) ({over('min_over_time', live.MEMORY_BYTES, BLOCK_S, where=USED, ago_s=BLOCK_S * ago)})"
        for ago in range(BLOCKS)
    ]
    grows = [f"({new} - {old}) > {LEAST_GROWTH:g} * {most}" for new, old in itertools.pairwise(least)]
    growth = over("deriv", live.MEMORY_BYTES, BLOCK_S * BLOCKS, where=USED)
    left = f"({most} - {of_rank(live.MEMORY_BYTES, USED)}) / (max by ({RANK}) ({growth}) > 0)"
    usual = over("max_over_time", live.MEMORY_BYTES, USUAL_S, where=USED, ago_s=BLOCK_S * BLOCKS)
    known = f"max by ({RANK}) ({used} offset {USUAL_S:g}s)"
    is_new = f"{least[0]} > max by ({RANK}) ({usual})"
    return " and ".join([f"{left} < {limits.memory_full_within_s:g}", *grows, is_new, known])


def _filling(seen: SeriesHistory, limits: AlertLimits) -> Match | None:
    for rank, most in seen.newest(MEMORY_LIMIT).items():
        usual = seen.past(MEMORY, last_s=BLOCK_S * BLOCKS + USUAL_S, until_s=BLOCK_S * BLOCKS, of=rank)
        blocks = [
            seen.past(MEMORY, last_s=BLOCK_S * (ago + 1), until_s=BLOCK_S * ago, of=rank) for ago in range(BLOCKS)
        ]
        if not all(map(len, [usual, *blocks])) or not seen.knows_since(MEMORY, USUAL_S, of=rank):
            continue
        least = np.array([block.min() for block in blocks])
        times, values = seen.past_points(MEMORY, last_s=BLOCK_S * BLOCKS, of=rank)
        growth = float(np.polyfit(times - seen.now, values, 1)[0]) if len(values) > 1 else 0.0
        left_s = (most - float(values[-1])) / growth if growth > 0 else np.inf
        is_new = least[0] > usual.max() and (least[:-1] - least[1:] > LEAST_GROWTH * most).all()
        if is_new and left_s < limits.memory_full_within_s:
            return Match(left_s, rank)
    return None


def _creeping_query(limits: AlertLimits) -> str:
    now = f"max by ({RANK}) ({over('min_over_time', live.MEMORY_BYTES, WITHIN_S, where=USED)})"
    before = f"max by ({RANK}) ({over('min_over_time', live.MEMORY_BYTES, WITHIN_S, where=USED, ago_s=CREEP_S)})"
    growth = f"({now} - {before})"
    return f"{growth} > {limits.memory_creep_gib * GIB:.0f} and {growth} > {CREEP_SHARE:g} * {before}"


def _creeping(seen: SeriesHistory, limits: AlertLimits) -> Match | None:
    for rank in seen.newest(MEMORY):
        now = seen.past(MEMORY, last_s=WITHIN_S, of=rank)
        before = seen.past(MEMORY, last_s=CREEP_S + WITHIN_S, until_s=CREEP_S, of=rank)
        if len(now) and len(before):
            growth, least = float(np.min(now) - np.min(before)), float(np.min(before))
            if growth > max(limits.memory_creep_gib * GIB, CREEP_SHARE * least):
                return Match(growth, rank)
    return None


def _checkpoint_query(limits: AlertLimits) -> str:
    age, interval = of_run(live.CHECKPOINT_AGE_S), of_run(live.CHECKPOINT_INTERVAL_S)
    longest = f"max by ({RUN}) ({over('max_over_time', names.CHECKPOINT_DURATION_S, WRITES_WITHIN_S)})"
    write = f"(clamp_min({longest}, {LEAST_WRITE_S:g}) or 0 * {age} + {UNKNOWN_WRITE_S:g})"
    return f"{age} > {limits.checkpoint_intervals:g} * {interval} + {write}"


def _checkpoint_too_old(seen: SeriesHistory, limits: AlertLimits) -> Match | None:
    age, interval = seen.last(AGE), seen.last(INTERVAL)
    if age is None or interval is None:
        return None
    took = seen.past(WRITE, last_s=WRITES_WITHIN_S)
    write_s = max(LEAST_WRITE_S, float(took.max())) if len(took) else UNKNOWN_WRITE_S
    return Match(age) if age > limits.checkpoint_intervals * interval + write_s else None


def _recorder_spooling(seen: SeriesHistory, limits: AlertLimits) -> Match | None:
    points = seen.last(SPOOLED)
    return Match(points) if points else None


def _disk_nearly_full(seen: SeriesHistory, limits: AlertLimits) -> Match | None:
    share = min(seen.newest(DISK_FREE).values(), default=1.0)
    return Match(share) if share < limits.disk_free_share else None


RULES = (
    Rule(
        "memory_near_limit",
        "warning",
        "{of} is using {value} of its memory limit",
        "share",
        "The next allocation may end the run: an error on a GPU, the OOM killer on a host.",
        "Use a smaller batch.micro_size, activations.checkpointing, or a strategy that shards (fsdp); "
        "memory.on_out_of_memory halve continues with smaller micro-batches.",
        ("ranks", "Memory"),
        lambda limits: (
            f"{of_rank(live.MEMORY_BYTES, USED)} / {of_rank(live.MEMORY_LIMIT_BYTES)} > {limits.memory_share:g}"
        ),
        _near_limit,
        for_s=10,
        of=OF_RANK,
    ),
    Rule(
        "memory_filling",
        "warning",
        "{of} will run out of memory in {value} at its current growth",
        "seconds",
        "The run ends at the limit: with an error on a GPU, by the OOM killer on a host.",
        "Save a checkpoint now (alerts.action checkpoint). Objects of each step stay in memory: tensors with their "
        "graph (a loss summed without .item()), or lists in a callback or a metric. scaleray profile --trace shows the "
        "owner.",
        ("ranks", "Memory"),
        _filling_query,
        _filling,
        of=OF_RANK,
    ),
    Rule(
        "memory_creeping",
        "warning",
        "the minimum memory use of {of} has grown by {value} in 20 minutes",
        "bytes",
        "Memory that should be freed is still in use; the run ends at the limit.",
        "Look for tensors that keep their graph (a loss summed without .item()) and for growing lists in a callback or "
        "a metric; scaleray profile --trace shows the owner.",
        ("ranks", "Memory"),
        _creeping_query,
        _creeping,
        of=OF_RANK,
    ),
    Rule(
        "disk_nearly_full",
        "critical",
        "only {value} of the disk with the run folder is free",
        "share",
        "When the disk is full, no checkpoint can be written, and a failure loses everything since the last one.",
        "Run scaleray checkpoint prune RUN, or set a smaller checkpoint.keep_last or another checkpoint.storage_path.",
        ("cluster", "Free disk"),
        lambda limits: f"{of_run(live.DISK_FREE, 'min')} < {limits.disk_free_share:g}",
        _disk_nearly_full,
    ),
    Rule(
        "checkpoint_too_old",
        "warning",
        "the newest checkpoint is {value} old",
        "seconds",
        "A failure now loses all steps since then.",
        "Check the run's events: storage may be slow, full or unreachable. checkpoint.every_minutes is the requested "
        "interval.",
        ("run", "Age of the newest checkpoint"),
        _checkpoint_query,
        _checkpoint_too_old,
    ),
    Rule(
        "recorder_spooling",
        "warning",
        "{value} chart points are waiting, as MLflow does not accept them",
        "count",
        "Training continues, but curves are not visible; points unsent at the end must be sent manually.",
        "Check the MLflow server. Unsent points are stored in unsent.jsonl in the run folder; scaleray tracking replay "
        "sends them.",
        ("run", "Points that wait for MLflow"),
        lambda limits: f"{of_run(live.RECORDER_SPOOLED_POINTS)} > 0",
        _recorder_spooling,
        for_s=30,
    ),
)
