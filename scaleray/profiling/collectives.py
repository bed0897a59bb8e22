"""Cost of collectives: bytes on the busiest link and waiting time; also short names of layers.

Used by profiling/run_profile (rows of a record). Bus bandwidth is computed for the collective's own group size, so that
it is comparable with the speed of a link for any operation. Source: NCCL tests, PERFORMANCE.md.
"""

import dataclasses
from collections.abc import Iterable

from scaleray.records.profile_record import CollectiveRow

MOST_PARTS = 4
"""Maximum number of parts written out in a list of layers."""


def layer_range(parameters: Iterable[str]) -> str:
    """Layers of these parameters, in the order of the model; consecutive numbers are joined.

    A layer is the part of the name up to its first number (`encoder.layers.5` of `encoder.layers.5.attention.weight`),
    otherwise the outermost module (`head`); a parameter of the model itself counts as a layer.
    """
    numbers: dict[str, list[int]] = {}
    for name in parameters:
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts[:-1]) if part.isdecimal()), None)
        if place is None:
            numbers.setdefault(parts[0], [])
        else:
            numbers.setdefault(".".join([*parts[:place], ""]), []).append(int(parts[place]))
    found = [f"{prefix}{run}" for prefix, own in numbers.items() for run in (_runs(own) if own else [""])]
    if len(found) > MOST_PARTS:
        found = [*found[: MOST_PARTS - 1], f"{len(found) - MOST_PARTS + 1} more"]
    return ", ".join(found)


def _runs(numbers: Iterable[int]) -> list[str]:
    """Numbers as text with ranges, such as `0-3`, `7`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]


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
