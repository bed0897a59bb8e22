"""torch's Flight Recorder, which stores the last collectives of a process: enabling it and reading its entries.

Its functions are private, so all uses of them are in this file, behind one check; if they are missing or have changed,
a dump has no collectives. With gloo, torch 2.13 fills in neither `state` nor the times; `retired` shows whether a
collective has finished. It also leaves out the names of groups, which are filled in here from the groups themselves."""

import json
import os
import pickle
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from scaleray.common.user_code import user_frames
from scaleray.records.hangs import LINES_KEPT, Group, Line

SIZE_VARIABLE = "TORCH_FR_BUFFER_SIZE"
OLD_VARIABLE = "TORCH_NCCL_TRACE_BUFFER_SIZE"
NUM_CALLS = 2000
"""Number of calls that the recorder stores: several steps of a model with hundreds of collectives per step."""
RECORDERS = ("fr", "nccl")
"""Names of the recorders in torch's functions; NCCL has its own."""


def switch_on() -> None:
    """Record collectives of groups that this process creates from now on, unless an environment variable disables
    it."""
    if OLD_VARIABLE not in os.environ:
        os.environ.setdefault(SIZE_VARIABLE, str(NUM_CALLS))


def entries_without_lines() -> list[dict[str, Any]] | None:
    """Stored calls, oldest first, as JSON values, read without holding Python's lock. None if there is no recorder."""
    return _entries("json", lambda dump: json.loads(dump()))


def entries_with_frames() -> list[dict[str, Any]] | None:
    """Stored calls, each with `frames`: the Python lines that issued it, innermost first."""
    with _without_inductor():
        # torch has no other form with frames; these bytes were made in this very process a moment ago
        return _entries("", lambda dump: pickle.loads(dump(True, True, False)))


def user_lines(entries: Sequence[dict[str, Any]]) -> list[tuple[Line, ...]]:
    """Lines of the user's code from which each call was issued, innermost first."""
    known: dict[tuple[tuple[str, int], ...], tuple[Line, ...]] = {}
    lines = []
    for entry in entries:
        frames = entry.get("frames") or ()
        place = tuple((str(frame["filename"]), int(frame["line"])) for frame in frames)
        if place not in known:
            known[place] = _user_lines(frames)
        lines.append(known[place])
    return lines


def groups() -> tuple[Group, ...]:
    """The process groups to which this rank belongs."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    if not dist.is_available() or not dist.is_initialized():
        return ()
    found = []
    for group, name in list(_world.pg_names.items()):
        if dist.get_rank(group) >= 0:
            found.append(Group(name, str(group.group_desc), tuple(dist.get_process_group_ranks(group))))
    return tuple(found)


def _entries(suffix: str, read: Any) -> list[dict[str, Any]] | None:
    if os.environ.get(SIZE_VARIABLE, os.environ.get(OLD_VARIABLE, "0")) == "0":
        return None  # an empty list would say that no collective was called
    from torch._C import _distributed_c10d as c10d

    found: list[dict[str, Any]] | None = None
    for recorder in RECORDERS:
        dump = getattr(c10d, "_".join(filter(None, ["_dump", recorder, "trace", suffix])), None)
        if dump is not None:
            found = [*(found or ()), *read(dump).get("entries", ())]
    if found is None:
        return None
    return sorted(found, key=lambda entry: int(entry["time_created_ns"]))


def _user_lines(frames: Sequence[dict[str, Any]]) -> tuple[Line, ...]:
    stack = traceback.StackSummary.from_list(
        [traceback.FrameSummary(str(f["filename"]), int(f["line"]), str(f["name"])) for f in frames]
    )
    own = user_frames(stack)[:LINES_KEPT]
    return tuple(Line(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in own)


@contextmanager
def _without_inductor() -> Iterator[None]:
    """Context in which torch does not import its compiler to look up lines of generated code. Without an earlier import
    there is no such code, and the import takes 2 to 6 seconds on each rank and can wait forever for a lock."""
    import torch

    stand_in = SimpleNamespace()
    if "_inductor" not in vars(torch):
        torch.__dict__["_inductor"] = stand_in
    try:
        yield
    finally:
        if vars(torch).get("_inductor") is stand_in:
            del torch._inductor
