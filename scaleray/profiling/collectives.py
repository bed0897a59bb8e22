"""Cost of collectives: bytes on the busiest link, and the time that a rank waited for them.

Used by profiling/run_profile (rows of a record). Bus bandwidth is that of the collective's own group, by the number of
its ranks: it can be compared with the speed of a link for any operation. Source: NCCL tests, PERFORMANCE.md.
"""

from __future__ import annotations

import dataclasses

from scaleray.records.profile_record import CollectiveRow

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"
BROADCAST, ALL_TO_ALL, SEND = "broadcast", "all_to_all", "send"


def bus_bytes(operation: str, num_bytes: float, group_size: int) -> float:
    """Bytes that the busiest link carries when each rank of a group gives `num_bytes` to a collective.

    With the best algorithms: an all-reduce passes a payload on nearly twice, an all-gather passes on what the others
    gave, a reduce-scatter and an all-to-all all but a rank's own part, a broadcast and a send all of it, once.
    """
    others = group_size - 1
    if others < 1:
        return 0.0
    factor = {
        ALL_REDUCE: 2 * others / group_size,
        ALL_GATHER: others,
        REDUCE_SCATTER: others / group_size,
        ALL_TO_ALL: others / group_size,
    }
    return num_bytes * factor.get(operation, 1.0)


def with_bandwidth(row: CollectiveRow, waited_s: float = 0.0) -> CollectiveRow:
    """The row with its bus bandwidth. waited_s: part of its seconds in which another rank had not come yet, which says
    nothing of the link. Those of sends are the wait for what a neighbour computes, most of all: they have none."""
    if row.seconds is None or row.seconds - waited_s <= 0 or row.operation == SEND:
        return row
    rate = bus_bytes(row.operation, row.num_bytes, row.group_size) / (row.seconds - waited_s)
    return dataclasses.replace(row, bus_bandwidth=rate)
