"""Check that dropout masks are equal within a replica, differ between replicas, and never repeat.

Generator states are compared instead of masks, since equal states give equal masks."""

import math

from scaleray.config.parallel import Degrees
from scaleray.records.certificate import Divergence
from scaleray.verification.causes.cause_classes import Cause, Finding
from scaleray.verification.traces.run_trace import StepTrace, Trace

WHOLE_STEP = ""
"""Name, in place of a layer's, for the generator state at the start of the step."""


def masks_broken(
    trace: Trace, degrees: Degrees, *, generators_of_others_after: int | None = None
) -> tuple[Divergence, Finding] | None:
    """First step with wrong masks, or None. degrees: of the workers. generators_of_others_after: step after which the
    run continued with another run's generators, whose states may repeat earlier ones."""
    seen: dict[tuple[int, str, bytes], int] = {}
    for step in trace.steps:
        if generators_of_others_after is not None and step.step == generators_of_others_after + 1:
            seen.clear()
        why = _within(step, degrees) or _between(step, degrees) or _again(step, seen)
        if why:
            return Divergence(step.step, "masks", math.inf), Finding(Cause.RANDOMNESS, why)
    return None


def _layers(step: StepTrace, rank: int) -> dict[str, list[bytes]]:
    """Distinct generator states by layer, since recomputation in the backward pass draws the same mask again."""
    found: dict[str, list[bytes]] = {}
    for layer, state in step.draws[rank]:
        states = found.setdefault(layer, [])
        if state not in states:
            states.append(state)
    return found


def _within(step: StepTrace, degrees: Degrees) -> str:
    for rank in range(len(step.draws)):
        first = degrees.replica(degrees.data_rank(rank))[0]
        ours, theirs = _layers(step, first), _layers(step, rank)
        for layer in ours.keys() & theirs.keys():
            if ours[layer] != theirs[layer]:
                return f"workers {first} and {rank} share a replica but draw different dropout masks{_of(layer)}"
    return ""


def _between(step: StepTrace, degrees: Degrees) -> str:
    drawn: dict[tuple[str, bytes], int] = {}
    for rank in range(len(step.draws)):
        for layer, states in _layers(step, rank).items():
            for state in states:
                other = drawn.setdefault((layer, state), rank)
                if degrees.data_rank(other) != degrees.data_rank(rank):
                    return (
                        f"replicas of ranks {other} and {rank} draw the same dropout masks{_of(layer)}, "
                        "and so drop the same units on each"
                    )
    return ""


def _again(step: StepTrace, seen: dict[tuple[int, str, bytes], int]) -> str:
    for rank, num_pieces in enumerate(step.num_pieces):
        for layer, states in _layers(step, rank).items():
            if layer == WHOLE_STEP:
                continue
            if len(states) < num_pieces:
                return f"the {num_pieces} micro-batches of rank {rank} have {len(states)} dropout masks{_of(layer)}"
            for state in states:
                before = seen.setdefault((rank, layer, state), step.step)
                if before != step.step:
                    return f"rank {rank} draws the dropout masks of step {before} again{_of(layer)}"
    return ""


def _of(layer: str) -> str:
    return f" in {layer}" if layer else ""
