"""Kernel launches on a device: launch delays, queue lengths, and the causes of pauses in a stream.

The definitions are those of Holistic Trace Analysis, so that results are comparable.
"""

from dataclasses import dataclass

import numpy as np

from scaleray.profiling.traces.intervals import Ints
from scaleray.profiling.traces.trace import NONE, Trace

SLOW_CALL_NS = 50_000
"""A launch call that takes longer than this on the host is an outlier."""
LATE_KERNEL_NS = 100_000
"""A kernel that starts later than this after its launch call returned is an outlier: it was queued."""
KERNEL_AFTER_KERNEL_NS = 30_000
"""Pauses shorter than this are the normal gap between consecutive kernels."""
FULL_QUEUE = 1024
"""Kernels in a stream's queue at which a launch blocks."""


@dataclass(frozen=True)
class Launches:
    """Launch statistics of one rank. Delays are measured from the end of a launch call to the kernel's start."""

    count: int
    delay_median_ns: int
    delay_p90_ns: int
    delay_max_ns: int
    late_kernels: int
    """Number of kernels that began more than 100 microseconds after their launch."""
    slow_calls: int
    """Number of launch calls longer than 50 microseconds."""
    short_kernels: int
    """Number of kernels shorter than the call that launched them."""


@dataclass(frozen=True)
class Queue:
    """Queue length of one stream."""

    stream: int
    mean: float
    """Mean over time."""
    longest: int
    full_ns: int
    """Nanoseconds with 1,024 or more queued kernels, at which launches block."""


@dataclass(frozen=True)
class StreamPauses:
    """Time between kernels of one stream, by cause."""

    stream: int
    host_ns: int
    """Nanoseconds of pauses whose next kernel was launched only after the previous one had ended."""
    kernel_ns: int
    """Nanoseconds of pauses below 30 microseconds before a kernel that was launched in time."""
    other_ns: int
    """Nanoseconds of longer pauses before a kernel launched in time, which waited for another stream or a copy."""


def launch_of(trace: Trace) -> Ints:
    """Launch call of each device event, as its column index; -1 for events without one."""
    found = np.full(len(trace.start), NONE, dtype=np.int64)
    calls = np.flatnonzero(trace.is_launch & (trace.correlation != NONE))
    on_device = np.flatnonzero(trace.is_on_device & (trace.correlation != NONE))
    if not len(calls) or not len(on_device):
        return found
    calls = calls[np.argsort(trace.correlation[calls], kind="stable")]
    numbers = trace.correlation[calls]
    place = np.minimum(np.searchsorted(numbers, trace.correlation[on_device]), len(numbers) - 1)
    matches = numbers[place] == trace.correlation[on_device]
    found[on_device[matches]] = calls[place[matches]]
    return found


def launch_starts(trace: Trace) -> Ints:
    """Time at which each device event was launched; -1 if the trace lacks it."""
    calls = launch_of(trace)
    return np.where(calls == NONE, NONE, trace.start[calls])


def launches_of(trace: Trace) -> Launches | None:
    """Launch statistics; None if there are no launches, as on the CPU."""
    calls = launch_of(trace)
    kernels = np.flatnonzero(calls != NONE)
    if not len(kernels):
        return None
    call = calls[kernels]
    delay = np.maximum(0, trace.start[kernels] - trace.end[call])
    return Launches(
        count=len(kernels),
        delay_median_ns=int(np.median(delay)),
        delay_p90_ns=int(np.percentile(delay, 90)),
        delay_max_ns=int(delay.max()),
        late_kernels=int((delay > LATE_KERNEL_NS).sum()),
        slow_calls=int((trace.duration[call] > SLOW_CALL_NS).sum()),
        short_kernels=int((trace.duration[kernels] < trace.duration[call]).sum()),
    )


def queues_of(trace: Trace) -> list[Queue]:
    """Queue of each stream: it grows at a launch and shrinks when a kernel begins."""
    calls = launch_of(trace)
    kernels = np.flatnonzero(calls != NONE)
    queues = []
    for stream in np.unique(trace.stream[kernels]):
        ours = kernels[trace.stream[kernels] == stream]
        moment = np.concatenate((trace.start[calls[ours]], trace.start[ours]))
        change = np.repeat([1, -1], len(ours))
        order = np.argsort(moment, kind="stable")
        moment, waiting = moment[order], np.cumsum(change[order])
        lasts = np.diff(moment)
        held = waiting[:-1]
        queues.append(
            Queue(
                stream=int(stream),
                mean=float((held * lasts).sum() / lasts.sum()) if lasts.sum() else 0.0,
                longest=int(waiting.max()),
                full_ns=int(lasts[held >= FULL_QUEUE].sum()),
            )
        )
    return queues


def pauses_of(trace: Trace) -> list[StreamPauses]:
    """Causes of the pauses between consecutive kernels of each stream."""
    launched = launch_starts(trace)
    on_device = np.flatnonzero(trace.is_on_device)
    found = []
    for stream in np.unique(trace.stream[on_device]):
        ours = on_device[trace.stream[on_device] == stream]
        ours = ours[np.argsort(trace.start[ours], kind="stable")]
        before_ended = trace.end[ours[:-1]]
        pause = trace.start[ours[1:]] - before_ended
        is_host = launched[ours[1:]] > before_ended
        is_kernel = ~is_host & (pause < KERNEL_AFTER_KERNEL_NS)
        found.append(
            StreamPauses(
                int(stream),
                host_ns=int(pause[is_host].sum()),
                kernel_ns=int(pause[is_kernel].sum()),
                other_ns=int(pause[~is_host & ~is_kernel].sum()),
            )
        )
    return found
