"""Cost of collectives: bytes on the busiest link, and the time that a rank waits for them.

Used by profiling/run_profile (rows of a record). Bus bandwidth is computed for the collective's own group size, so that
it is comparable with the speed of a link for any operation. Source: NCCL tests, PERFORMANCE.md.
"""

import dataclasses

from scaleray.records.profile_record import CollectiveRow

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"
BROADCAST, ALL_TO_ALL, SEND = "broadcast", "all_to_all", "send"


def bus_bytes(operation: str, num_bytes: float, group_size: int) -> float:
    """Bytes on the busiest link when each rank of a group contributes `num_bytes` to a collective.

    With optimal algorithms, an all-reduce sends a payload nearly twice, an all-gather forwards the payloads of the
    others, a reduce-scatter and an all-to-all send all but a rank's own part, a broadcast and a send transfer
    everything once.
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
    """Add the bus bandwidth to the row. waited_s: part of its seconds before another rank arrived, which does not
    depend on the link. Sends get none: most of their time is waiting for the neighbour's computation."""
    if row.seconds is None or row.seconds - waited_s <= 0 or row.operation == SEND:
        return row
    rate = bus_bytes(row.operation, row.num_bytes, row.group_size) / (row.seconds - waited_s)
    return dataclasses.replace(row, bus_bandwidth=rate)
