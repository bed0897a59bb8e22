"""The tasks of a replica that has the whole model: forward and backward of every unit, and the communication that
runs beside them.

FSDP gathers a unit's parameters before it computes and frees them after, and the rate limiter lets at most `AHEAD`
units be gathered ahead of the one that computes (Zhao et al. 2023, arXiv:2304.11277, section 4.3). DDP reduces a bucket
when its last gradient is there (Li et al. 2020, arXiv:2006.15704, section 4.2). All collectives of a replica go through
one communicator, one after the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from scaleray.planner.simulation.simulate import Task

AHEAD = 2
COMPUTE, DATA, TENSOR = "compute", "data communication", "tensor communication"


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """One micro-batch through a unit (a layer), in seconds, and its collectives. Those of the tensor parallel group
    stop the compute."""

    forward_s: float
    backward_s: float
    forward_tensor_s: float = 0.0
    backward_tensor_s: float = 0.0
    gather_s: float = 0.0
    """FSDP: gather of its parameters, before the forward and again before the backward pass."""
    reduce_s: float = 0.0
    """FSDP: reduce-scatter of its gradients, after each backward pass."""
    gradient_bytes: float = 0.0


def sharded_tasks(units: Sequence[UnitCost], *, num_micro: int) -> Iterator[Task]:
    """Tasks of FSDP: every micro-batch gathers each unit twice and reduces it once. Names are (kind, micro, unit)."""
    last = len(units) - 1
    # the turns in the order of a step: which unit computes in each
    turns = [
        turn
        for micro in range(num_micro)
        for turn in (
            *(("forward", micro, index) for index in range(len(units))),
            *(("backward", micro, index) for index in range(last, -1, -1)),
        )
    ]
    for place, turn in enumerate(turns):
        # issued when the compute of AHEAD turns before is done; the gathers of one communicator keep their order
        yield from _gathers(turns, place, units)
        yield from _compute(turn, units, after=(("gather", *turn),), previous=turns[place - 1] if place else None)


def _gathers(turns: Sequence[tuple[str, int, int]], place: int, units: Sequence[UnitCost]) -> Iterator[Task]:
    """What enters the communicator's queue before the turn at `place` ends: at first the gathers ahead, later one for
    each turn, and behind it the gradients of the turn before."""
    ahead = (
        range(min(AHEAD + 1, len(turns))) if place == 0 else range(place + AHEAD, min(place + AHEAD + 1, len(turns)))
    )
    for index in ahead:
        turn = turns[index]
        freed = (_done(turns[index - AHEAD - 1], units),) if index > AHEAD else ()
        yield Task(("gather", *turn), DATA, units[turn[2]].gather_s, freed)
    if place and turns[place - 1][0] == "backward":
        yield _reduce(turns[place - 1], units)
    if place == len(turns) - 1:
        yield _reduce(turns[place], units)


def _reduce(turn: tuple[str, int, int], units: Sequence[UnitCost]) -> Task:
    return Task(("reduce", *turn), DATA, units[turn[2]].reduce_s, (_done(turn, units),))


def replicated_tasks(
    units: Sequence[UnitCost], *, num_micro: int, buckets_s: Sequence[tuple[int, float]]
) -> Iterator[Task]:
    """Tasks of DDP and ZeRO-1: gradients are reduced in the last micro-batch's backward pass.

    buckets_s: the unit whose backward pass fills the bucket, and the seconds of its reduction, in the order of
    the backward pass.
    """
    previous = None
    for micro in range(num_micro):
        forward = [("forward", micro, index) for index in range(len(units))]
        for turn in (*forward, *(("backward", micro, index) for _, _, index in reversed(forward))):
            yield from _compute(turn, units, after=(), previous=previous)
            previous = turn
    for number, (index, seconds) in enumerate(buckets_s):
        yield Task(("reduce", number), DATA, seconds, (_done(("backward", num_micro - 1, index), units),))


def buckets(units: Sequence[UnitCost], *, bucket_bytes: float) -> list[tuple[int, float]]:
    """(unit that fills it, bytes) of each bucket, from the last unit to the first; a unit larger than a bucket is
    one of its own."""
    found: list[tuple[int, float]] = []
    held = 0.0
    for index in range(len(units) - 1, -1, -1):
        held += units[index].gradient_bytes
        if held >= bucket_bytes or (index == 0 and held > 0):
            found.append((index, held))
            held = 0.0
    return found


def _compute(
    turn: tuple[str, int, int],
    units: Sequence[UnitCost],
    *,
    after: tuple[Hashable, ...],
    previous: tuple[str, int, int] | None,
) -> Iterator[Task]:
    unit = units[turn[2]]
    is_forward = turn[0] == "forward"
    before = (_done(previous, units),) if previous else ()
    yield Task(turn, COMPUTE, unit.forward_s if is_forward else unit.backward_s, (*after, *before))
    if _tensor_s(turn, units):
        yield Task(("tensor", *turn), TENSOR, _tensor_s(turn, units), (turn,))


def _done(turn: tuple[str, int, int], units: Sequence[UnitCost]) -> Hashable:
    """The task that ends a turn: its compute, or what the tensor parallel group says after it."""
    return ("tensor", *turn) if _tensor_s(turn, units) else turn


def _tensor_s(turn: tuple[str, int, int], units: Sequence[UnitCost]) -> float:
    unit = units[turn[2]]
    return unit.forward_tensor_s if turn[0] == "forward" else unit.backward_tensor_s
