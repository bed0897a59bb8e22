"""How kernels came onto a device: how long after their launch, how many waited in line, and why a stream paused.

The definitions are those of Holistic Trace Analysis, so that figures can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scaleray.profiling.traces.intervals import Ints
from scaleray.profiling.traces.trace import NONE, Trace

SLOW_CALL_NS = 50_000
"""A launch that takes the host longer than this is an outlier."""
LATE_KERNEL_NS = 100_000
"""So is a kernel that begins later than this after its launch has returned: it stood in line."""
KERNEL_AFTER_KERNEL_NS = 30_000
"""Pauses shorter than this are what two kernels in a row need."""
FULL_QUEUE = 1024
"""Kernels waiting in a stream's line at which a launch waits for room."""


@dataclass(frozen=True)
class Launches:
    """How launches of one rank went. Times are those between the end of a launch call and the kernel's start."""

    count: int
    delay_median_ns: int
    delay_p90_ns: int
    delay_max_ns: int
    late_kernels: int
    """Kernels that began more than 100 microseconds after their launch."""
    slow_calls: int
    """Launch calls of more than 50 microseconds."""
    short_kernels: int
    """Kernels that are shorter than the call that launched them."""


@dataclass(frozen=True)
class Queue:
    """Kernels that stood in line in one stream."""

    stream: int
    mean: float
    """Mean over time."""
    longest: int
    full_ns: int
    """Nanoseconds with 1,024 or more, at which launches wait."""


@dataclass(frozen=True)
class StreamPauses:
    """Time between kernels of one stream, by the reason."""

    stream: int
    host_ns: int
    """The next kernel was launched only after the one before had ended."""
    kernel_ns: int
    """It was launched in time, and the pause is shorter than 30 microseconds."""
    other_ns: int
    """It was launched in time, and began late: it waited for another stream, or for a copy."""


def launch_of(trace: Trace) -> Ints:
    """The launch call of each event on a device, as its place in the columns; -1 for events without one."""
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
    """Time at which each event on a device was launched; -1 where the trace does not say."""
    calls = launch_of(trace)
    return np.where(calls == NONE, NONE, trace.start[calls])


def launches_of(trace: Trace) -> Launches | None:
    """How launches went; None where there are none, on the CPU."""
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
    """The line of each stream: one more at a launch, one less where its kernel begins."""
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
    """Causes of the pauses of each stream between two of its kernels."""
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
