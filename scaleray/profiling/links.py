"""Slow links between two ranks: each pair is measured alone and compared with the others.

A collective cannot show them: in an all-reduce, all ranks wait equally for the slowest link. With two ranks there is
one pair and nothing to compare it with. Used by profiling/run_profile and profiling/verdict.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scaleray.records.profile_record import LinkRow

SLOW = 0.5
"""Share of the median bandwidth below which a link is slow; links on a shared machine vary by less."""


EVERY_OTHER = "any"
"""Placeholder for the other end if all links of a rank are slow."""


@dataclass(frozen=True)
class SlowLink:
    """Pair of ranks with a slow link, or a single rank in `ranks` if all of its links are slow."""

    ranks: tuple[int, ...]
    bytes_per_s: float
    usual: float
    """Median bandwidth of the pairs."""
    one_way: tuple[int, int] | None = None
    """Source and destination, if only this direction is slow."""


def slow_link(rows: Sequence[LinkRow]) -> SlowLink | None:
    """Return the slowest link if it is slow compared with the others; None if links are alike or too few to compare."""
    ways = {(row.sender, row.receiver): row.bytes_per_s for row in rows}
    pairs: dict[tuple[int, int], float] = {}
    for (sender, receiver), rate in ways.items():
        pair = min(sender, receiver), max(sender, receiver)
        pairs[pair] = min(rate, pairs.get(pair, rate))
    if len(pairs) < 3:
        return None
    usual, slowest = statistics.median(pairs.values()), min(pairs, key=lambda pair: pairs[pair])
    slow = {pair for pair, rate in pairs.items() if rate < SLOW * usual}
    for rank in slowest:  # if all links of a rank are equally slow, the rank's own connection is the cause
        own = {pair: rate for pair, rate in pairs.items() if rank in pair}
        others = [rate for pair, rate in pairs.items() if pair not in own]
        best = max(own.values())
        if others and best < SLOW * statistics.median(others) and pairs[slowest] >= SLOW * best:
            return SlowLink((rank,), best, statistics.median(others))
    if slowest not in slow:
        return None
    there, back = ways.get(slowest, 0.0), ways.get((slowest[1], slowest[0]), 0.0)
    one_way = None
    if max(there, back) >= SLOW * usual:
        one_way = slowest if there < back else (slowest[1], slowest[0])
    return SlowLink(slowest, pairs[slowest], usual, one_way)


def slowest(rows: Sequence[LinkRow]) -> tuple[str, str, float, float | None]:
    """Return the slowest link: source, destination, its bandwidth, and that of the others, or None if there are too few
    to compare. If all links of a rank are equally slow, return that rank and its best link.
    """
    found = slow_link(rows)
    if found is not None and len(found.ranks) == 1:
        return str(found.ranks[0]), EVERY_OTHER, found.bytes_per_s, found.usual
    least = min(rows, key=lambda row: row.bytes_per_s)
    others = {frozenset((row.sender, row.receiver)) for row in rows}
    usual = found.usual if found is not None else statistics.median(row.bytes_per_s for row in rows)
    return str(least.sender), str(least.receiver), least.bytes_per_s, usual if len(others) >= 3 else None


def to_text(found: SlowLink) -> str:
    """Describe the link, with its bandwidth and that of the others."""
    if len(found.ranks) == 1:
        who = f"all links of rank {found.ranks[0]} are"
    elif found.one_way is not None:
        who = f"the link from rank {found.one_way[0]} to rank {found.one_way[1]} is"
    else:
        who = f"the link of ranks {found.ranks[0]} and {found.ranks[1]} is"
    return f"{who} slow: {_rate(found.bytes_per_s)}; the others reach {_rate(found.usual)}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.3g} MB/s"


def why_not(rows: Sequence[LinkRow], num_ranks: int) -> str:
    """Reason why no slow link is reported."""
    if num_ranks < 3:
        carries = f"; it reaches {_rate(min(row.bytes_per_s for row in rows))}" if rows else ""
        return f"two ranks have only one link, so there is nothing to compare it with{carries}"
    if not rows:
        return (
            "a run measures its pairs of ranks while the alert slow_link fires, and logs an event; scaleray profile "
            "-c FILE measures them after its steps"
        )
    rates = [row.bytes_per_s for row in rows]
    return f"none is slower than the others, which reach {_rate(min(rates))} to {_rate(max(rates))}"
