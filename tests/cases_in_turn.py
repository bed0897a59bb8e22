"""Which of the many combinations of settings a run of the tests takes: some always, the others in turn."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

PART = os.environ.get("PART", "")
"""Part of the combinations that are run, such as 3/8; empty is all of them."""


def is_in_part(name: str, part: str) -> bool:
    """Whether the combination of that name belongs to a part. It is in the same one on every machine."""
    number, parts = (int(word) for word in part.split("/"))
    if not 1 <= number <= parts:
        raise ValueError(f"PART is {part}, but there are the parts 1/{parts} to {parts}/{parts}")
    return zlib.crc32(name.encode()) % parts == number - 1


def showing_each_value(cases: Sequence[Mapping[str, object]]) -> Iterator[int]:
    """Numbers of a few cases in which every value of every parameter occurs. A case: parameter -> value."""
    # the same object in all its cases, which need not be hashable
    values = [{(name, id(value)) for name, value in case.items()} for case in cases]
    unseen: set[tuple[str, int]] = set().union(*values)
    while unseen:
        best = max(range(len(cases)), key=lambda number: len(values[number] & unseen))
        unseen -= values[best]
        yield best


def by_function(names: Iterable[str]) -> dict[str, list[int]]:
    """Numbers of the parametrised tests of each function."""
    found: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        found.setdefault(name.partition("[")[0], []).append(number)
    return found
