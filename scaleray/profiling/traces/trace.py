"""One rank's trace in columns: times, threads or streams, and the launching call of each event.

The format is Kineto's, as written by torch.profiler: complete events with `ts` and `dur` in microseconds, with up to
three decimals. Times here are integer nanoseconds; with `baseTimeNanoseconds`, since 1970.
"""

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
"""Key of the additional facts in scaleray's own traces."""
MODULE_PREFIX = "module: "
"""Prefix of the annotations that name modules in scaleray's own traces."""
NONE = -1
"""Value in a numeric column for events without one."""
SCHEMA = 1
"""The only schema that Kineto has used so far."""

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
"""Substrings in names of operators whose shapes determine floating-point operations."""
_WITH_BYTES = ("gloo:", "nccl", "hccl")


@dataclass(frozen=True)
class Trace:
    """Events of one rank, in the order of the file; every column has one value per event."""

    file: str
    rank: int | None
    world_size: int | None
    backend: str
    devices: tuple[str, ...]
    """Names of the accelerators, as reported by their driver; empty on the CPU."""
    base_ns: int
    """Time from which the file counts its microseconds."""
    own: Mapping[str, Any]
    """Values that scaleray has written in addition to the events; empty in a trace of another program."""
    names: list[str]
    categories: list[str]
    name: Ints
    """Index into `names`."""
    category: Ints
    """Index into `categories`."""
    start: Ints
    duration: Ints
    thread: Ints
    """Index of the thread or stream, unique in the trace."""
    stream: Ints
    correlation: Ints
    """Number shared by a launch and the event it launched."""
    external: Ints
    """Number shared by an operator and its kernels."""
    sequence: Ints
    """Number shared by an operator and its backward pass."""
    shapes: Mapping[int, Mapping[str, Any]]
    """Arguments of operators by column index, if shapes were recorded."""
    messages: Mapping[int, Mapping[str, Any]]
    """Arguments of collectives by column index."""

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
    """Read the trace in an open, uncompressed JSON file. Raises TraceError if it is truncated, has another format, or
    has no events."""
    columns = _Columns()
    values = read_object(file, name, "traceEvents", columns.add)
    version = values.get("schemaVersion", SCHEMA)
    if version != SCHEMA:
        raise TraceError(
            f"the schema of {name}",
            version,
            f"this version reads schema {SCHEMA}, as written by torch up to 2.13",
            "read it with a newer scaleray, or trace with the version of torch in scaleray's constraints",
        )
    if not columns.start:
        raise TraceError.problem(
            name,
            "has no operators and no kernels",
            "make sure that torch.profiler was active in a step before the export",
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
        """Add an event that has a duration; arrows, thread names and instant events are ignored."""
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
