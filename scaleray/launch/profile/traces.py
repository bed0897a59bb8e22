"""Find and read trace files and memory snapshots, and merge traces into one file for Perfetto."""

import contextlib
import dataclasses
import gzip
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from scaleray.common.filesystems import open_filesystem
from scaleray.common.printed import Printed
from scaleray.config.hardware.catalogue import find_gpu
from scaleray.errors import TraceError, UsageError
from scaleray.profiling.traces.memory_blocks import MemorySnapshot, read_snapshot
from scaleray.profiling.traces.merge import merge
from scaleray.profiling.traces.time_shares import precision_of
from scaleray.profiling.traces.trace import Trace, read_trace
from scaleray.profiling.traces.trace_report import TraceReport, ranks_of, report_on
from scaleray.records.worker_requests import FOLDER

TRACE_ENDINGS = (".json", ".json.gz")
SNAPSHOT_ENDINGS = (".pickle", ".pkl", ".pickle.gz")
MERGED = "all_ranks.json.gz"
PERFETTO = "https://ui.perfetto.dev"
_SNAPSHOT_START = "memory"


@dataclass(frozen=True)
class Traced(Printed):
    """Content of trace files. merged: the file with all ranks, if there are several."""

    where: str
    report: TraceReport | None
    snapshots: list[MemorySnapshot] = field(default_factory=list)
    merged: str | None = None

    def lines(self) -> list[str]:
        """Lines with the traces that were read and their location."""
        ranks = ", ".join(str(each.rank) for each in self.report.ranks) if self.report else ""
        found = [f"traces of rank {ranks}"] if ranks else []
        found += [f"memory of rank {each.rank}" for each in self.snapshots]
        return ["; ".join(found), *([f"{self.merged}: open it in {PERFETTO}"] if self.merged else []), self.where]

    def to_dict(self) -> dict[str, Any]:
        """The content except individual events, as JSON values."""
        report = None
        if self.report is not None:
            report = dataclasses.asdict(dataclasses.replace(self.report, meetings=[]))
            for rank, read in zip(report["ranks"], self.report.ranks, strict=True):
                rank["partition"]["closes_within"] = read.partition.closes_within
        return {
            "where": self.where,
            "traces": report,
            "memory": [_numbers_of(snapshot) for snapshot in self.snapshots],
            "merged": self.merged,
        }


def is_trace(path: str) -> bool:
    """Whether a path holds traces rather than a run, judging by its name or the files in the folder."""
    if path.endswith((*TRACE_ENDINGS, *SNAPSHOT_ENDINGS)):
        return True
    folder = Path(path)
    is_run = any((folder / name).exists() for name in ("record.json", "run.json"))
    return folder.is_dir() and not is_run and bool(_files_in(path))


def traced_of(run_dir: str) -> Traced | None:
    """Content of a run's traces; None if it has none."""
    where = f"{run_dir.rstrip('/')}/{FOLDER}"
    return read_traces(where) if _files_in(where) else None


def read_traces(where: str) -> Traced:
    """Content of the traces in a file or folder; those of several ranks are also written as one file in the same
    folder. Raises TraceError for files that cannot be read, or belong to several runs."""
    files = [where] if where.endswith((*TRACE_ENDINGS, *SNAPSHOT_ENDINGS)) else _files_in(where)
    if not files:
        endings = ", ".join((*TRACE_ENDINGS, *SNAPSHOT_ENDINGS))
        raise TraceError.problem(
            where, f"has no traces, whose names end in {endings}", "to write traces: scaleray profile --trace"
        )
    of_memory = [file for file in files if _is_snapshot(file)]
    of_time = [file for file in files if file not in of_memory]
    snapshots = [_read(file, read_snapshot) for file in of_memory]
    if not of_time:
        return Traced(where, None, snapshots)
    traces = ranks_of([_read(file, read_trace) for file in of_time])
    report = report_on(traces, peak_flops={rank: _peak_flops(trace) for rank, trace in traces.items()})
    merged = _merged(traces, report, of_time, where) if len(traces) > 1 else None
    return Traced(where, report, snapshots, merged)


def _numbers_of(snapshot: MemorySnapshot) -> dict[str, Any]:
    names = ("reserved_bytes", "active_bytes", "rounding_bytes", "cached_bytes", "stranded_bytes", "largest_hole_bytes")
    return {
        "rank": snapshot.rank,
        **{name: getattr(snapshot, name) for name in (*names, "fragmentation", "is_expandable")},
        "categories": snapshot.by_category(),
    }


def _files_in(where: str) -> list[str]:
    """Trace and snapshot files in a folder, sorted by name."""
    if "://" not in where:
        folder = Path(where)
        names = [each.name for each in folder.iterdir() if each.is_file()] if folder.is_dir() else []
    else:
        import pyarrow.fs

        filesystem, path = open_filesystem(where)
        found = filesystem.get_file_info(pyarrow.fs.FileSelector(path, allow_not_found=True))
        names = [each.base_name for each in found if each.is_file]
    endings = (*TRACE_ENDINGS, *SNAPSHOT_ENDINGS)
    return [f"{where.rstrip('/')}/{name}" for name in sorted(names) if name.endswith(endings) and name != MERGED]


def _is_snapshot(file: str) -> bool:
    return file.endswith(SNAPSHOT_ENDINGS) or file.rsplit("/", 1)[-1].startswith(_SNAPSHOT_START)


def _read(file: str, reader: Any) -> Any:
    with opened(file) as content:
        return reader(content, file)


@contextlib.contextmanager
def opened(file: str) -> Iterator[BinaryIO]:
    """Content of a file, decompressed if it is gzip, whatever its name. Raises TraceError if it does not exist."""
    try:
        source = _source(file)
    except (OSError, ValueError) as exc:
        raise TraceError.problem(file, f"cannot be read as a trace: {exc}", "give a file or a folder") from exc
    with source:
        buffered = io.BufferedReader(source, 1 << 20)
        if buffered.peek(2)[:2] == b"\x1f\x8b":
            with gzip.open(buffered) as unpacked:
                yield unpacked  # type: ignore[misc]
        else:
            yield buffered


def _target(file: str) -> Any:
    if "://" not in file:
        return Path(file).open("wb")
    filesystem, path = open_filesystem(file)
    return filesystem.open_output_stream(path, compression=None)


def _source(file: str) -> Any:
    if "://" not in file:
        return Path(file).open("rb")
    filesystem, path = open_filesystem(file)
    return filesystem.open_input_stream(path, compression=None)


def _peak_flops(trace: Trace) -> float | None:
    """Dense peak of the trace's device in the precision of its operations; None if either is unknown."""
    precision = precision_of(trace)
    if precision is None or not trace.devices:
        return None
    try:
        return find_gpu(trace.devices[0]).peak_flops(precision)
    except UsageError:
        return None


def _merged(traces: dict[int, Trace], report: TraceReport, files: list[str], where: str) -> str:
    target = f"{where.rstrip('/')}/{MERGED}"
    by_name = {trace.file: rank for rank, trace in traces.items()}
    with contextlib.ExitStack() as stack:
        sources = {by_name[file]: stack.enter_context(opened(file)) for file in files}
        stream = stack.enter_context(_target(target))
        packed = stack.enter_context(gzip.GzipFile(fileobj=stream, mode="wb", mtime=0, compresslevel=6))
        ranks = {rank: (trace, sources[rank]) for rank, trace in traces.items()}
        merge(ranks, report.clocks, report.meetings, lambda text: packed.write(text.encode()))
    return target
