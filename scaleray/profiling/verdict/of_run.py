"""Verdict on a recorded run, from its profile and its config."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scaleray.profiling.links import slow_link, to_text, why_not
from scaleray.profiling.verdict.findings import Finding, Limit, Verdict
from scaleray.profiling.verdict.signals import OWN, Facts, LateAt, Signals
from scaleray.profiling.verdict.verdict import evaluate
from scaleray.profiling.verdict.verdict_text import sentence_of
from scaleray.records.json_record import leaves
from scaleray.records.phases import Phase
from scaleray.records.profile_record import CollectiveRow, RankProfile, RunProfile, Spread
from scaleray.records.run_record import RunRecord

FIRST_STEPS = 10
"""Number of initial steps to skip, at most half of all."""
EVENTS = (Phase.EVALUATION, Phase.CHECKPOINT)
"""Parts that occur at fixed intervals of several steps: each step gets their mean."""


def verdict_of_run(record: RunRecord) -> Verdict:
    """Return the verdict on a run; `incomplete` if it has no profile, as in older versions."""
    profile = record.profile
    if profile is None or not profile.ranks:
        words = "incomplete: the run has no profile."
        return Verdict(Finding(Limit.INCOMPLETE, None), (), words, "unsure", 0, 0.0)
    facts = facts_of(record, device=profile.ranks[0].device)
    verdict = evaluate(signals_of(profile), facts)
    return with_links(dataclasses.replace(verdict, notes=(*verdict.notes, *profile.notes)), profile, facts)


def with_links(verdict: Verdict, profile: RunProfile, facts: Facts) -> Verdict:
    """Add to the verdict the ranks of a slow link, or the reason why they are unknown."""
    found = [one for one in (verdict.primary, *verdict.others) if one.limit is Limit.COMMUNICATION]
    if not found:
        return verdict
    link = slow_link(profile.links)
    if link is None:
        note = f"which link is slow: {why_not(profile.links, facts.workers)}"
        return dataclasses.replace(verdict, notes=(*verdict.notes, note))
    named = dataclasses.replace(found[0], ranks=link.ranks, cause=to_text(link))
    others = tuple(named if one is found[0] else one for one in verdict.others)
    primary = named if verdict.primary is found[0] else verdict.primary
    verdict = dataclasses.replace(verdict, primary=primary, others=others)
    return dataclasses.replace(verdict, sentence=sentence_of(verdict, facts))


def _count(record: RunRecord, name: str) -> int:
    """A count derived from the config; 0 if it is missing, or not a number in a damaged record."""
    value = record.derived.get(name)
    return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0


def facts_of(record: RunRecord, *, device: str = "cpu") -> Facts:
    """Facts of a run other than its times."""
    return Facts(
        record.workers,
        record.strategy,
        _count(record, "accumulation_steps") or 1,
        _count(record, "global_batch_size"),
        device,
        settings=dict(leaves(record.config, of_lists=False)),
    )


def signals_of(profile: RunProfile) -> Signals:
    """Signals from the series of a profile, without the first steps, in which caches fill, and without traced steps."""
    ranks = sorted(profile.ranks, key=lambda one: one.rank)
    count = min(len(one.step.series) for one in ranks)
    width = max(1, profile.buckets.width)
    count -= math.ceil(profile.traced_steps / width)
    first = min(max(1, FIRST_STEPS // width), count // 2) if count > 1 else 0
    parts = {
        part: _rows([one.phases.get(part) for one in ranks], count, first)
        for part in OWN
        if any(part in one.phases for one in ranks)
    }
    for part in EVENTS:
        if part in parts:
            parts[part] = np.broadcast_to(parts[part].mean(axis=1, keepdims=True), parts[part].shape).copy()
    waited = [part for part in (Phase.COMMUNICATION, Phase.STRAGGLER) if any(part in one.phases for one in ranks)]
    waits = sum(_rows([one.phases.get(part) for one in ranks], count, first) for part in waited) if waited else None
    stranded, reserved = _memory_shares(ranks)
    return Signals(
        parts,
        waits if isinstance(waits, np.ndarray) else None,
        unexplained=abs(profile.gap or 0.0),
        window=width,
        late_at=_late_at(profile),
        pauses=_pauses(ranks, count, first),
        retries=_retries(ranks, count, first),
        stranded_share=stranded,
        reserved_share=reserved,
        last_operation=_last_operation(ranks, profile.collectives),
        bus_bandwidth=_bus_bandwidth(profile.collectives),
    )


def _rows(spreads: Sequence[Spread | None], count: int, first: int) -> npt.NDArray[np.float64]:
    rows = [[0.0] * count if one is None else [*one.series, *[0.0] * count][:count] for one in spreads]
    return np.array(rows)[:, first:]


def _late_at(profile: RunProfile) -> dict[int, LateAt]:
    """Place where each straggler's gradients become late; the worst one if a rank has several."""
    known = reversed(profile.stragglers)
    return {one.rank: LateAt(one.bucket, one.layers) for one in known if one.bucket is not None}


def _pauses(ranks: Sequence[RankProfile], count: int, first: int) -> npt.NDArray[np.float64] | None:
    spreads = [one.pauses for one in ranks]
    return None if any(one is None for one in spreads) else _rows(spreads, count, first)


def _retries(ranks: Sequence[RankProfile], count: int, first: int) -> npt.NDArray[np.float64] | None:
    """Allocator retries of each rank in each bucket: samples are counts from the start of the process."""
    series = [one.memory.series.get("retries") for one in ranks]
    if any(one is None or len(one) < count for one in series):
        return None
    counted = np.array([[np.nan if value is None else value for value in one or ()][:count] for one in series])
    for row in counted:  # a bucket without a sample has the value of the previous one
        for at in range(count):
            if np.isnan(row[at]):
                row[at] = row[at - 1] if at else 0.0
    return np.diff(counted, axis=1, prepend=counted[:, :1])[:, first:]


def _memory_shares(ranks: Sequence[RankProfile]) -> tuple[float | None, float | None]:
    stranded = [
        one.memory.stranded_bytes / one.memory.peak.num_bytes
        for one in ranks
        if one.memory.stranded_bytes is not None and one.memory.peak is not None and one.memory.peak.num_bytes
    ]
    return max(stranded, default=None), None


def _last_operation(ranks: Sequence[RankProfile], rows: Sequence[CollectiveRow]) -> str:
    """Last collective for which a backward pass waits: that of its last bucket."""
    buckets = [bucket for one in ranks[:1] for bucket in one.lateness]
    if not buckets:
        return ""
    last = max(buckets, key=lambda bucket: bucket.bucket)
    operations = [row.operation for row in rows if row.rank == ranks[0].rank and row.operation]
    name = next((name for name in ("reduce_scatter", "all_reduce") if any(name in one for one in operations)), "")
    words = name.replace("_", "-") or "the collective"
    return f"{words} of bucket {last.bucket}" + (f" ({last.layers})" if last.layers else "")


def _bus_bandwidth(rows: Sequence[CollectiveRow]) -> float | None:
    """Bus bandwidth of the type of collective that takes the most time."""
    timed = [row for row in rows if row.seconds and row.bus_bandwidth]
    return max(timed, key=lambda row: row.seconds or 0.0).bus_bandwidth if timed else None
