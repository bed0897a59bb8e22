"""Time of the traced steps by operator, kernel and module."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scaleray.profiling.traces.host import Host
from scaleray.profiling.traces.intervals import Ints
from scaleray.profiling.traces.kernel_kinds import Kind, kinds_of
from scaleray.profiling.traces.partition import Steps
from scaleray.profiling.traces.trace import CPU_OP, NONE, Trace

# Floating-point operations of an operator, from the shapes that torch.profiler recorded with it.
#
# The formulas count a multiplication and an addition as two operations, as torch's own flop counter does. Operators
# without a formula, such as additions and normalisations, count as zero.

Shape = Sequence[int]


def flops_of(operator: str, arguments: Mapping[str, Any]) -> int:
    """Operations of one call; 0 if no formula is known, or if the shapes do not match it."""
    formula = _FORMULAS.get(operator)
    if formula is None:
        return 0
    try:
        return formula(arguments["Input Dims"], arguments.get("Concrete Inputs", ()))
    except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):  # of another version of the operator
        return 0


def _product_of(first: int, second: int) -> Callable[[Sequence[Shape], Sequence[str]], int]:
    """Operations of the product of two inputs, matrices or batches of them, given by their argument positions."""

    def matrices(shapes: Sequence[Shape], _: Sequence[str]) -> int:
        *batch, rows, inner = shapes[first]
        return 2 * math.prod(batch) * rows * inner * shapes[second][-1]

    return matrices


def _convolution(shapes: Sequence[Shape], values: Sequence[str]) -> int:
    (samples, _, *space), weight = shapes[0], shapes[1]
    stride, padding, dilation, transposed = (json.loads(values[place].lower()) for place in (3, 4, 5, 6))
    if not transposed:
        space = [
            (size + 2 * pad - apart * (kernel - 1) - 1) // step + 1
            for size, pad, apart, kernel, step in zip(space, padding, dilation, weight[2:], stride, strict=True)
        ]
    return 2 * samples * math.prod(space) * math.prod(weight)


def _convolution_backward(shapes: Sequence[Shape], values: Sequence[str]) -> int:
    gradient, inputs, weight = shapes[0], shapes[1], shapes[2]
    transposed, mask = json.loads(values[7].lower()), json.loads(values[10].lower())
    space = inputs[2:] if transposed else gradient[2:]
    return 2 * gradient[0] * math.prod(space) * math.prod(weight) * sum(mask[:2])


def _attention(shapes: Sequence[Shape], _: Sequence[str]) -> int:
    query, key, value = shapes[0], shapes[1], shapes[2]
    scores = math.prod(query[:-1]) * key[-2]
    return 2 * scores * (query[-1] + value[-1])


def _attention_backward(shapes: Sequence[Shape], _: Sequence[str]) -> int:
    query, key, value = shapes[1], shapes[2], shapes[3]
    scores = math.prod(query[:-1]) * key[-2]
    return 2 * scores * (3 * query[-1] + 2 * value[-1])  # the scores are recomputed


_ATTENTIONS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_FORMULAS: dict[str, Callable[[Sequence[Shape], Sequence[str]], int]] = {
    "aten::mm": _product_of(0, 1),
    "aten::bmm": _product_of(0, 1),
    "aten::_scaled_mm": _product_of(0, 1),
    "aten::addmm": _product_of(1, 2),
    "aten::_addmm_activation": _product_of(1, 2),
    "aten::baddbmm": _product_of(1, 2),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    **{f"aten::_scaled_dot_product_{name}": _attention for name in _ATTENTIONS},
    **{f"aten::_scaled_dot_product_{name}_backward": _attention_backward for name in _ATTENTIONS},
}


_PRECISIONS = {"c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "c10::Float8_e4m3fn": "fp8"}


@dataclass(frozen=True)
class Share:
    """Statistics of an operator or a kernel over all traced steps of a rank."""

    name: str
    count: int
    host_ns: int | None
    """Nanoseconds on the host, without operators within it; None for a kernel."""
    device_ns: int | None
    """Nanoseconds of the kernels and copies it launched; None without an accelerator."""


@dataclass(frozen=True)
class ModuleShare:
    """Statistics of a module over all traced steps of a rank, forward and backward."""

    name: str
    compute_ns: int
    """Total nanoseconds of its computing kernels, or of its operators without an accelerator."""
    flops: int | None
    """Operations of its matrix products, convolutions and attentions; None if shapes were not recorded."""
    mfu: float | None
    """Share of the peak while it computes; None without `flops` or without a peak."""


def top_operators(trace: Trace, host: Host, steps: Steps, most: int = 10) -> list[Share]:
    """Operators with the most time on the device, or on the host if there is none."""
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
    """Kernels and copies with the most time; empty without an accelerator."""
    ours = np.flatnonzero(_within(trace, steps) & trace.is_on_device)
    sums = _sums(trace.name[ours], trace.duration[ours], len(trace.names))
    counts = np.bincount(trace.name[ours], minlength=len(trace.names))
    order = np.argsort(-sums, kind="stable")[:most]
    return [Share(trace.names[name], int(counts[name]), None, int(sums[name])) for name in order if sums[name] > 0]


def top_modules(
    trace: Trace, host: Host, steps: Steps, *, peak_flops: float | None = None, most: int = 20
) -> list[ModuleShare]:
    """Modules with the most computing time. peak_flops: peak FLOP/s of the device."""
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
    """Operations of all traced steps; None if shapes were not recorded."""
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
    """Precision of most of the operations, as named by the planner; None if shapes were not recorded."""
    sums: dict[str, int] = defaultdict(int)
    for event, arguments in trace.shapes.items():
        types = [_PRECISIONS.get(str(each)) for each in arguments.get("Input type") or ()]
        for precision in [each for each in types if each][:1]:
            sums[precision] += flops_of(trace.name_of(event), arguments)
    return max(sums, key=lambda name: sums[name]) if any(sums.values()) else None
