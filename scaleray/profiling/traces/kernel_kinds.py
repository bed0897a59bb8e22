"""Kind of each event of a trace: computation, communication, copy, or none of these.

On an accelerator, the kernel's name determines it, as in Holistic Trace Analysis. On the CPU, operators compute and
gloo's annotations communicate.
"""

import re
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from scaleray.profiling.traces.trace import ANNOTATION, CPU_OP, Trace


class Kind(IntEnum):
    """Role of an event in the step."""

    NONE = 0
    COMPUTE = 1
    COMMUNICATION = 2
    COPY = 3


_COMMUNICATION = re.compile(r"^nccl|^hccl|ncclKernel|ncclDev")
_COPY = re.compile(r"^(hip)?Memcpy|^(hip)?Memset|^dma")
_WAITING = re.compile(r"Sync$|^Stream Wait Event")
"""Markers that some torch versions list among the kernels."""
_GLOO = re.compile(r"^gloo:")
_COLLECTIVE_CALL = re.compile(r"^(c10d|_c10d_functional|_dtensor)::|^record_param_comms")
"""Operators that start a collective or wait for it; they do not compute."""


def kinds_of(trace: Trace) -> NDArray[np.int64]:
    """`Kind` of each event: of accelerator events if the trace has some, otherwise of CPU events."""
    kinds = np.zeros(len(trace.start), dtype=np.int64)
    on_device = trace.is_on_device
    if on_device.any():
        by_name = np.array([_on_device(name) for name in trace.names], dtype=np.int64)
        kinds[on_device] = by_name[trace.name[on_device]]
        return kinds
    computes = trace.is_category(CPU_OP)
    by_name = np.array([not _COLLECTIVE_CALL.search(name) for name in trace.names])
    kinds[computes & by_name[trace.name]] = Kind.COMPUTE
    by_name = np.array([bool(_GLOO.search(name)) for name in trace.names])
    kinds[trace.is_category(ANNOTATION) & by_name[trace.name]] = Kind.COMMUNICATION
    return kinds


def _on_device(name: str) -> Kind:
    if _COMMUNICATION.search(name):
        return Kind.COMMUNICATION
    if _COPY.search(name):
        return Kind.COPY
    return Kind.NONE if _WAITING.search(name) else Kind.COMPUTE
