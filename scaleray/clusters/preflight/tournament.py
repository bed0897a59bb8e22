"""Schedule that measures all pairs of ends, with no end in two pairs at once, and detection of slow links. A tournament
of n ends takes n - 1 rounds (n if n is odd) by the circle method, which fixes one end and rotates the others."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scaleray.records.doctor_record import LinkRate

NUM_LINKS_OF_THREE = 3
SLOW_SHARE_OF_PAIRS = 0.75
"""Share of an end's pairs that must be slow for the end itself to count as slow instead of its links; its adapter,
cable or machine is then the common cause."""


def rounds_of(num_ends: int) -> list[list[tuple[int, int]]]:
    """Rounds of a tournament, each with disjoint pairs of numbers below `num_ends`, the smaller number first."""
    if num_ends < 2:
        return []
    ends: list[int | None] = [*range(num_ends), *([None] if num_ends % 2 else [])]
    half, found = len(ends) // 2, []
    for _ in range(len(ends) - 1):
        pairs = zip(ends[:half], reversed(ends[half:]), strict=True)
        found.append(sorted((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None))
        ends = [ends[0], ends[-1], *ends[1:-1]]
    return found


def partner_of(end: int, pairs: Sequence[tuple[int, int]]) -> int | None:
    """Partner of an end in a round; None if it pauses."""
    for one, other in pairs:
        if end in (one, other):
            return other if end == one else one
    return None


@dataclass(frozen=True)
class Slow:
    """Ends that are slow with nearly all partners, and slow links between other ends. usual: typical bytes per second
    of a link. share: rate of the slowest link relative to `usual`."""

    ends: list[str]
    links: list[LinkRate]
    usual: float
    share: float


def slow_links(pairs: Sequence[LinkRate], *, below: float) -> Slow:
    """Find links slower than a share of the typical rate, and ends that are their common cause. The typical rate is the
    median, or the fastest of three links, since a slow end affects two of them. A single link cannot be compared."""
    if not pairs:
        return Slow([], [], 0.0, 1.0)
    # the upper of the two middle values: if half of the links are slow, they are not the typical ones
    rates = [pair.bytes_per_s for pair in pairs]
    usual = statistics.median_high(rates) if len(rates) > NUM_LINKS_OF_THREE else max(rates)
    slow = [pair for pair in pairs if pair.bytes_per_s < below * usual]
    ends = _slow_ends(pairs, slow)
    links = [pair for pair in slow if pair.one not in ends and pair.other not in ends]
    share = min(pair.bytes_per_s for pair in pairs) / usual
    return Slow(ends, sorted(links, key=lambda pair: pair.bytes_per_s), usual, share)


def _slow_ends(pairs: Sequence[LinkRate], slow: Sequence[LinkRate]) -> list[str]:
    """Ends with mostly slow pairs, worst first; pairs that one of them explains do not count for others."""
    found: list[str] = []
    while True:
        left, all_left = ([p for p in some if not {p.one, p.other} & {*found}] for some in (slow, pairs))
        counts = {end: sum(end in (p.one, p.other) for p in all_left) for p in left for end in (p.one, p.other)}
        bad = {end: sum(end in (p.one, p.other) for p in left) for end in counts}
        guilty = [end for end in counts if bad[end] >= 2 and bad[end] >= SLOW_SHARE_OF_PAIRS * counts[end]]
        if not guilty:
            return found
        found.append(max(guilty, key=lambda end: (bad[end] / counts[end], bad[end], end)))
