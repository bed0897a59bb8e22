"""Find the collective in which a training hangs, and the ranks that caused it, from each rank's record of its last
calls.

Ranks of a group must call the same collectives in the same order. Their sequence numbers are compared: the training
broke where two ranks made different calls under one number, or a rank never reached a number. Torch's own analyzer
(`torch.distributed.flight_recorder`) does the same for NCCL's dumps; this one also handles ranks without a dump, groups
that wait for each other, and gloo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from scaleray.records.hangs import Call, Group, RankDump, place_of

UNEVEN = ("all_to_all", "all_gather_v", "reduce_scatter_v", "barrier")
"""Prefixes of collectives whose sizes may differ between ranks or that have no size."""
BY_OUTPUT = ("scatter",)
"""Collectives to which only one rank contributes data."""


class Kind(StrEnum):
    """Type of fault."""

    ABSENT = "a rank did not arrive"
    OTHER_CALL = "another collective"
    OTHER_SIZE = "other sizes"
    OTHER_TYPE = "another dtype"
    CIRCLE = "ranks wait for each other in two groups"
    UNFINISHED = "all ranks arrived, but it does not end"


@dataclass(frozen=True)
class Desync:
    """Collective in which a training broke."""

    kind: Kind
    group: Group
    number: int
    """Sequence number in the group."""
    calls: Mapping[int, Call]
    """Call with this number, by rank, for ranks that reached and recorded it."""
    missing: tuple[int, ...] = ()
    """Ranks that did not reach the call, or whose calls are unknown."""
    odd: tuple[int, ...] = ()
    """Ranks that made a different call from the majority."""
    hint: str = ""
    and_then: Desync | None = None
    """Fault at which a missing rank waits, if ranks wait in a cycle."""

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ranks that reached the call."""
        return tuple(sorted(self.calls))

    @property
    def call(self) -> Call:
        """The call made by most ranks."""
        return self.calls[next(rank for rank in self.waiting if rank not in self.odd)]


@dataclass(frozen=True)
class _Calls:
    """Calls of one group through one backend, by rank and number, for ranks that recorded them."""

    group: Group
    of: Mapping[int, Mapping[int, Call]]
    pending: Mapping[int, frozenset[int]]
    unknown: tuple[int, ...]
    """Members of the group whose state is unknown."""
    last: Mapping[int, int] = field(default_factory=dict)


def find(dumps: Mapping[int, RankDump]) -> Desync | None:
    """Return the fault, or None if the dumps do not show it. dumps: by rank; some may be missing."""
    tables = _tables(dumps)
    differences = [found for table in tables if (found := _difference(table)) is not None]
    if differences:
        return min(differences, key=_called_at)
    absences = [found for table in tables if (found := _absence(table)) is not None]
    if absences:
        return _root(absences)
    unfinished = [found for table in tables if (found := _unfinished(table)) is not None]
    return min(unfinished, key=_called_at, default=None)


def _tables(dumps: Mapping[int, RankDump]) -> list[_Calls]:
    groups = {group.name: group for dump in dumps.values() for group in dump.groups}
    found = {(call.group, call.backend) for dump in dumps.values() for call in dump.calls or () if not call.is_message}
    tables = []
    for name, backend in sorted(found):
        group = groups.get(name, Group(name, name, tuple(sorted(dumps))))
        of: dict[int, dict[int, Call]] = {}
        pending: dict[int, frozenset[int]] = {}
        for rank in group.ranks:
            dump = dumps.get(rank)
            if dump is None or dump.calls is None:
                continue
            own = [c for c in dump.calls if (c.group, c.backend) == (name, backend) and not c.is_message]
            if own or dump.has_all_calls:
                of[rank] = {call.number: call for call in own}
                pending[rank] = _pending(dump, own)
        last = {rank: max(calls, default=0) for rank, calls in of.items()}
        tables.append(_Calls(group, of, pending, tuple(r for r in group.ranks if r not in of), last))
    return tables


def _pending(dump: RankDump, own: Sequence[Call]) -> frozenset[int]:
    """Numbers of a rank's unfinished calls. After an error all calls look finished, and the last one is taken as
    failed."""
    newest = max((call.called_at_ns for call in dump.calls or ()), default=0)
    return frozenset(c.number for c in own if not c.is_done or (dump.is_after_error and c.called_at_ns == newest))


def _difference(table: _Calls) -> Desync | None:
    """First call number at which ranks differ."""
    known = {rank: calls for rank, calls in table.of.items() if calls}
    if len(known) < 2:
        return None
    first = max(min(calls) for calls in known.values())
    for number in range(first, max(table.last.values()) + 1):
        calls = {rank: calls[number] for rank, calls in known.items() if number in calls}
        count = Counter(_signature(call) for call in calls.values())
        if len(count) > 1:
            most = max(count.values())
            usual = next(_signature(c) for _, c in sorted(calls.items()) if count[_signature(c)] == most)
            odd = tuple(sorted(rank for rank, call in calls.items() if _signature(call) != usual))
            model = next(rank for rank in sorted(calls) if rank not in odd)
            kind = _kind(calls[model], calls[odd[0]])
            hint = _order_hint(table.of[model], table.of[odd[0]], number, odd[0])
            missing = tuple(r for r in table.group.ranks if r not in calls)
            return Desync(kind, table.group, number, calls, missing, odd, hint)
    return None


