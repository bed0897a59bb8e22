"""One rank's trace as columns of numbers: what ran when, on which thread or stream, and what launched it.

The format is that of Kineto, as torch.profiler writes it: complete events with `ts` and `dur` in microseconds, which
may have three digits behind the point. Times here are whole nanoseconds; with `baseTimeNanoseconds` since 1970.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, BinaryIO

import numpy as np

from scaleray.common.printed import printable
from scaleray.errors import TraceError
from scaleray.profiling.traces.intervals import Ints
from scaleray.profiling.traces.json_stream import read_object

STEP = "ProfilerStep#"
OWN_KEY = "scaleray"
"""Key under which scaleray's own traces say what they are of."""
MODULE_PREFIX = "module: "
"""Beginning of the annotations by which scaleray's own traces name modules."""
NONE = -1
"""Value in a column of numbers of an event that has none."""
SCHEMA = 1
"""The only schema that Kineto has written so far."""

CPU_OP, ANNOTATION, PYTHON = "cpu_op", "user_annotation", "python_function"
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "mtia_ccp_events")
_OLD_CATEGORIES = {  # torch up to 1.12
    "Operator": CPU_OP,
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Runtime": "cuda_runtime",
}
_SHAPED = ("mm", "conv", "attention", "linear")
"""Parts of the names of operators whose shapes give floating-point operations."""
_WITH_BYTES = ("gloo:", "nccl", "hccl")


@dataclass(frozen=True)
class Trace:
    """Events of one rank, in the order of the file; every column has one value for each."""

    file: str
    rank: int | None
    world_size: int | None
    backend: str
    devices: tuple[str, ...]
    """Names of the accelerators, as their driver gives them; nothing on the CPU."""
    base_ns: int
    """Moment from which the file counts its microseconds."""
    own: Mapping[str, Any]
    """Values that scaleray has written into it in addition to the events; empty in a trace of another program."""
    names: list[str]
    categories: list[str]
    name: Ints
    """Index into `names`."""
    category: Ints
    """Index into `categories`."""
    start: Ints
    duration: Ints
    thread: Ints
    """Number of the thread, or of the stream's row, each its own in the whole trace."""
    stream: Ints
    correlation: Ints
    """Number that a launch and what it launched share."""
    external: Ints
    """Number that an operator and the kernels of it share."""
    sequence: Ints
    """Number that an operator and its backward share."""
    shapes: Mapping[int, Mapping[str, Any]]
    """Arguments of operators by their place in the columns, where shapes were recorded."""
    messages: Mapping[int, Mapping[str, Any]]
    """Arguments of collectives by their place in the columns."""

    @property
    def end(self) -> Ints:
        return self.start + self.duration

    def is_category(self, *categories: str) -> np.ndarray:
        """Whether each event is of one of the categories."""
        found = [index for index, name in enumerate(self.categories) if name in categories]
        return np.isin(self.category, found)

    @property
    def is_launch(self) -> np.ndarray:
        """Whether each event is a call of the driver or its runtime."""
        names = [name for name in self.categories if name.endswith(("_runtime", "_driver"))]
        return self.is_category(*names)

    @property
    def is_on_device(self) -> np.ndarray:
        """Whether each event is a kernel, a copy or a memset on an accelerator."""
        return self.is_category(*DEVICE_CATEGORIES)

    def name_of(self, event: int) -> str:
        return self.names[self.name[event]]


def read_trace(file: BinaryIO, name: str) -> Trace:
    """The trace in an open file of JSON, unpacked. Raises TraceError for one that is cut off, of another form, or
    without events."""
    columns = _Columns()
    values = read_object(file, name, "traceEvents", columns.add)
    version = values.get("schemaVersion", SCHEMA)
    if version != SCHEMA:
        raise TraceError(
            f"the schema of {name}",
            version,
            f"this version reads schema {SCHEMA}, which torch has written up to 2.13",
            "read it with a newer scaleray, or trace with the torch that scaleray's constraints name",
        )
    if not columns.start:
        raise TraceError(
            name,
            "a trace without events",
            "operators or kernels are read",
            "see that torch.profiler was active in a step before it was exported",
        )
    return columns.as_trace(name, values)


class _Columns:
    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.categories: dict[str, int] = {}
        self.threads: dict[tuple[Any, Any], int] = {}
        self.name, self.category, self.thread = array("i"), array("i"), array("i")
        self.start, self.duration = array("q"), array("q")
        self.stream, self.correlation = array("q"), array("q")
        self.external, self.sequence = array("q"), array("q")
        self.shapes: dict[int, Mapping[str, Any]] = {}
        self.messages: dict[int, Mapping[str, Any]] = {}

    def add(self, event: dict[str, Any]) -> None:
        """Take an event that has a duration; arrows, names of threads and moments are left out."""
        if event.get("ph") != "X":
            return
        category = event.get("cat")
        if category is None or category == "Trace":
            return
        category = _OLD_CATEGORIES.get(category, category)
        name, args = event["name"], event.get("args") or {}
        thread = (event.get("pid"), event.get("tid"))
        if category == CPU_OP and "Input Dims" in args and any(part in name for part in _SHAPED):
            self.shapes[len(self.start)] = args
        elif name.startswith(_WITH_BYTES) or "ncclKernel" in name:
            self.messages[len(self.start)] = args
        self.name.append(self.names.setdefault(name, len(self.names)))
        self.category.append(self.categories.setdefault(category, len(self.categories)))
        self.thread.append(self.threads.setdefault(thread, len(self.threads)))
        self.start.append(int(event["ts"] * 1000))
        self.duration.append(max(0, int((event.get("dur") or 0) * 1000)))
        stream = args.get("stream", NONE)
        self.stream.append(stream if type(stream) is int else _whole(stream))
        self.correlation.append(args.get("correlation", NONE))
        self.external.append(args.get("External id", NONE))
        self.sequence.append(args.get("Sequence number", NONE))

    def as_trace(self, file: str, values: Mapping[str, Any]) -> Trace:
        own = values.get(OWN_KEY) or {}
        distributed = {**own, **(values.get("distributedInfo") or {})}
        base = int(values.get("baseTimeNanoseconds", 0))
        column = lambda numbers: np.array(numbers, dtype=np.int64)
        return Trace(
            file=file,
            rank=distributed.get("rank"),
            world_size=distributed.get("world_size"),
            backend=str(distributed.get("backend", "")),
            devices=tuple(printable(each.get("name", "")) for each in values.get("deviceProperties") or []),
            base_ns=base,
            own=own,
            names=[printable(name) for name in self.names],
            categories=list(self.categories),
            name=column(self.name),
            category=column(self.category),
            start=column(self.start) + base,
            duration=column(self.duration),
            thread=column(self.thread),
            stream=column(self.stream),
            correlation=column(self.correlation),
            external=column(self.external),
            sequence=column(self.sequence),
            shapes=self.shapes,
            messages=self.messages,
        )


def _whole(value: str | int | Decimal | None) -> int:
    try:
        return int(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return NONE
