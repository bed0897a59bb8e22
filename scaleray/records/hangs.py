"""Activity of each rank when a training hung: its last collectives, and the lines of its threads.

Written by the rank itself, as JSON without pickles, into `hangs/` of the run's folder; `profiling/desync.py` reads them
together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scaleray.records.json_record import JsonRecord

HANGS = "hangs"
"""Folder of a run with a subfolder for each stalled group of workers, named by its start time."""
CALLS_KEPT, CALLS_OF_A_GROUP = 500, 20
"""Calls of collectives, the newest of all and of each group, that a dump has."""
LINES_KEPT = 4
"""Lines of the user's code, the innermost, that are shown for a call or a thread: the caller of a helper that wraps a
collective is more informative than the helper.
"""


def dump_name(rank: int) -> str:
    """File of a rank's own account."""
    return f"rank-{rank:05d}.json"


def stacks_name(rank: int) -> str:
    """File of the stacks of a rank that cannot report, see `training/health/stack_file.py`."""
    return f"rank-{rank:05d}.txt"


@dataclass(frozen=True)
class Line:
    """A line of Python at which a thread is, or from which a collective was called."""

    file: str
    number: int
    function: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.number} in {self.function}" + (f": {self.code}" if self.code else "")

    @property
    def place(self) -> tuple[str, int]:
        """Key that identifies a line."""
        return self.file, self.number


def place_of(lines: Sequence[Line]) -> str:
    """Innermost of some lines, and its caller."""
    return ", called at ".join(str(line) for line in lines[:2])


@dataclass(frozen=True)
class Group:
    """A process group, under a name that is the same on all of its ranks."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A collective, or a message to one other rank, as called by a rank."""

    group: str
    backend: str
    number: int
    """Sequence number of the collective in its group: all ranks should call the same one under the same number."""
    operation: str
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_done: bool
    """Whether it is finished, with success or without."""
    called_at_ns: int
    is_message: bool = False
    """Whether it goes between two ranks only; such calls have sequence numbers of their own."""
    lines: tuple[Line, ...] = ()
    """Lines of the user's code that it was called from, innermost first; none where there are none, as in a backward
    pass."""

    def __str__(self) -> str:
        sizes = ", ".join(str(list(size)) for size in self.input_sizes or self.output_sizes)
        what = " ".join(filter(None, [", ".join(dict.fromkeys(self.dtypes)), sizes]))
        return f"{self.operation} {what}".strip()


@dataclass(frozen=True)
class Thread:
    """A thread of a rank's process, and the lines at which it is, innermost first."""

    name: str
    lines: tuple[Line, ...]
    trains: bool = False


@dataclass(frozen=True)
class RankDump(JsonRecord):
    """Activity of one rank, by its own report."""

    rank: int
    world_size: int
    node: str
    process: int
    why: str
    """Reason for the dump, as text."""
    step: int
    """Complete steps."""
    phase: str
    since_s: float
    """Seconds in the current phase."""
    recorded_at: float
    """Wall clock, in seconds since 1970."""
    torch: str
    groups: tuple[Group, ...] = ()
    calls: tuple[Call, ...] | None = None
    """Its last collectives, in the order of their calls; None where torch's Flight Recorder could not be read."""
    has_all_calls: bool = False
    """Whether no call of this process is missing."""
    is_after_error: bool = False
    """Whether a collective failed before: its calls all look done then."""
    stands_on: tuple[Line, ...] = ()
    """Current lines of the training thread in the user's code, innermost first, or its innermost line."""
    threads: tuple[Thread, ...] = ()
    is_complete: bool = True
    """Whether it has the threads' lines: a dump is written without them first."""

    def lines(self) -> list[str]:
        """The rank, its activity, and its lines."""
        where = f"rank {self.rank} in `{self.phase}` of step {self.step + 1}, {self.why}"
        return [where, *map(str, self.stands_on)]


def calls_of(entries: Sequence[dict[str, Any]], lines: Sequence[tuple[Line, ...]]) -> tuple[Call, ...]:
    """The newest calls of torch's Flight Recorder, each with the lines that it came from. entries: oldest first."""
    calls = [_call(entry, own) for entry, own in zip(entries, lines, strict=True)]
    of_group: Counter[tuple[str, str]] = Counter()
    kept = []
    for count, call in enumerate(reversed(calls)):
        of_group[call.group, call.backend] += 1
        if count < CALLS_KEPT or of_group[call.group, call.backend] <= CALLS_OF_A_GROUP:
            kept.append(call)
    return tuple(reversed(kept))


def are_all(entries: Sequence[dict[str, Any]], calls: Sequence[Call]) -> bool:
    """Whether these are all calls of the process."""
    oldest: dict[str, int] = {}
    for entry in entries:  # each backend counts its own
        oldest.setdefault(str(entry["profiling_name"]).partition(":")[0], int(entry["record_id"]))
    return len(calls) == len(entries) and not any(oldest.values())


def _call(entry: dict[str, Any], lines: tuple[Line, ...]) -> Call:
    backend, _, operation = str(entry["profiling_name"]).partition(":")
    is_message = bool(entry.get("is_p2p"))
    return Call(
        group=str(entry["process_group"][0]),
        backend=backend,
        number=int(entry["p2p_seq_id"] if is_message else entry["collective_seq_id"]),
        operation=operation,
        input_sizes=_sizes(entry["input_sizes"]),
        output_sizes=_sizes(entry["output_sizes"]),
        dtypes=tuple(str(kind).lower() for kind in entry["input_dtypes"] or entry["output_dtypes"]),
        is_done=bool(entry.get("retired")) or entry.get("state") == "completed",
        called_at_ns=int(entry["time_created_ns"]),
        is_message=is_message,
        lines=lines,
    )


def _sizes(sizes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(length) for length in size) for size in sizes)
