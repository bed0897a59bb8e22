"""Stacks of a process that cannot report them itself, written to a file by the interpreter's fault handler.

Two failures leave no other trace: a C++ loop that holds the interpreter's lock, so that no other thread runs, and a
signal that ends the process, as when gloo receives more data than fits. The fault handler runs in C, without the lock.
"""

import contextlib
import faulthandler
import os
import re
import sys
from pathlib import Path
from traceback import FrameSummary, StackSummary

from scaleray.common.user_code import user_frames
from scaleray.records.hangs import LINES_KEPT, Line, RankDump

HEADER = re.compile(r"rank (\d+) of (\d+) on (\S+), process (\d+), training thread (0x[0-9a-f]+)")
THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)[^\n]*\n((?:  File .*\n?)*)", re.MULTILINE)
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
FATAL, LATE, LOOKED = "Fatal Python error: ", "Timeout (", "\nlooked again\n"
LOCKED = "it holds Python's lock, so that no other thread of its process runs"


class StackFile:
    """Stack file of one rank. A process can have only one, since it has only one fault handler."""

    def __init__(self, path: Path, *, rank: int, world_size: int, node: str, process: int, thread_id: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._was_enabled = path, faulthandler.is_enabled()
        header = f"rank {rank} of {world_size} on {node}, process {process}, training thread 0x{thread_id:016x}\n"
        path.write_text(header)
        self._length = path.stat().st_size
        self._file = open(path, "ab")  # noqa: SIM115 - the fault handler writes into it as long as the process lives
        faulthandler.enable(self._file, all_threads=True)

    def expect_look(self, within_s: float) -> None:
        """Schedule writing the stacks unless this is called again within this many seconds. Removes earlier content: a
        process that calls this is running, so nothing holds the lock."""
        if os.fstat(self._file.fileno()).st_size > self._length:
            os.write(self._file.fileno(), LOOKED.encode())  # the handler may be writing at this moment
            self._length = os.fstat(self._file.fileno()).st_size
        # takes the place of the one before; were that cancelled first, the lock could be gone before this line
        faulthandler.dump_traceback_later(within_s, file=self._file)

    def close(self) -> None:
        """Close and remove the file, and the folders of hangs if they are empty."""
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
        if self._was_enabled:
            with contextlib.suppress(OSError, ValueError):  # a stream without a file, as a notebook's
                faulthandler.enable(sys.__stderr__ or sys.stderr, all_threads=False)  # as Ray does it
        self._file.close()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
            self.path.parent.rmdir()
            self.path.parent.parent.rmdir()


def read_stacks(text: str, *, step: int, phase: str, recorded_at: float) -> RankDump | None:
    """Report on a rank from its file; None if nothing was written, or not by `StackFile`. step and phase: the last ones
    known of the rank."""
    header = HEADER.match(text)
    _, fatal, body = text.rpartition(FATAL)
    why = body.partition("\n")[0]
    if not fatal:
        why, (_, late, body) = LOCKED, text.rpartition(LOOKED)[2].rpartition(LATE)
        if not late:
            return None
    if header is None:
        return None
    threads = {thread: _frames(frames) for thread, frames in THREAD.findall(body)}
    training = next((stack for thread, stack in threads.items() if int(thread, 16) == int(header[5], 16)), None)
    return RankDump(
        rank=int(header[1]),
        world_size=int(header[2]),
        node=header[3],
        process=int(header[4]),
        why=why,
        step=step,
        phase=phase,
        since_s=0.0,
        recorded_at=recorded_at,
        torch="",
        stands_on=user_lines(training or StackSummary()),
    )


def user_lines(stack: StackSummary) -> tuple[Line, ...]:
    """Innermost lines of a stack in the user's own code, or its innermost lines if there are none. stack: outermost
    first."""
    own = user_frames(stack) or stack[-1:]
    return tuple(as_line(frame) for frame in own[: -LINES_KEPT - 1 : -1])


def as_line(frame: FrameSummary) -> Line:
    """Format a line of a stack as a dump has it."""
    return Line(frame.filename, frame.lineno or 0, frame.name, (frame.line or "").strip())


def _frames(text: str) -> StackSummary:
    found = [FrameSummary(file, int(number), name, line="") for file, number, name in FRAME.findall(text)]
    return StackSummary.from_list(found[::-1])
