"""Report on the traces of a run: time, launches, operators and modules of each rank, and matched collectives."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scaleray.errors import TraceError
from scaleray.profiling.traces.host import host_of
from scaleray.profiling.traces.launches import Launches, Queue, StreamPauses, launches_of, pauses_of, queues_of
from scaleray.profiling.traces.matched_collectives import MatchedCollective, collectives_of, join, lateness_ns
from scaleray.profiling.traces.partition import Partition, marked_steps, partition_of
from scaleray.profiling.traces.time_shares import (
    ModuleShare,
    Share,
    top_kernels,
    top_modules,
    top_operators,
    total_flops,
)
from scaleray.profiling.traces.trace import Trace
from scaleray.profiling.traces.trace_clocks import Clocks, clocks_from_barriers, clocks_from_collectives


@dataclass(frozen=True)
class RankTrace:
    """One rank of a traced run."""

    rank: int
    file: str
    device: str
    """Name of the accelerator; `cpu` without one."""
    steps: tuple[int, ...]
    """Numbers of the traced steps, as marked."""
    partition: Partition
    overlap: float | None
    launches: Launches | None
    queues: list[Queue]
    pauses: list[StreamPauses]
    operators: list[Share]
    kernels: list[Share]
    modules: list[ModuleShare]
    flops: int | None
    """Operations of all traced steps; None if shapes were not recorded."""
    mfu: float | None
    num_collectives: int


@dataclass(frozen=True)
class TraceReport:
    """Results from a run's traces."""

    ranks: list[RankTrace]
    world_size: int | None
    """Workers of the run, of which some were traced; None if the traces lack it."""
    clocks: Clocks
    num_meetings: int
    """Number of collectives found on at least two traced ranks."""
    unmatched: int
    """Number of collectives of a traced rank without a counterpart on another one."""
    by_sequence: bool
    """Whether all of them were matched by NCCL's own number."""
    late_ns: Mapping[int, float] = field(default_factory=dict)
    """Median delay of each rank behind the first at a collective."""
    meetings: list[MatchedCollective] = field(default_factory=list, repr=False)


def report_on(traces: Mapping[int, Trace], *, peak_flops: Mapping[int, float | None] | None = None) -> TraceReport:
    """Analyse a run's traces, given by rank. peak_flops: peak FLOP/s of each rank's device. Raises TraceError if the
    traces do not belong to one run and the same steps.
    """
    check_together(traces)
    peaks = peak_flops or {}
    ranks = [_rank(rank, trace, peaks.get(rank)) for rank, trace in sorted(traces.items())]
    collectives = {rank: collectives_of(trace) for rank, trace in traces.items()}
    meetings = join(collectives)
    left_at = {rank: trace.own.get("left_barriers_at_ns") for rank, trace in traces.items()}
    if len(traces) > 1 and all(left_at.values()):
        clocks = clocks_from_barriers({rank: moments for rank, moments in left_at.items() if moments})
    else:
        clocks = clocks_from_collectives(meetings, sorted(traces))
    met = sum(len(meeting.parts) for meeting in meetings)
    return TraceReport(
        ranks=ranks,
        world_size=next((trace.world_size for trace in traces.values() if trace.world_size), None),
        clocks=clocks,
        num_meetings=len(meetings),
        unmatched=sum(map(len, collectives.values())) - met if len(traces) > 1 else 0,
        by_sequence=bool(meetings) and all(meeting.by_sequence for meeting in meetings),
        late_ns=lateness_ns(meetings, clocks.ahead_ns),
        meetings=meetings,
    )


def ranks_of(traces: list[Trace]) -> dict[int, Trace]:
    """Return the traces by rank. Raises TraceError if two have the same rank, or one of several has none."""
    by_rank: dict[int, Trace] = {}
    for trace in traces:
        rank = trace.rank
        if rank is None and len(traces) > 1:
            raise TraceError.problem(
                trace.file,
                "has no rank in distributedInfo, which each of several traces needs",
                "trace after torch.distributed is initialised, or give this file alone",
            )
        if (rank or 0) in by_rank:
            raise TraceError(
                f"the rank of {trace.file}",
                rank,
                f"{by_rank[rank or 0].file} has the same rank",
                "give traces of one run, one file per rank",
            )
        by_rank[rank or 0] = trace
    return by_rank


def check_together(traces: Mapping[int, Trace]) -> None:
    """Raise TraceError unless the traces belong to one run: number of ranks, version of torch and steps must be
    equal."""
    first = traces[min(traces)]
    steps = marked_steps(first).numbers
    for trace in traces.values():
        if trace.world_size != first.world_size:
            raise TraceError(
                f"the number of ranks in {trace.file}",
                trace.world_size,
                f"{first.file} is from a run with {first.world_size} ranks",
                "give traces of one run",
            )
        if trace.world_size is not None and trace.rank is not None and trace.rank >= trace.world_size:
            raise TraceError(
                f"the rank of {trace.file}",
                trace.rank,
                f"its run has {trace.world_size} ranks",
                "give the original file",
            )
        if trace.own.get("torch") != first.own.get("torch"):
            versions = [one.own.get("torch", "unknown") for one in (trace, first)]
            raise TraceError.problem(
                trace.file,
                f"is from torch {versions[0]}, but {first.file} is from {versions[1]}",
                "give traces of one run",
            )
        if (found := marked_steps(trace).numbers) != steps:
            raise TraceError.problem(
                trace.file,
                f"has the steps {list(found)}, but {first.file} has {list(steps)}",
                "collectives are matched by step: give traces of the same steps",
            )


def _rank(rank: int, trace: Trace, peak_flops: float | None) -> RankTrace:
    steps, host = marked_steps(trace), host_of(trace)
    partition, flops = partition_of(trace, steps), total_flops(trace, steps)
    return RankTrace(
        rank=rank,
        file=trace.file,
        device=trace.devices[0] if trace.devices and trace.is_on_device.any() else "cpu",
        steps=steps.numbers,
        partition=partition,
        overlap=partition.overlap,
        launches=launches_of(trace),
        queues=queues_of(trace),
        pauses=pauses_of(trace),
        operators=top_operators(trace, host, steps),
        kernels=top_kernels(trace, steps),
        modules=top_modules(trace, host, steps, peak_flops=peak_flops),
        flops=flops,
        mfu=flops / (partition.total_ns / 1e9 * peak_flops) if flops and peak_flops else None,
        num_collectives=len(collectives_of(trace)),
    )
