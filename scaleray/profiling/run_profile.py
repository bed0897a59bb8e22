"""Profile of a run, from the measurements of its workers.

Used by launch/run/record.py when a run has ended.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from scaleray.profiling.collectives import ALL_REDUCE, with_bandwidth
from scaleray.profiling.lateness import Arrivals, aligned, find_stragglers, in_flight_s, waited_s
from scaleray.records.phases import Phase
from scaleray.records.profile_record import (
    BucketLateness,
    Buckets,
    CollectiveRow,
    Goodput,
    RankMeasurements,
    RankProfile,
    RunProfile,
    Spread,
)


def spread(total: float, values: np.ndarray, series: Sequence[float] = ()) -> Spread:
    """Summary of a quantity measured in every step. values: one per step. series: mean of each bucket."""
    if not len(values):
        return Spread(total, 0.0, 0.0, list(series))
    median, p90 = np.percentile(values, (50, 90))
    return Spread(float(total), float(median), float(p90), [float(value) for value in series])


def steps_in_buckets(num_steps: int, width: int) -> np.ndarray:
    """Number of steps in each bucket."""
    count = -(-num_steps // width)
    return np.minimum(width, num_steps - width * np.arange(count))


def rounded(values: Iterable[float]) -> list[float]:
    """Values with seven digits, more than the precision of a clock; this keeps records of many ranks small."""
    return [float(f"{value:.7g}") for value in values]


def with_arrivals(profile: RunProfile, measured: Sequence[RankMeasurements]) -> RunProfile:
    """Add the results of the ranks' arrivals to the profile; only bus bandwidths if fewer than two ranks have
    arrivals."""
    arrivals = aligned([one.arrivals for one in measured if one.arrivals is not None])
    if arrivals is None:
        return dataclasses.replace(profile, collectives=[with_bandwidth(row) for row in profile.collectives])
    by_rank = {one.rank: one for one in measured}
    waits, late = waited_s(arrivals), arrivals.late
    ranks = []
    for rank in profile.ranks:
        if rank.rank in arrivals.ranks:
            number = arrivals.ranks.index(rank.rank)
            rank = _with_lateness(rank, arrivals, late, number, profile.buckets)
            rank = _with_waits(rank, by_rank[rank.rank], arrivals.steps, waits[number], profile.buckets)
        ranks.append(rank)
    return dataclasses.replace(
        profile,
        ranks=ranks,
        stragglers=find_stragglers(arrivals, step_s=float(np.median([rank.step.median for rank in profile.ranks]))),
        collectives=[_timed(row, arrivals, waits, by_rank) for row in profile.collectives],
    )


def _with_lateness(rank: RankProfile, arrivals: Arrivals, late: np.ndarray, number: int, over: Buckets) -> RankProfile:
    with np.errstate(invalid="ignore"):
        worst = np.nan_to_num(np.nanmax(late[number], axis=1))
    places, buckets = [], arrivals.places.buckets
    of_backward = late[:, :, arrivals.buckets]
    for bucket, layers in enumerate(arrivals.places.bucket_layers):
        own_places = [place for place, its in enumerate(buckets) if its == bucket]
        everyone = np.nan_to_num(of_backward[:, :, own_places]).max(axis=2)
        own = everyone[number]
        is_last = (own > 0) & (own >= everyone.max(axis=0))
        over_time = rounded(_means_over_time(arrivals.steps, own, over))
        found = spread(float(own.mean()) * rank.steps, own, over_time)
        places.append(BucketLateness(bucket, layers, found, last_share=float(is_last.mean())))
    series = rounded(_means_over_time(arrivals.steps, worst, over))
    return dataclasses.replace(rank, late_s=spread(float(worst.mean()) * rank.steps, worst, series), lateness=places)


def _with_waits(
    rank: RankProfile, measured: RankMeasurements, steps: np.ndarray, waits: np.ndarray, over: Buckets
) -> RankProfile:
    """Divide exposed communication into the transfer and the wait for the slowest rank."""
    whole = rank.phases.get(Phase.COMMUNICATION)
    width = steps_in_buckets(rank.steps, over.width)
    if whole is None or len(whole.series) != over.count or len(width) != over.count:
        return rank  # this rank took a different number of steps
    before = np.array(whole.series)
    waited = np.minimum(_means_over_time(steps, waits, over), before)
    total = float((waited * width).sum())
    rows = measured.rows[:, measured.columns.index(Phase.COMMUNICATION)]
    numbers = measured.first_step + measured.every * np.arange(len(rows))
    _, of_rows, of_waits = np.intersect1d(numbers, steps, return_indices=True)
    share = np.minimum(waits[of_waits], rows[of_rows])
    transfer = spread(whole.total - total, rows[of_rows] - share, rounded(before - waited))
    straggler = spread(total, share, rounded(waited))
    return dataclasses.replace(rank, phases={**rank.phases, Phase.COMMUNICATION: transfer, Phase.STRAGGLER: straggler})


def _timed(
    row: CollectiveRow, arrivals: Arrivals, waits: np.ndarray, by_rank: dict[int, RankMeasurements]
) -> CollectiveRow:
    """Add seconds, exposed share and bus bandwidth to a row, as far as arrivals provide them."""
    if row.rank not in arrivals.ranks:
        return with_bandwidth(row)
    number, num_steps = arrivals.ranks.index(row.rank), by_rank[row.rank].num_steps + 1
    if not arrivals.places.meets_once:
        rows = [one for one in by_rank[row.rank].collectives if one.seconds is not None]
        timed_s = sum(one.seconds or 0.0 for one in rows)
        share = (row.seconds or 0.0) / timed_s if timed_s > 0 else 0.0
        return with_bandwidth(row, waited_s=share * float(waits[number].mean()) * num_steps)
    carries_gradients = row.seconds is None and row.operation == ALL_REDUCE and row.exposed_share is None
    if not carries_gradients or row.num_bytes < _largest(by_rank[row.rank].collectives):
        return with_bandwidth(row)
    with np.errstate(invalid="ignore"):
        first = arrivals.first_ready[number]
        last = np.nanmax(arrivals.times[number], axis=1)
    met = arrivals.met[number]
    seconds, alone = float(np.maximum(0.0, met - first).mean()), float(np.maximum(0.0, met - last).mean())
    if not seconds > 0:
        return row
    timed = dataclasses.replace(row, seconds=seconds * num_steps, exposed_share=min(1.0, alone / seconds))
    together_s = float(in_flight_s(arrivals)[0].mean())
    return with_bandwidth(timed, waited_s=max(0.0, seconds - together_s) * num_steps)


def _largest(rows: Sequence[CollectiveRow]) -> float:
    return max(row.num_bytes for row in rows)


def _means_over_time(steps: np.ndarray, values: np.ndarray, over: Buckets) -> np.ndarray:
    """Mean of the steps in each bucket; buckets without a measured step get the mean of all."""
    places = np.clip((steps - over.first_step) // over.width, 0, over.count - 1)
    counts = np.bincount(places, minlength=over.count)
    sums = np.bincount(places, weights=values, minlength=over.count)
    return np.where(counts > 0, sums / np.maximum(counts, 1), float(values.mean()))


CLOSES_WITHIN = 0.01
"""Largest difference between a step and the sum of its parts, as a share of the step."""
STEP = "step"
"""Column of whole steps, next to those of phases."""
PAUSES = "pauses"
"""Column of the garbage collector's pauses, which occur within phases."""


def run_profile(
    measured: Sequence[RankMeasurements], *, goodput: Goodput | None = None, traced_steps: int = 0
) -> RunProfile | None:
    """Return the profile of all ranks; None if no rank measured a step. traced_steps: number of final steps slowed down
    by a trace."""
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
    """Missing measurements, with their ranks unless all are concerned."""
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
