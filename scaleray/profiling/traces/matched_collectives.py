"""Collectives matched across the traces of several ranks, and the lateness of each rank.

NCCL kernels with `Seq` are matched by this number, which is the same on all ranks of a group. Otherwise, the n-th call
of a name in a group on one rank matches the n-th on the others, which is correct for traces of the same steps.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scaleray.profiling.traces.kernel_kinds import Kind, kinds_of
from scaleray.profiling.traces.trace import Trace

_ITEM_BYTES = {
    "double": 8, "long": 8, "long int": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2, "short": 2, "byte": 1,
    "char": 1, "bool": 1, "unsigned char": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Collective:
    """One rank's part in a collective."""

    event: int
    """Index of the event in the trace."""
    group: str
    """Name of the process group; empty if the trace lacks it, as with gloo."""
    group_size: int | None
    operation: str
    sequence: int | None
    num_bytes: int | None
    """Payload contributed by this rank; None if the trace lacks it."""
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class MatchedCollective:
    """One collective on all traced ranks that took part."""

    group: str
    operation: str
    number: int
    by_sequence: bool
    """Whether `number` is NCCL's own; otherwise it counts calls of this name in the group."""
    parts: Mapping[int, Collective]
    """Parts of the collective, by rank."""


def collectives_of(trace: Trace) -> list[Collective]:
    """Return the collectives of one rank, ordered by start."""
    found = []
    communicates = np.flatnonzero(kinds_of(trace) == Kind.COMMUNICATION)
    for event in communicates[np.argsort(trace.start[communicates], kind="stable")].tolist():
        arguments = trace.messages.get(event, {})
        sequence, size = arguments.get("Seq"), arguments.get("Group size")
        found.append(
            Collective(
                event=event,
                group=str(arguments.get("Process Group Name", "")),
                group_size=int(size) if size is not None else None,
                operation=str(arguments.get("Collective name") or _plain(trace.name_of(event))),
                sequence=int(sequence) if sequence is not None else None,
                num_bytes=_num_bytes(arguments),
                start_ns=int(trace.start[event]),
                end_ns=int(trace.end[event]),
            )
        )
    return found


def join(collectives: Mapping[int, list[Collective]]) -> list[MatchedCollective]:
    """Match collectives of at least two ranks, given by rank number; ordered by the first rank's starts."""
    meetings: dict[tuple[str, str, int, bool], dict[int, Collective]] = {}
    for rank in sorted(collectives):
        calls: Counter[tuple[str, str]] = Counter()
        for each in collectives[rank]:
            key = (each.group, each.operation)
            number = calls[key] if each.sequence is None else each.sequence
            calls[key] += 1
            meetings.setdefault((*key, number, each.sequence is not None), {})[rank] = each
    return [
        MatchedCollective(group, operation, number, by_sequence, parts)
        for (group, operation, number, by_sequence), parts in meetings.items()
        if len(parts) > 1
    ]


def lateness_ns(meetings: list[MatchedCollective], offsets: Mapping[int, int]) -> dict[int, float]:
    """Median delay of each rank behind the first one over all matched collectives, on the clock of the first rank.

    offsets: nanoseconds by which each rank's clock is ahead.
    """
    late: dict[int, list[int]] = {}
    for meeting in meetings:
        starts = {rank: part.start_ns - offsets.get(rank, 0) for rank, part in meeting.parts.items()}
        first = min(starts.values())
        for rank, start in starts.items():
            late.setdefault(rank, []).append(start - first)
    return {rank: float(np.median(values)) for rank, values in sorted(late.items())}


def _plain(name: str) -> str:
    """`all_reduce` for `gloo:all_reduce`, `AllReduce` for `ncclKernel_AllReduce_RING_LL_Sum_float(...)`."""
    if ":" in name.split("(")[0]:
        return name.split(":", 1)[1]
    parts = name.split("(")[0].split("_")
    return parts[1] if len(parts) > 1 else name


def _num_bytes(arguments: Mapping[str, object]) -> int | None:
    elements, dtype = arguments.get("In msg nelems"), arguments.get("dtype")
    if isinstance(elements, int) and isinstance(dtype, str):
        item = _ITEM_BYTES.get(dtype.lower())
        return elements * item if item else None
    shapes, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not isinstance(shapes, list) or not isinstance(types, list):
        return None
    items = [_ITEM_BYTES.get(str(each).lower().removeprefix("c10::")) for each in types]
    if not shapes or len(items) != len(shapes) or not all(items):
        return None
    return sum(math.prod(shape) * item for shape, item in zip(shapes, items, strict=True) if item)
