"""Nesting of the host's events: the enclosing event of each, its exclusive time, and its module.

Modules are named by annotations `module: NAME` (scaleray's traces) or by `nn.Module: NAME` (traces with stacks).
Backward operators belong to the module of the forward operator with the same sequence number.
"""

from dataclasses import dataclass

import numpy as np

from scaleray.profiling.traces.intervals import Ints
from scaleray.profiling.traces.launches import launch_of
from scaleray.profiling.traces.trace import ANNOTATION, CPU_OP, MODULE_PREFIX, NONE, PYTHON, Trace

MODULE_PREFIXES = (MODULE_PREFIX, "nn.Module: ")
BACKWARD = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Host:
    """Nesting of the host's events; columns as in the trace."""

    parent: Ints
    """Index of the operator or annotation around each event on its thread; -1 for none."""
    own: Ints
    """Nanoseconds of each operator, excluding the operators within it."""
    module: Ints
    """Module of each event, as an index into `modules`; -1 for none."""
    modules: list[str]
    operator: Ints
    """Operator that launched each device event, or the event itself if it is an operator; -1 for none."""


def host_of(trace: Trace) -> Host:
    """Compute the nesting of a trace's events."""
    modules = sorted({name for name in trace.names if name.startswith(MODULE_PREFIXES)})
    number = {name: place for place, name in enumerate(modules)}
    module_of_name = np.array([number.get(name, NONE) for name in trace.names], dtype=np.int64)
    is_around = trace.is_category(CPU_OP, ANNOTATION) | (module_of_name[trace.name] != NONE) & trace.is_category(PYTHON)
    is_inside = is_around | trace.is_launch
    is_operator = trace.is_category(CPU_OP)
    events = np.flatnonzero(is_inside)
    events = events[np.lexsort((-trace.duration[events], trace.start[events], trace.thread[events]))]
    parent, own = _nested(trace, events, is_around, is_operator)
    module = np.where(is_around, module_of_name[trace.name], NONE)
    _inherit(module, parent, events)
    _give_to_backward(trace, module, is_operator)
    _inherit(module, parent, events)
    operator = np.where(is_operator, np.arange(len(parent)), NONE)
    _inherit(operator, parent, events)
    calls = launch_of(trace)
    launched = calls != NONE
    module[launched], operator[launched] = module[calls[launched]], operator[calls[launched]]
    return Host(parent, own, module, [name.split(": ", 1)[1] for name in modules], operator)


def _nested(trace: Trace, events: Ints, is_around: np.ndarray, is_operator: np.ndarray) -> tuple[Ints, Ints]:
    parent = np.full(len(trace.start), NONE, dtype=np.int64)
    own = np.where(is_operator, trace.duration, 0)
    around: list[tuple[int, int]] = []  # (end, index) of open events, outermost first
    thread = NONE
    columns = (trace.thread[events], trace.start[events], trace.end[events], is_around[events], is_operator[events])
    for event, on, start, end, opens, operates in zip(
        events.tolist(), *(each.tolist() for each in columns), strict=True
    ):
        if on != thread:
            thread, around = on, []
        while around and around[-1][0] <= start:
            around.pop()
        if around:
            parent[event] = around[-1][1]
            if operates:
                _take_from_operator(own, parent, is_operator, event, end - start)
        if opens:
            around.append((end, event))
    return parent, own


def _take_from_operator(own: Ints, parent: Ints, is_operator: np.ndarray, event: int, duration: int) -> None:
    outer = parent[event]
    while outer != NONE and not is_operator[outer]:
        outer = parent[outer]
    if outer != NONE:
        own[outer] -= duration


def _inherit(column: Ints, parent: Ints, events: Ints) -> None:
    """Give each event without a value the value of its enclosing event; `events` lists outer ones first."""
    for event in events.tolist():
        if column[event] == NONE and parent[event] != NONE:
            column[event] = column[parent[event]]


def _give_to_backward(trace: Trace, module: Ints, is_operator: np.ndarray) -> None:
    is_backward = np.array([name.startswith(BACKWARD) for name in trace.names])[trace.name]
    numbered = is_operator & (trace.sequence != NONE)
    forward = np.flatnonzero(numbered & ~is_backward & (module != NONE))
    forward = forward[np.argsort(trace.start[forward], kind="stable")]
    # the last operator with a number created the graph's node; those before it only read the counter
    by_number = dict(zip(trace.sequence[forward].tolist(), module[forward].tolist(), strict=True))
    for event in np.flatnonzero(numbered & is_backward & (module == NONE)).tolist():
        module[event] = by_number.get(int(trace.sequence[event]), NONE)
