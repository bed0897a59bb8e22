"""Account of this process: its last collectives, and the line at which each of its threads is."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from scaleray.records.hangs import Line, RankDump, Thread, are_all, calls_of
from scaleray.training.health import flight_recorder
from scaleray.training.health.progress import Progress
from scaleray.training.health.stack_file import as_line, user_lines
from scaleray.training.setup.place import Place

MOST_LINES = 60  # of a thread


def rank_dump(
    progress: Progress,
    place: Place,
    *,
    why: str,
    with_lines: bool,
    after_error: tuple[Line, ...],
    read: Callable[[Callable[[], Any], Any], Any],
    since_ns: int = 0,
) -> RankDump:
    """This rank's account. with_lines: look up lines of Python too. after_error: lines at which a collective's error
    was raised. read: calls one of torch's private functions, or returns the given default if that fails. since_ns: wall
    clock; earlier collectives belong to a group that is gone.
    """
    reader = flight_recorder.entries_with_frames if with_lines else flight_recorder.entries_without_lines
    remembered = read(reader, None)
    entries = [one for one in remembered or () if int(one["time_created_ns"]) >= since_ns]
    calls = None if remembered is None else calls_of(entries, flight_recorder.user_lines(entries))
    stacks = _stacks() if with_lines else {}
    return RankDump(
        rank=place.rank,
        world_size=place.world_size,
        node=place.node,
        process=os.getpid(),
        why=why,
        step=progress.step,
        phase=str(progress.phase),
        since_s=round(time.monotonic() - progress.since, 3),
        recorded_at=time.time(),
        torch=str(torch.__version__),
        groups=read(flight_recorder.groups, ()),
        calls=calls,
        # where one of a group before is remembered, none of this one is forgotten
        has_all_calls=calls is not None
        and len(calls) == len(entries)
        and (len(remembered) > len(entries) or are_all(entries, calls)),
        is_after_error=bool(after_error),
        stands_on=after_error or user_lines(stacks.get(progress.thread_id, traceback.StackSummary())),
        threads=_threads(stacks, progress.thread_id),
        is_complete=with_lines,
    )


def _stacks() -> dict[int, traceback.StackSummary]:
    """The stacks of all threads but the calling one, outermost line first."""
    frames = sys._current_frames()
    return {thread: traceback.extract_stack(f) for thread, f in frames.items() if thread != threading.get_ident()}


def _threads(stacks: dict[int, traceback.StackSummary], training: int) -> tuple[Thread, ...]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = [
        Thread(
            names.get(ident, "not Python's own"),
            tuple(as_line(frame) for frame in stack[: -MOST_LINES - 1 : -1]),
            trains=ident == training,
        )
        for ident, stack in stacks.items()
    ]
    return tuple(sorted(found, key=lambda thread: not thread.trains))
