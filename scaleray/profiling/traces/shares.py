"""Which operators, kernels and modules the time of the traced steps went to."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from scaleray.profiling.traces.flops import flops_of
from scaleray.profiling.traces.host import Host
from scaleray.profiling.traces.intervals import Ints
from scaleray.profiling.traces.kinds import Kind, kinds_of
from scaleray.profiling.traces.partition import Steps
from scaleray.profiling.traces.trace import CPU_OP, NONE, Trace

_PRECISIONS = {"c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "c10::Float8_e4m3fn": "fp8"}


@dataclass(frozen=True)
class Share:
    """An operator or a kernel over all traced steps of a rank."""

    name: str
    count: int
    host_ns: int | None
    """Nanoseconds of the host in it, without operators within it; None for a kernel."""
    device_ns: int | None
    """Nanoseconds of the kernels and copies it launched; None without an accelerator."""


@dataclass(frozen=True)
class ModuleShare:
    """A module over all traced steps of a rank, forward and backward."""

    name: str
    compute_ns: int
    """Nanoseconds of its computing kernels, summed; of its operators where there is no accelerator."""
    flops: int | None
    """Operations of its matrix products, convolutions and attentions; None where shapes were not recorded."""
    mfu: float | None
    """Share of the peak while it computes; None without `flops` or without a peak."""


def top_operators(trace: Trace, host: Host, steps: Steps, most: int = 10) -> list[Share]:
    """The operators with most time on the device, or of the host where there is none."""
    inside = _within(trace, steps)
    operators = np.flatnonzero(inside & trace.is_category(CPU_OP))
    num_names = len(trace.names)
    host_ns = _sums(trace.name[operators], host.own[operators], num_names)
    counts = np.bincount(trace.name[operators], minlength=num_names)
    on_device = np.flatnonzero(trace.is_on_device & (host.operator != NONE))
    on_device = on_device[inside[host.operator[on_device]]]
    has_device = bool(trace.is_on_device.any())
    device_ns = _sums(trace.name[host.operator[on_device]], trace.duration[on_device], num_names)
    order = np.argsort(-(device_ns if has_device else host_ns), kind="stable")[:most]
    return [
        Share(trace.names[name], int(counts[name]), int(host_ns[name]), int(device_ns[name]) if has_device else None)
        for name in order
        if (device_ns if has_device else host_ns)[name] > 0
    ]


def top_kernels(trace: Trace, steps: Steps, most: int = 10) -> list[Share]:
    """The kernels and copies with most time; nothing without an accelerator."""
    ours = np.flatnonzero(_within(trace, steps) & trace.is_on_device)
    sums = _sums(trace.name[ours], trace.duration[ours], len(trace.names))
    counts = np.bincount(trace.name[ours], minlength=len(trace.names))
    order = np.argsort(-sums, kind="stable")[:most]
    return [Share(trace.names[name], int(counts[name]), None, int(sums[name])) for name in order if sums[name] > 0]


def top_modules(
    trace: Trace, host: Host, steps: Steps, *, peak_flops: float | None = None, most: int = 20
) -> list[ModuleShare]:
    """The modules with most computing time. peak_flops: what the device can do in a second."""
    inside = _within(trace, steps)
    has_device = bool(trace.is_on_device.any())
    counted = inside & (kinds_of(trace) == Kind.COMPUTE) & (host.module != NONE)
    spent = trace.duration if has_device else host.own
    times = _sums(host.module[counted], spent[counted], len(host.modules))
    flops: dict[int, int] = defaultdict(int)
    for event, arguments in trace.shapes.items():
        if inside[event] and host.module[event] != NONE:
            flops[int(host.module[event])] += flops_of(trace.name_of(event), arguments)
    order = np.argsort(-times, kind="stable")[:most]
    return [
        _module(host.modules[place], int(times[place]), flops[int(place)] if trace.shapes else None, peak_flops)
        for place in order
        if times[place] > 0
    ]


def total_flops(trace: Trace, steps: Steps) -> int | None:
    """Operations of all traced steps; None where shapes were not recorded."""
    inside = _within(trace, steps)
    counted = [flops_of(trace.name_of(event), arguments) for event, arguments in trace.shapes.items() if inside[event]]
    return sum(counted) or None


def _module(name: str, compute_ns: int, flops: int | None, peak_flops: float | None) -> ModuleShare:
    mfu = flops / (compute_ns / 1e9 * peak_flops) if flops and peak_flops and compute_ns else None
    return ModuleShare(name, compute_ns, flops, mfu)


def _within(trace: Trace, steps: Steps) -> np.ndarray:
    return (trace.start >= steps.start_ns) & (trace.start < steps.end_ns)


def _sums(places: Ints, values: Ints, count: int) -> Ints:
    sums = np.zeros(count, dtype=np.int64)
    np.add.at(sums, places, values)
    return sums


def precision_of(trace: Trace) -> str | None:
    """The precision of most of the operations, as the planner names it; None where shapes were not recorded."""
    sums: dict[str, int] = defaultdict(int)
    for event, arguments in trace.shapes.items():
        types = [_PRECISIONS.get(str(each)) for each in arguments.get("Input type") or ()]
        for precision in [each for each in types if each][:1]:
            sums[precision] += flops_of(trace.name_of(event), arguments)
    return max(sums, key=lambda name: sums[name]) if any(sums.values()) else None
