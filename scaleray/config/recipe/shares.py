"""How many samples of a step each worker takes when workers are not equally fast.

A synchronous step ends with its slowest worker, so the shares that are best make all of them end together: in
proportion to speed. Speeds are samples per second, or any multiple of that; shares are whole samples that add up to
the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence

SMOOTHING = 0.5  # weight of a new measurement: two bad ones in a row move the shares, a single one by half
LEAST_GAIN = 0.03  # least saved share of the step time: a change throws away what was read ahead
MOST_LISTED = 16  # largest number of workers listed in one sentence


def shares_by_speed(speeds: Sequence[float], *, total: int, smallest: float) -> tuple[int, ...]:
    """Whole shares of `total` samples that let the slowest worker be done as early as possible, in order of rank.

    Each worker has at least one sample and, but for rounding down, `smallest` of an equal share. total: at least as
    many samples as there are workers.
    """
    least = max(1, int(smallest * total / len(speeds)))
    shares = [int(share) for share in _proportional(speeds, total=total, least=least)]
    # whole samples: those left over go, one by one, to the worker that would be done with it first
    for _ in range(total - sum(shares)):
        first = min(range(len(speeds)), key=lambda rank: ((shares[rank] + 1) / speeds[rank], rank))
        shares[first] += 1
    return tuple(shares)


def step_time(shares: Sequence[int], speeds: Sequence[float]) -> float:
    """Time at which the last worker is done, if each computes as many samples per second as `speeds` says."""
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))


def is_worth_it(shares: Sequence[int], before: Sequence[int], speeds: Sequence[float]) -> bool:
    """Whether other shares than before shorten the step enough to change them."""
    return step_time(shares, speeds) < (1 - LEAST_GAIN) * step_time(before, speeds)


def smoothed(measured: Sequence[float], before: Sequence[float] | None) -> tuple[float, ...] | None:
    """Speeds after one more measurement; None if there is none yet.

    A speed of 0 is a worker that has not been measured: it keeps its speed, or gets the mean of the others.
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
    """Whole shares that differ by one sample at most, the larger ones first."""
    share, rest = divmod(total, workers)
    return tuple(share + (rank < rest) for rank in range(workers))


def share_of(shares: Sequence[int], rank: int, *, num_rows: int) -> slice:
    """A worker's part of a batch of `num_rows`, which is cut like a full one; the parts of all ranks are the batch."""
    total, before = sum(shares), sum(shares[:rank])
    return slice(before * num_rows // total, (before + shares[rank]) * num_rows // total)


def described(shares: Sequence[int], speeds: Sequence[float] | None) -> str:
    """The shares as text, such as `shares of 64 samples: 40 + 24, speeds 1.6 : 1`; for many workers only the
    extremes."""
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
    """Shares in proportion to speed, none below `least`: a worker that would have less gets `least`, and the
    others share the rest."""
    held: set[int] = set()
    while True:
        rest = total - least * len(held)
        speed = sum(s for rank, s in enumerate(speeds) if rank not in held)
        shares = [float(least) if rank in held else rest * s / speed for rank, s in enumerate(speeds)]
        below = {rank for rank, share in enumerate(shares) if share < least}
        if not below - held:
            return shares
        held |= below
