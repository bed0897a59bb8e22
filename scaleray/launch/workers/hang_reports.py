"""Combine the dumps that ranks wrote when a training hung into one explanation of its failure."""

import itertools
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from scaleray.checkpoints.storage import Entry, Store
from scaleray.errors import RunFailedError
from scaleray.profiling.desync import Desync, Kind, called_from, find
from scaleray.records.hangs import HANGS, RankDump, place_of
from scaleray.records.run_record import Heartbeat
from scaleray.training.health.stack_file import LOCKED, read_stacks
from scaleray.training.health.worker_progress import HANG

FILE = re.compile(r"rank-(\d+)\.(json|txt)$")
OTHERS_WRITE_S = 2.0  # seconds for what other ranks write when one was lost
MISMATCHES = (Kind.OTHER_CALL, Kind.OTHER_SIZE, Kind.OTHER_TYPE)
ENDED_IN_A_COLLECTIVE = (
    "gloo ends a process that receives more than its buffer holds: compare sizes and dtypes of this call on all ranks"
)


@dataclass(frozen=True)
class HangReport:
    """Dumps of one group of workers that hung."""

    store: Store
    dumps: Mapping[int, RankDump]

    def explanation(self) -> str:
        """Text with the collective, the missing ranks, each rank's source line, and the files with details; empty if
        the dumps only show that a worker is gone."""
        found = find(self.dumps)
        without_calls = [dump for dump in self.dumps.values() if dump.calls is None]
        if found is None and not without_calls:
            return ""
        if found is not None and found.kind not in MISMATCHES and not without_calls and not self._is_hang():
            return ""
        lines = [to_text(found, self.dumps)] if found is not None else ranks_by_line(self.dumps)
        if any(dump.why == "Aborted" for dump in without_calls):
            lines.append(ENDED_IN_A_COLLECTIVE)
        return "\n  ".join([*lines, f"what each rank was doing: {self.store.path('')}".rstrip("/")])

    def is_still_written(self, num_ranks: int) -> bool:
        """Whether dumps are still being written: one is incomplete, or a signal ended a process and some ranks have not
        yet written one."""
        if not all(dump.is_complete for dump in self.dumps.values()):
            return True
        is_ended = any(dump.calls is None and dump.why != LOCKED for dump in self.dumps.values())
        return is_ended and len(self.dumps) < num_ranks

    def _is_hang(self) -> bool:
        """Whether a rank hung, rather than all failing at once on a lost peer."""
        return any(not dump.is_after_error for dump in self.dumps.values())


def explain_hang(run_path: str, heartbeats: Sequence[Heartbeat]) -> str:
    """Explanation of a group's failure from its dumps; None if they explain nothing, in which case they are removed.
    run_path: the run's folder. heartbeats: the last ones of these workers."""
    return _explained(lambda: read_report(run_path, heartbeats), len(heartbeats))


def with_explanation(error: BaseException, run_path: str, group: str, num_ranks: int) -> BaseException:
    """The group's error with the explanation from its ranks' dumps, if there are any. group: the name given to
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
    """Dumps of the workers that sent these last heartbeats; None if they left none."""
    hangs = Store(run_path).child(HANGS)
    newest = hangs.names()[-1:]  # named by the time of their start
    if not newest:
        return None
    group = hangs.child(newest[0])
    dumps = _dumps(group, {(beat.rank, beat.process): beat for beat in heartbeats})
    return HangReport(group, dumps)


def group_report(run_path: str, group: str) -> HangReport | None:
    """Dumps of one group's processes, which have a folder to themselves; None if they left none."""
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


def to_text(found: Desync, dumps: Mapping[int, RankDump], *, most_lines: int = 6) -> str:
    """Describe the fault in one sentence, followed by each rank's source line."""
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
    return said[:most_lines] + ([f"and at {len(said) - most_lines} other lines"] if len(said) > most_lines else [])


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
        return f"{wait}: all ranks reached it, but it did not finish: check the network between them"
    text = f"{wait}: {ranks(found.missing)} did not arrive"
    if found.and_then is not None:
        text += f", since {_sentence(found.and_then)}"
    return text


def ranks(numbers: Iterable[int]) -> str:
    """Ranks in short form, such as `rank 3` or `ranks 0, 2-7`."""
    ordered = sorted(numbers)
    runs = []
    for _, run in itertools.groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        members = [str(number) for _, number in run]
        runs += [f"{members[0]}-{members[-1]}"] if len(members) > 2 else members
    return f"rank{'' if len(ordered) == 1 else 's'} {', '.join(runs)}"
