"""Combine the accounts that the ranks wrote when a training hung into one explanation of its failure."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from scaleray.checkpoints.storage import Entry, Store
from scaleray.errors import RunFailedError
from scaleray.profiling.desync import Kind, find
from scaleray.profiling.desync_words import in_words, ranks_by_line
from scaleray.records.hangs import HANGS, RankDump
from scaleray.records.run_record import Heartbeat
from scaleray.training.health.stack_file import LOCKED, read_stacks
from scaleray.training.health.worker_progress import HANG

FILE = re.compile(r"rank-(\d+)\.(json|txt)$")
OTHERS_WRITE_S = 2.0  # seconds for what other ranks write when one was lost
MISMATCHES = (Kind.OTHER_CALL, Kind.OTHER_SIZE, Kind.OTHER_TYPE)
ENDED_IN_A_COLLECTIVE = (
    "gloo ends a process that receives more than fits its buffer: compare sizes and dtypes of this call on all ranks"
)


@dataclass(frozen=True)
class HangReport:
    """Dumps of one group of workers that hung."""

    store: Store
    dumps: Mapping[int, RankDump]

    def explanation(self) -> str:
        """The collective, the missing ranks, each rank's line, and the files with details; empty if the dumps show only
        that a worker is gone."""
        found = find(self.dumps)
        told = [dump for dump in self.dumps.values() if dump.calls is None]
        if found is None and not told:
            return ""
        if found is not None and found.kind not in MISMATCHES and not told and not self._is_hang():
            return ""
        lines = [in_words(found, self.dumps)] if found is not None else ranks_by_line(self.dumps)
        if any(dump.why == "Aborted" for dump in told):
            lines.append(ENDED_IN_A_COLLECTIVE)
        return "\n  ".join([*lines, f"what each rank was doing: {self.store.path('')}".rstrip("/")])

    def is_still_written(self, num_ranks: int) -> bool:
        """Whether dumps are still being written: one is incomplete, or a signal ended a process and some ranks have not
        written theirs yet."""
        if not all(dump.is_complete for dump in self.dumps.values()):
            return True
        is_ended = any(dump.calls is None and dump.why != LOCKED for dump in self.dumps.values())
        return is_ended and len(self.dumps) < num_ranks

    def _is_hang(self) -> bool:
        """Whether some rank hung, rather than lose another one at once."""
        return any(not dump.is_after_error for dump in self.dumps.values())


def explain_hang(run_path: str, heartbeats: Sequence[Heartbeat]) -> str:
    """Explanation of a group's failure from its dumps; None if they explain nothing, in which case they are removed.
    run_path: the run's folder. heartbeats: the last ones of these workers."""
    return _explained(lambda: read_report(run_path, heartbeats), len(heartbeats))


def with_explanation(error: BaseException, run_path: str, group: str, num_ranks: int) -> BaseException:
    """The error of the group of that name, with the accounts of its ranks, if there are any. group: the name given to
    `GroupWatch`."""
    if not isinstance(error, RunFailedError):
        return error
    text = _explained(lambda: group_report(run_path, group), num_ranks)
    return type(error)(f"{error}\n  {text}") if text else error


def _explained(read: Callable[[], HangReport | None], num_ranks: int) -> str:
    try:
        report = read()
        deadline = time.monotonic() + OTHERS_WRITE_S
        # where one process was ended by a signal, the others meet that in the same moment
        while report and report.is_still_written(num_ranks) and time.monotonic() < deadline:
            time.sleep(OTHERS_WRITE_S / 10)
            report = read()
        if report is None:
            return ""
        if not (text := report.explanation()):
            report.store.parent.delete_folder(report.store.name)
        return text
    except Exception:  # it explains a failure, and must not take its place
        logging.getLogger(__name__).warning("the dumps of a hang could not be read", exc_info=True)
        return ""


def read_report(run_path: str, heartbeats: Sequence[Heartbeat]) -> HangReport | None:
    """Dumps of the workers with these last heartbeats; None if they left none."""
    hangs = Store(run_path).child(HANGS)
    newest = hangs.names()[-1:]  # named by the time of their start
    if not newest:
        return None
    group = hangs.child(newest[0])
    dumps = _dumps(group, {(beat.rank, beat.process): beat for beat in heartbeats})
    return HangReport(group, dumps)


def group_report(run_path: str, group: str) -> HangReport | None:
    """Dumps of the processes of one group, which has its folder to itself; None if they left none."""
    store = Store(run_path).child(HANGS).child(group)
    dumps = _dumps(store, None)
    return HangReport(store, dumps) if dumps else None


def _dumps(store: Store, beats: Mapping[tuple[int, int], Heartbeat] | None) -> dict[int, RankDump]:
    """Dumps of the processes that sent these heartbeats; None: all dumps."""
    own: dict[int, RankDump] = {}
    mute: dict[int, RankDump] = {}
    known = {rank: beat for (rank, _), beat in (beats or {}).items()}
    for entry in store.entries(""):
        match = FILE.search(entry.name)
        if match is None:
            continue
        rank = int(match[1])
        dump = _read(store, entry, known.get(rank))
        if dump is not None and (beats is None or (rank, dump.process) in beats):
            (own if match[2] == "json" else mute)[rank] = dump
    # what a process writes while it ends, or while it cannot speak, comes after its own account
    return {**own, **{rank: dump for rank, dump in mute.items() if rank not in own or dump.why != LOCKED}}


def _read(store: Store, entry: Entry, beat: Heartbeat | None) -> RankDump | None:
    try:
        content = store.read(entry.name)
    except FileNotFoundError:  # its process has ended well meanwhile
        return None
    if entry.name.endswith(".txt"):
        step, phase = (beat.step, beat.phase.removeprefix(HANG)) if beat is not None else (0, "")
        text = content.decode(errors="replace")
        return read_stacks(text, step=step, phase=phase, recorded_at=entry.changed_at)
    try:
        return RankDump.from_json(content)
    except ValidationError:  # the disk was full, or the process ended while it wrote
        return None
