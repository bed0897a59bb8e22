"""Profile of a run, from the measurements of its workers.

Used by launch/run/record.py when a run has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from scaleray.profiling.arrivals_in_profile import rounded, spread, steps_in_buckets, with_arrivals
from scaleray.records.profile_record import Buckets, Goodput, RankMeasurements, RankProfile, RunProfile, Spread

CLOSES_WITHIN = 0.01
"""Largest share of a step by which the sum of its parts may differ from it."""
STEP = "step"
"""Column of whole steps, next to those of phases."""
PAUSES = "pauses"
"""Column of the garbage collector's pauses, which occur within phases."""


def run_profile(
    measured: Sequence[RankMeasurements], *, goodput: Goodput | None = None, traced_steps: int = 0
) -> RunProfile | None:
    """Return the profile of all ranks; None if no rank measured a step. traced_steps: number of steps at the end that a
    trace slowed down."""
    ranks = sorted((one for one in measured if one.num_steps > 0), key=lambda one: one.rank)
    if not ranks:
        return None
    first = ranks[0]
    gaps = {one.rank: one.gap for one in ranks if one.gap is not None}
    worst = max(gaps, key=lambda rank: gaps[rank], default=None)
    profile = RunProfile(
        buckets=Buckets(first.first_step, first.bucket_width, len(first.series)),
        ranks=[rank_profile(one) for one in ranks],
        closes=len(gaps) == len(ranks) and max(gaps.values()) <= CLOSES_WITHIN,
        gap=None if worst is None else gaps[worst],
        gap_rank=worst,
        collectives=[row for one in ranks for row in one.collectives],
        goodput=goodput,
        notes=_notes(ranks),
        traced_steps=traced_steps,
        links=[row for one in ranks for row in one.links],
    )
    return with_arrivals(profile, ranks)


def _notes(ranks: Sequence[RankMeasurements]) -> list[str]:
    """Missing measurements, with the ranks unless all of them lack one."""
    by_note: dict[str, list[int]] = {}
    for one in ranks:
        for note in one.notes:
            by_note.setdefault(note, []).append(one.rank)
    return [
        note if len(which) == len(ranks) else f"rank{'s' * (len(which) > 1)} {', '.join(map(str, which))}: {note}"
        for note, which in by_note.items()
    ]


def rank_profile(measured: RankMeasurements) -> RankProfile:
    """Summary of one rank's measurements, without parts that took no time in any step."""
    spreads = {
        name: _spread(measured, column)
        for column, name in enumerate(measured.columns)
        if name in (STEP, PAUSES) or measured.totals[column] > 0
    }
    step, pauses = spreads.pop(STEP), spreads.pop(PAUSES, None)
    return RankProfile(
        rank=measured.rank,
        node=measured.node,
        device=measured.device,
        steps=measured.num_steps,
        step=step,
        phases=spreads,
        worst_gap=measured.worst_gap,
        pauses=pauses,
        memory=measured.memory,
    )


def _spread(measured: RankMeasurements, column: int) -> Spread:
    means = measured.series[:, column] / steps_in_buckets(measured.num_steps, measured.bucket_width)
    return spread(float(measured.totals[column]), measured.rows[:, column], rounded(means))
