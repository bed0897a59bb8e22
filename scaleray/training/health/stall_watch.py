"""Detect that this worker stalls, and write a report before any worker gives up.

Every rank watches itself, by its own clock and without messages to the others. When a step hangs, all ranks stall at
nearly the same time, and each writes its own report into the run's folder. This watch's limit is shorter than that of a
collective, so the reports are complete when the first rank fails."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from scaleray.checkpoints.storage import Store
from scaleray.common.watchers import Guard, Watcher
from scaleray.errors import PeerLostError
from scaleray.records.hangs import HANGS, Line, RankDump, Thread, are_all, calls_of, dump_name, place_of, stacks_name
from scaleray.training.health import flight_recorder
from scaleray.training.health.flight_recorder import entries_without_lines
from scaleray.training.health.stack_file import StackFile, as_line, user_lines
from scaleray.training.health.worker_progress import Progress
from scaleray.training.setup.rank_context import RankContext

MOST_LINES = 60  # of a thread


def rank_dump(
    progress: Progress,
    place: RankContext,
    *,
    why: str,
    with_lines: bool,
    after_error: tuple[Line, ...],
    read: Callable[[Callable[[], Any], Any], Any],
    since_ns: int = 0,
) -> RankDump:
    """Report of this rank. with_lines: also look up the lines of Python. after_error: lines at which a collective's
    error was raised. read: calls one of torch's private functions, or returns the given default if that fails.
    since_ns: wall-clock time; earlier collectives belong to a previous group."""
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
    """The stacks of all threads except the calling one, outermost line first."""
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


T = TypeVar("T")
STALL_SHARE = 0.8  # of the time that others wait for this worker: before `progress.WATCHDOG_SHARE`, which ends it
GROUP_VARIABLE = "WORKERS_STARTED_AT"
"""Environment variable that holds the name of this group of workers, the same on all of them."""


class StallWatch:
    """Context of a training, whose `look` a thread calls repeatedly. say: called once for each stall with its location,
    if no other worker waits for this one. group: name of this group of workers, the same on all of them; if None, taken
    from the environment. since_ns: wall-clock time from which collectives belong to this group."""

    def __init__(
        self,
        progress: Progress,
        place: RankContext,
        run_path: str,
        *,
        collective_timeout_s: float,
        look_every_s: float,
        say: Callable[[str], None] | None = None,
        guard: Guard | None = None,
        group: str | None = None,
        since_ns: int = 0,
    ) -> None:
        self.progress, self.place, self.say = progress, place, say
        self.collective_timeout_s, self.look_every_s = collective_timeout_s, look_every_s
        self.store = (
            Store(run_path)
            .child(HANGS)
            .child(group or os.environ.get(GROUP_VARIABLE) or time.strftime("%Y%m%d-%H%M%S"))
        )
        self.guard = guard or Guard()
        self.since_ns = since_ns
        self._stacks: StackFile | None = None
        self._dumped_since, self._dumped_call = -1.0, 0
        self._is_over = False
        self._lock = threading.Lock()  # the training thread writes too, when it meets an error

    def __enter__(self) -> StallWatch:
        self._watched(self._begin)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock:
            self._is_over = True
            if isinstance(error, PeerLostError):
                self._watched(lambda: self._lost_a_peer(error))
            elif self._dumped_since >= 0:
                self._watched(self._forget)
            if self._stacks is not None:
                self._watched(self._stacks.close)

    def look(self, since_s: float, may_tell: bool) -> None:
        """Check once. since_s: seconds since the training entered its phase; may_tell: whether it must leave the
        phase."""
        with self._lock:
            if not self._is_over:
                self._watched(lambda: self._look(since_s, may_tell=may_tell))

    @property
    def limit_s(self) -> float:
        """Seconds in one phase after which the training counts as stalled."""
        return STALL_SHARE * self.progress.others_wait_s(self.collective_timeout_s)

    def _watched(self, act: Callable[[], None]) -> None:
        self.guard(Watcher.STALLS, act, None)

    def _begin(self) -> None:
        place = self.place
        self.store.delete(dump_name(place.rank))  # of an earlier group with this name, which has been replaced
        if place.world_size > 1 and self.store.is_local:
            self._stacks = StackFile(
                Path(self.store.root) / stacks_name(place.rank),
                rank=place.rank,
                world_size=place.world_size,
                node=place.node,
                process=os.getpid(),
                thread_id=self.progress.thread_id,
            )
            self._stacks.expect_look(self.limit_s + 2 * self.look_every_s)

    def _look(self, since_s: float, *, may_tell: bool) -> None:
        since, left_s = self.progress.since, self.limit_s - since_s
        if self._dumped_since not in (-1.0, since):
            self._forget()  # it went on
        if self._stacks is not None:
            # two looks later than the dump itself: it is needed only where that one cannot be written
            self._stacks.expect_look(max(left_s, 0.0) + 2 * self.look_every_s)
        if left_s <= 0 and self._dumped_since != since:
            self._dumped_since, self._dumped_call = since, self._newest_call()
            where = place_of(self._dump(f"it has been in one phase for {since_s:.0f} s"))
            if self.say is not None and may_tell:
                path = self.store.path(dump_name(self.place.rank))
                self.say(
                    f"no progress in step {self.progress.step + 1} for {since_s:.0f} s, at {where}; stacks: {path}"
                )

    def _lost_a_peer(self, error: PeerLostError) -> None:
        if self._dumped_since == self.progress.since and self._newest_call() == self._dumped_call:
            return  # what was pending then is told apart from what is done; after an error all looks done
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        self._dump("a collective failed", after_error=user_lines(traceback.extract_tb(cause.__traceback__)))

    def _forget(self) -> None:
        self._dumped_since = -1.0
        self.store.delete(dump_name(self.place.rank))
        if not self.store.names():
            self.store.parent.delete_folder(self.store.name)

    def _dump(self, why: str, *, after_error: tuple[Line, ...] = ()) -> tuple[Line, ...]:
        """Write the report, and return the current lines of the threads. The report has two parts; the first is written
        without Python's lock, since looking up lines can wait for locks."""
        about = partial(
            rank_dump,
            self.progress,
            self.place,
            why=why,
            after_error=after_error,
            read=self._read,
            since_ns=self.since_ns,
        )
        for with_lines in (False, True):
            dump = about(with_lines=with_lines)
            self.store.write_text(dump_name(self.place.rank), dump.to_json())
        return dump.stands_on

    def _newest_call(self) -> int:
        """Time at which the newest collective was called; 0 if unknown."""
        entries = self._read(entries_without_lines, None)
        return int(entries[-1]["time_created_ns"]) if entries else 0

    def _read(self, read: Callable[[], T], otherwise: T) -> T:
        return self.guard(Watcher.STALLS, read, otherwise, part=read.__name__.replace("_", " "))
