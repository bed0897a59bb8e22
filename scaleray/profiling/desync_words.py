"""Description of a hang: the collective, the missing ranks, each rank's source line."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from scaleray.profiling.desync import Desync, Kind, called_from
from scaleray.records.hangs import RankDump, place_of


def in_words(found: Desync, dumps: Mapping[int, RankDump], *, most_lines: int = 6) -> str:
    """Describe the fault in a sentence, followed by the source line of each rank of the group."""
    said = [_sentence(found)]
    if found.hint:
        said.append(found.hint)
    said += ranks_by_line({rank: dumps[rank] for rank in found.group.ranks if rank in dumps}, most_lines=most_lines)
    silent = [rank for rank in found.group.ranks if rank not in dumps]
    if silent:
        said.append(f"{ranks(silent)} left no record")
    return "\n  ".join(said)


def ranks_by_line(dumps: Mapping[int, RankDump], *, most_lines: int = 6) -> list[str]:
    """Ranks grouped by source line, smallest group first (the outliers)."""
    places: dict[tuple[str, str], list[int]] = {}
    for rank, dump in sorted(dumps.items()):
        if dump.stands_on:
            why = f" ({dump.why})" if dump.calls is None and dump.why else ""
            places.setdefault((place_of(dump.stands_on), why), []).append(rank)
    found = sorted(places.items(), key=lambda item: (len(item[1]), item[1]))
    said = [f"{ranks(at)} {'is' if len(at) == 1 else 'are'} at {where}{why}" for (where, why), at in found]
    return said[:most_lines] + ([f"and at {len(said) - most_lines} other places"] if len(said) > most_lines else [])


def _sentence(found: Desync) -> str:
    group = found.group.description if found.group.description not in ("", "undefined") else found.group.name
    what = f"collective {found.number} of group {group}"
    if found.odd:
        kinds: dict[str, list[int]] = {}
        for rank, call in sorted(found.calls.items()):
            kinds.setdefault(f"{call}{called_from(call)}", []).append(rank)
        calls = " and ".join(f"{call} on {ranks(own)}" for call, own in kinds.items())
        more = f"; {ranks(found.missing)} did not arrive, or left no record" if found.missing else ""
        return f"{what} differs ({found.kind}): {calls}{more}"
    verb = "waits" if len(found.waiting) == 1 else "wait"
    wait = f"{ranks(found.waiting)} {verb} in {what}, {found.call}{called_from(found.call)}"
    if found.kind == Kind.UNFINISHED:
        return f"{wait}: all ranks reached it but it does not end: check the network between them"
    text = f"{wait}: {ranks(found.missing)} did not arrive"
    if found.and_then is not None:
        text += f", since {_sentence(found.and_then)}"
    return text


def ranks(numbers: Iterable[int]) -> str:
    """Ranks in short form: rank 3, or ranks 0, 2-7."""
    ordered = sorted(numbers)
    runs = []
    for _, run in itertools.groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        members = [str(number) for _, number in run]
        runs += [f"{members[0]}-{members[-1]}"] if len(members) > 2 else members
    return f"rank{'' if len(ordered) == 1 else 's'} {', '.join(runs)}"
