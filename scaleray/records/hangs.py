"""State of each rank when a training hung: its last collectives, and the current source lines of its threads.

Each rank writes its own state, as JSON without pickles, into `hangs/` of the run's folder; `profiling/desync.py`
analyses all of them together.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scaleray.records.json_record import JsonRecord

HANGS = "hangs"
"""Folder of a run with a subfolder for each stalled group of workers, named after its start time."""
CALLS_KEPT, CALLS_OF_A_GROUP = 500, 20
"""Number of calls of collectives in a dump: the newest ones overall, and the newest of each group."""
LINES_KEPT = 4
"""Number of innermost lines of the user's code shown for a call or a thread: the caller of a helper around a collective
is more informative than the helper."""


def dump_name(rank: int) -> str:
    """File name of a rank's own dump."""
    return f"rank-{rank:05d}.json"


def stacks_name(rank: int) -> str:
    """File name for the stacks of a rank that cannot write a dump, see `training/health/stack_file.py`."""
    return f"rank-{rank:05d}.txt"


@dataclass(frozen=True)
class Line:
    """Python source line that a thread is executing, or from which a collective was called."""

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
    """Text of the innermost of these lines and its caller."""
    return ", called at ".join(str(line) for line in lines[:2])


@dataclass(frozen=True)
class Group:
    """A process group. Its name is the same on all of its ranks."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A rank's call of a collective, or of a message to another rank."""

    group: str
    backend: str
    number: int
    """Sequence number of the collective in its group; all ranks should make the same call under the same number."""
    operation: str
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_done: bool
    """Whether it has ended, successfully or not."""
    called_at_ns: int
    is_message: bool = False
    """Whether it involves only two ranks; such calls have separate sequence numbers."""
    lines: tuple[Line, ...] = ()
    """Lines of the user's code from which it was called, innermost first; empty if none called it, as in a backward
    pass."""

    def __str__(self) -> str:
        sizes = ", ".join(str(list(size)) for size in self.input_sizes or self.output_sizes)
        what = " ".join(filter(None, [", ".join(dict.fromkeys(self.dtypes)), sizes]))
        return f"{self.operation} {what}".strip()


@dataclass(frozen=True)
class Thread:
    """A thread of a rank's process, and its current lines, innermost first."""

    name: str
    lines: tuple[Line, ...]
    trains: bool = False


@dataclass(frozen=True)
class RankDump(JsonRecord):
    """What one rank was doing, by its own report."""

    rank: int
    world_size: int
    node: str
    process: int
    why: str
    """Reason for the dump, as text."""
    step: int
    """Number of completed steps."""
    phase: str
    since_s: float
    """Seconds in the current phase."""
    recorded_at: float
    """Time of the dump, in seconds since 1970."""
    torch: str
    groups: tuple[Group, ...] = ()
    calls: tuple[Call, ...] | None = None
    """Its last collectives, in the order of their calls; None if torch's Flight Recorder could not be read."""
    has_all_calls: bool = False
    """Whether no call of this process is missing."""
    is_after_error: bool = False
    """Whether a collective failed earlier; all of its calls then appear finished."""
    stands_on: tuple[Line, ...] = ()
    """Current lines of the training thread in the user's code, innermost first; without any, its innermost line."""
    threads: tuple[Thread, ...] = ()
    is_complete: bool = True
    """Whether the threads' lines are included; a dump is first written without them."""

    def lines(self) -> list[str]:
        """Lines with the rank, its activity, and its source lines."""
        where = f"rank {self.rank} in `{self.phase}` of step {self.step + 1}, {self.why}"
        return [where, *map(str, self.stands_on)]


def calls_of(entries: Sequence[dict[str, Any]], lines: Sequence[tuple[Line, ...]]) -> tuple[Call, ...]:
    """Return the newest calls of torch's Flight Recorder, each with its source lines. entries: oldest first."""
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