def _absence(table: _Calls) -> Desync | None:
    """Call number that some ranks did not reach while others did."""
    if not table.of:
        return None
    lowest, highest = min(table.last.values()), max(table.last.values())
    number = lowest + 1
    behind = [rank for rank, last in table.last.items() if last == lowest]
    if lowest == highest:
        pending = frozenset().union(*table.pending.values())
        if not pending or not table.unknown:
            return None
        number, behind = min(pending), []
    # if a process was killed, ranks that are behind may only have lost it: name both
    missing = tuple(sorted([*behind, *table.unknown]))
    calls = {rank: calls[number] for rank, calls in table.of.items() if number in calls}
    if not calls:
        return None
    hint = _skip_hint(table, behind[0], next(iter(calls))) if behind else ""
    return Desync(Kind.ABSENT, table.group, number, calls, missing, hint=hint)


def _unfinished(table: _Calls) -> Desync | None:
    pending = frozenset().union(*table.pending.values()) if table.pending else frozenset()
    if not pending:
        return None
    number = min(pending)
    return Desync(
        Kind.UNFINISHED,
        table.group,
        number,
        {rank: calls[number] for rank, calls in table.of.items() if number in calls},
    )


def _root(absences: Sequence[Desync]) -> Desync:
    """Root cause among the absences: one whose missing ranks wait in no other group, or else a cycle."""
    ordered = sorted(absences, key=_called_at)
    for found in ordered:
        if any(not _waits(rank, found, absences) for rank in found.missing):
            return found
    first = ordered[0]
    then = next(_waits(rank, first, absences)[0] for rank in first.missing)
    return Desync(Kind.CIRCLE, first.group, first.number, first.calls, first.missing, and_then=then)


def _waits(rank: int, found: Desync, absences: Iterable[Desync]) -> list[Desync]:
    return [other for other in absences if other is not found and rank in other.calls]


def _called_at(found: Desync) -> int:
    return min(call.called_at_ns for call in found.calls.values())


def _signature(call: Call) -> tuple[object, ...]:
    """Properties of a call that must be equal on all ranks."""
    if call.operation.startswith(UNEVEN):
        return call.operation, call.dtypes[:1]
    sizes = call.output_sizes if call.operation in BY_OUTPUT else call.input_sizes
    return call.operation, sizes, tuple(dict.fromkeys(call.dtypes))


def _kind(usual: Call, odd: Call) -> Kind:
    if usual.operation != odd.operation:
        return Kind.OTHER_CALL
    return Kind.OTHER_SIZE if _signature(usual)[1] != _signature(odd)[1] else Kind.OTHER_TYPE


def _order_hint(usual: Mapping[int, Call], odd: Mapping[int, Call], number: int, rank: int) -> str:
    """Explanation of a difference, from the calls before and after it."""
    here, there = usual[number], odd[number]
    after, after_there = usual.get(number + 1), odd.get(number + 1)
    comes_next = after is not None and _signature(after) == _signature(there)
    comes_later = after_there is not None and _signature(after_there) == _signature(here)
    if comes_next and comes_later:
        return f"rank {rank} calls the two in reverse order"
    if comes_next:
        return f"rank {rank} skipped {here}{called_from(here)}"
    if comes_later:
        return f"rank {rank} calls {there}{called_from(there)} before it; the others do not"
    if here.operation == there.operation and _places(here) == _places(there):
        return ""
    for before in sorted((n for n in usual if n < number and n + 1 in usual), reverse=True):
        if _signature(usual[before]) == _signature(here) and _signature(usual[before + 1]) == _signature(there):
            return (
                f"before, {there} came right after {here} on all ranks: rank {rank} skipped the latter, or calls the "
                f"two in reverse order"
            )
    return ""


def _skip_hint(table: _Calls, absent: int, present: int) -> str:
    """Hint that an absent rank skipped a call that resembles its next one, if their source lines differ."""
    lacks, has = table.of[absent], table.of[present]
    for number in sorted(lacks):
        ours, theirs = lacks[number], has.get(number)
        if theirs is None or not ours.lines or not theirs.lines or _places(ours) == _places(theirs):
            continue
        after = has.get(number + 1)
        if after is not None and _places(after) == _places(ours):
            return f"rank {absent} skipped number {number}, which the others called{called_from(theirs)}"
        return ""
    return ""


def _places(call: Call) -> tuple[tuple[str, int], ...]:
    return tuple(line.place for line in call.lines)


def called_from(call: Call) -> str:
    """Source line of a call in brackets, if known."""
    return f" ({place_of(call.lines)})" if call.lines else ""
