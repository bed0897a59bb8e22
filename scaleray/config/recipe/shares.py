"""Samples of a step per worker, for workers of different speeds.

A synchronous step ends with its slowest worker, so the best shares let all workers finish together: in proportion to
speed. Speeds are samples per second, or any multiple of that; shares are whole samples that sum to the global batch.
"""

from collections.abc import Sequence

SMOOTHING = 0.5  # weight of a new measurement: a single bad one changes the shares only by half
LEAST_GAIN = 0.03  # smallest saved share of the step time: a change discards what was read ahead
MOST_LISTED = 16  # most workers listed in one sentence


def shares_by_speed(speeds: Sequence[float], *, total: int, smallest: float) -> tuple[int, ...]:
    """Whole shares of `total` samples that let the slowest worker finish as early as possible, in order of rank.

    Each worker has at least one sample and, apart from rounding down, `smallest` of an equal share. total: must be at
    least the number of workers.
    """
    least = max(1, int(smallest * total / len(speeds)))
    shares = [int(share) for share in _proportional(speeds, total=total, least=least)]
    # whole samples: the remaining ones go, one by one, to the worker that would finish with it first
    for _ in range(total - sum(shares)):
        first = min(range(len(speeds)), key=lambda rank: ((shares[rank] + 1) / speeds[rank], rank))
        shares[first] += 1
    return tuple(shares)


def step_time(shares: Sequence[int], speeds: Sequence[float]) -> float:
    """Time at which the last worker finishes, if workers compute `speeds` samples per second."""
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))


def is_worth_it(shares: Sequence[int], before: Sequence[int], speeds: Sequence[float]) -> bool:
    """Whether new shares shorten the step enough to justify a change."""
    return step_time(shares, speeds) < (1 - LEAST_GAIN) * step_time(before, speeds)


def smoothed(measured: Sequence[float], before: Sequence[float] | None) -> tuple[float, ...] | None:
    """Smoothed speeds after another measurement; None if there is none yet.

    A speed of 0 means that a worker was not measured: it keeps its speed, or gets the mean of the others.
    """
    known = [speed for speed in measured if speed > 0]
    if not known:
        return None if before is None else tuple(before)
    if before is None:
        return tuple(speed or sum(known) / len(known) for speed in measured)
    return tuple(
        old + SMOOTHING * (speed - old) if speed > 0 else old for speed, old in zip(measured, before, strict=True)
    )


def equal_shares(workers: int, *, total: int) -> tuple[int, ...]:
    """Whole shares that differ by at most one sample, larger ones first."""
    share, rest = divmod(total, workers)
    return tuple(share + (rank < rest) for rank in range(workers))


def share_of(shares: Sequence[int], rank: int, *, num_rows: int) -> slice:
    """Slice of a rank in a batch of `num_rows`, divided like a full batch; the slices of all ranks cover the batch."""
    total, before = sum(shares), sum(shares[:rank])
    return slice(before * num_rows // total, (before + shares[rank]) * num_rows // total)


def described(shares: Sequence[int], speeds: Sequence[float] | None) -> str:
    """The shares as text, such as `shares of 64 samples: 40 + 24, speeds 1.6 : 1`; only the extremes for many
    workers."""
    if len(shares) > MOST_LISTED:
        text = f"shares of {sum(shares)} samples: {min(shares)} to {max(shares)} on {len(shares)} workers"
        return (
            text
            if speeds is None
            else f"{text}, the fastest {max(speeds) / min(speeds):.3g} times as fast as the slowest"
        )
    text = f"shares of {sum(shares)} samples: {' + '.join(map(str, shares))}"
    if speeds is None:
        return text
    return f"{text}, speeds {' : '.join(f'{speed / min(speeds):.3g}' for speed in speeds)}"


def _proportional(speeds: Sequence[float], *, total: int, least: int) -> list[float]:
    """Shares in proportion to speed, none below `least`: a worker that would have less gets `least`, and the others
    share the rest."""
    held: set[int] = set()
    while True:
        rest = total - least * len(held)
        speed = sum(s for rank, s in enumerate(speeds) if rank not in held)
        shares = [float(least) if rank in held else rest * s / speed for rank, s in enumerate(speeds)]
        below = {rank for rank, share in enumerate(shares) if share < least}
        if not below - held:
            return shares
        held |= below
