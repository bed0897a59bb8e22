"""Merge the traces of several ranks into one, on one clock, with arrows between the parts of each collective.

The result is JSON for Perfetto and chrome://tracing. Processes are renumbered, as numbers of two ranks may coincide,
and their names begin with the rank.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

from scaleray.profiling.traces.json_stream import read_object
from scaleray.profiling.traces.matched_collectives import MatchedCollective
from scaleray.profiling.traces.trace import Trace
from scaleray.profiling.traces.trace_clocks import Clocks

PROCESSES_PER_RANK = 1_000
_ARROWS_PER_RANK = 1_000_000_000


def merge(
    ranks: Mapping[int, tuple[Trace, BinaryIO]],
    clocks: Clocks,
    meetings: Sequence[MatchedCollective],
    write: Callable[[str], object],
) -> None:
    """Write the traces of all ranks as one. files: files from which the traces were read, positioned at the start."""
    first = min(int(trace.start.min()) - clocks.ahead_ns.get(rank, 0) for rank, (trace, _) in ranks.items())
    head = {
        "schemaVersion": 1,
        "baseTimeNanoseconds": first,
        "displayTimeUnit": "ms",
        "scaleray": {
            "ranks": sorted(ranks),
            "clock_ahead_ns": {str(rank): ahead for rank, ahead in clocks.ahead_ns.items()},
            "clock_within_ns": {str(rank): within for rank, within in clocks.within_ns.items()},
            "clocks_from": clocks.found_from,
        },
    }
    write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
    sink = _Sink(write)
    for place, (rank, (trace, file)) in enumerate(sorted(ranks.items())):
        mover = _Mover(rank, place, trace.base_ns - clocks.ahead_ns.get(rank, 0) - first, sink)
        read_object(file, trace.file, "traceEvents", mover.move)
        for number, meeting in enumerate(meetings):
            if rank in meeting.parts:
                mover.arrow_end(trace, meeting, number, _ends(meeting, clocks)[rank])
        mover.name_the_rest()
    write("\n]}\n")


def _ends(meeting: MatchedCollective, clocks: Clocks) -> dict[int, str]:
    """Role of each rank's part in the arrow, as in the trace-event format: start, intermediate step, or finish.

    Ordered on the common clock: an arrow that ends before its start is dropped.
    """
    came = sorted(meeting.parts, key=lambda rank: (meeting.parts[rank].start_ns - clocks.ahead_ns.get(rank, 0), rank))
    return {came[0]: "s", **dict.fromkeys(came[1:-1], "t"), came[-1]: "f"}


class _Sink:
    def __init__(self, write: Callable[[str], object]) -> None:
        self.write, self.separator = write, ""

    def put(self, event: Mapping[str, Any]) -> None:
        """Write one event."""
        self.write(self.separator + json.dumps(event, default=float))
        self.separator = ",\n"


class _Mover:
    """Moves one rank's events to the common time line."""

    def __init__(self, rank: int, place: int, shift_ns: int, sink: _Sink) -> None:
        self.rank, self.place, self.shift_ns, self.sink = rank, place, shift_ns, sink
        self.processes: dict[Any, int] = {}
        self.seen: dict[tuple[Any, Any], None] = {}
        self.named: set[Any] = set()

    def move(self, event: dict[str, Any]) -> None:
        """Write an event of this rank at its new time."""
        if "ph" not in event or event.get("cat") == "Trace" or event["ph"] == "i":
            return
        process = event.get("pid", 0)
        thread = event.get("tid", 0)
        event["pid"] = self._process(process)
        event["tid"] = thread if isinstance(thread, int) else 0
        # a name holds for the whole trace; Perfetto would drop it if it came before the first event
        event["ts"] = 0.0 if event["ph"] == "M" else self._moved(int(event.get("ts", 0) * 1000))
        if "id" in event:
            event["id"] = (self.place + 1) * _ARROWS_PER_RANK + int(event["id"])
        if event["ph"] == "M" and event.get("name") in ("process_name", "process_sort_index"):
            self._name(event, process)
        if event["ph"] == "X" and event.get("cat") is not None:
            self.seen.setdefault((process, thread), None)
        self.sink.put(event)

    def arrow_end(self, trace: Trace, meeting: MatchedCollective, number: int, end: str) -> None:
        """Write this rank's end of the arrow through all parts of a collective, see `_ends`."""
        part = meeting.parts[self.rank]
        process, thread = list(self.seen)[trace.thread[part.event]]
        arrow = {
            "ph": end,
            "id": number,
            "cat": "collective",
            "name": meeting.operation,
            "pid": self._process(process),
            "tid": thread if isinstance(thread, int) else 0,
            "ts": self._moved(part.start_ns - trace.base_ns),
        }
        # by default an arrow's last end binds to the next event, not to the enclosing one
        self.sink.put({**arrow, "bp": "e"} if end == "f" else arrow)

    def name_the_rest(self) -> None:
        """Name the processes that have no name in the trace."""
        for process in self.processes:
            if process not in self.named:
                event = {"ph": "M", "name": "process_name", "pid": self._process(process), "tid": 0, "args": {}}
                self._name(event, process)
                self.sink.put(event)

    def _process(self, process: Any) -> int:
        return self.place * PROCESSES_PER_RANK + self.processes.setdefault(process, len(self.processes))

    def _moved(self, since_base_ns: int) -> float:
        return (since_base_ns + self.shift_ns) / 1000

    def _name(self, event: dict[str, Any], process: Any) -> None:
        if event["name"] == "process_name":
            self.named.add(process)
            what = "GPU" if isinstance(process, int) and process < PROCESSES_PER_RANK else "host"
            name = (event.get("args") or {}).get("name", "")
            of_device = f" {process}" if what == "GPU" else ""
            event["args"] = {"name": f"rank {self.rank}: {what}{of_device} {name}".strip()}
        else:
            event["args"] = {"sort_index": event["pid"]}
