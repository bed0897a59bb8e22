"""Division of the time of one rank's traced steps into parts whose sum is the time of the steps.

On an accelerator, each moment counts for the first active part: computing, communicating, copying. The rest is idle
time: due to the host if the kernel that ends the pause was launched only after the pause began (the rule of Holistic
Trace Analysis, per stream there, over all streams here), otherwise for other reasons. On the CPU, operators on any
thread compute, and time without operator or collective counts as Python and waiting for input.
"""

from dataclasses import dataclass

import numpy as np

from scaleray.errors import TraceError
from scaleray.profiling.traces.intervals import EMPTY, Intervals, either, length, union, without
from scaleray.profiling.traces.kernel_kinds import Kind, kinds_of
from scaleray.profiling.traces.launches import launch_starts
from scaleray.profiling.traces.trace import ANNOTATION, CPU_OP, STEP, Trace

CLOSES_WITHIN = 0.01
"""Largest difference between the steps and the sum of their parts, as a share of the steps."""
MISSING = 0.25
"""Largest gap between two step marks, as a share of a step: on a busy machine, the profiler waits there."""


@dataclass(frozen=True)
class Steps:
    """The marked steps of a trace, in order."""

    numbers: tuple[int, ...]
    start_ns: int
    end_ns: int
    """End of the last step, or of the last kernel that the steps launched, if that is later."""


@dataclass(frozen=True)
class Partition:
    """Nanoseconds of each part over all traced steps of one rank. None: the part cannot be separated here."""

    num_steps: int
    total_ns: int
    compute_ns: int
    exposed_communication_ns: int
    copy_ns: int | None
    host_idle_ns: int
    other_idle_ns: int | None
    communication_ns: int
    """All communication, including the part that overlaps with computation."""

    @property
    def overlap(self) -> float | None:
        """Share of the communication that overlaps with computation; None without communication."""
        return 1 - self.exposed_communication_ns / self.communication_ns if self.communication_ns else None

    @property
    def parts(self) -> dict[str, int | None]:
        """Parts by name."""
        return {
            "compute": self.compute_ns,
            "exposed communication": self.exposed_communication_ns,
            "copies": self.copy_ns,
            "host idle": self.host_idle_ns,
            "other idle": self.other_idle_ns,
        }

    @property
    def closes_within(self) -> float:
        """Difference between the steps and the sum of their parts, as a share of the steps."""
        return abs(self.total_ns - sum(part or 0 for part in self.parts.values())) / self.total_ns


def marked_steps(trace: Trace) -> Steps:
    """Return the steps marked by torch.profiler. Raises TraceError if there are none, or if they are not
    consecutive."""
    is_mark = np.array([name.startswith(STEP) for name in trace.names])[trace.name]
    marks = np.flatnonzero(is_mark & trace.is_category(ANNOTATION, CPU_OP))
    if not len(marks):
        raise TraceError.problem(
            trace.file,
            "has no step marks, events named ProfilerStep#N",
            "call `step()` of torch.profiler after each step, or trace with: scaleray profile -c FILE --trace",
        )
    marks = marks[np.argsort(trace.start[marks])]
    start, end = trace.start[marks], trace.end[marks]
    span, marked = int(end.max() - start[0]), length(union(start, end))
    overlapping = int((end - start).sum()) - marked
    # time between two marks is idle time of the steps; gaps of half a step mean that steps are missing
    largest_gap = int(np.max(start[1:] - np.maximum.accumulate(end)[:-1], initial=0))
    if overlapping > CLOSES_WITHIN * span or largest_gap > MISSING * np.median(end - start):
        what = "overlap" if overlapping > CLOSES_WITHIN * span else "leave gaps"
        share = (overlapping if what == "overlap" else span - marked) / span
        raise TraceError.problem(
            trace.file,
            f"has step marks that {what} for {100 * share:.0f} % of their time: steps must be consecutive, with "
            f"gaps of less than {MISSING:.0%} of a step",
            "give a trace of one rank with consecutive steps, or a folder of traces for several ranks",
        )
    numbers = tuple(int(trace.name_of(mark)[len(STEP) :].split()[0]) for mark in marks.tolist())
    return Steps(numbers, int(start[0]), max(int(end.max()), _last_launched(trace, int(start[0]), int(end.max()))))


def partition_of(trace: Trace, steps: Steps) -> Partition:
    """Divide the traced steps of one rank. Raises TraceError if the parts do not sum to the steps."""
    kinds = kinds_of(trace)
    start, end = np.maximum(trace.start, steps.start_ns), np.minimum(trace.end, steps.end_ns)
    of_kind = {kind: union(start[kinds == kind], end[kinds == kind]) for kind in Kind}
    compute, communication = of_kind[Kind.COMPUTE], of_kind[Kind.COMMUNICATION]
    exposed = without(communication, compute)
    working = either(compute, communication)
    copies = without(of_kind[Kind.COPY], working)
    idle = without(np.array([[steps.start_ns, steps.end_ns]]), either(working, copies))
    host = _ended_late(trace, idle) if trace.is_on_device.any() else idle
    is_device = bool(trace.is_on_device.any())
    partition = Partition(
        num_steps=len(steps.numbers),
        total_ns=steps.end_ns - steps.start_ns,
        compute_ns=length(compute),
        exposed_communication_ns=length(exposed),
        copy_ns=length(copies) if is_device else None,
        host_idle_ns=length(host),
        other_idle_ns=length(without(idle, host)) if is_device else None,
        communication_ns=length(communication),
    )
    if partition.closes_within > CLOSES_WITHIN:
        raise TraceError.problem(
            trace.file,
            f"has parts that differ from its steps by {100 * partition.closes_within:.1f} %: they must agree "
            f"within {100 * CLOSES_WITHIN:.0f} %",
            "this is a bug in scaleray: keep the trace and report it",
        )
    return partition


def _last_launched(trace: Trace, start_ns: int, end_ns: int) -> int:
    """End of the last kernel that was launched in a period: the device may be behind the host."""
    launched = launch_starts(trace)
    ours = trace.is_on_device & (launched >= start_ns) & (launched < end_ns)
    return int(trace.end[ours].max()) if ours.any() else end_ns


def _ended_late(trace: Trace, pauses: Intervals) -> Intervals:
    """Pauses whose next kernel was launched only after they had begun, and a final pause without a next kernel."""
    if not len(pauses):
        return EMPTY
    on_device = np.flatnonzero(trace.is_on_device)
    order = on_device[np.argsort(trace.start[on_device], kind="stable")]
    launched = launch_starts(trace)
    following = np.searchsorted(trace.start[order], pauses[:, 1], side="left")
    is_last = following == len(order)
    ending = order[np.minimum(following, len(order) - 1)]
    is_late = is_last | (trace.start[ending] > pauses[:, 1]) | (launched[ending] >= pauses[:, 0])
    return pauses[is_late]
