"""The order in which each rank of a pipeline works through micro-batches, and the tasks of one step with
all they depend on.

A rank holds `num_chunks` parts of the model; part c of rank r is virtual stage c x ranks + r. Orders: GPipe,
arXiv:1811.06965; 1F1B and interleaved, Narayanan et al. 2021, arXiv:2104.04473; zero bubble (ZB-H1), Qi et al. 2023,
arXiv:2401.10241. Where a paper leaves a choice, torch.distributed.pipelining's is taken: micro-batches of interleaved
schedules go in rounds of at least as many as there are ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from scaleray.planner.cost.layout import Schedule
from scaleray.planner.simulation.simulate import Task

Kind = Literal["forward", "backward", "weights"]


@dataclass(frozen=True)
class StageCost:
    """One micro-batch through one virtual stage, in seconds. `backward_s` holds the gradients of the weights too, which
    take `weights_s` of it."""

    forward_s: float
    backward_s: float
    weights_s: float = 0.0
    """Seconds of work that the zero-bubble schedule may put off; other schedules do it at once."""


@dataclass(frozen=True)
class Pass:
    """A micro-batch through one chunk of a rank."""

    kind: Kind
    micro: int
    chunk: int = 0


def pipeline_order(schedule: Schedule, *, rank: int, num_ranks: int, num_micro: int, num_chunks: int = 1) -> list[Pass]:
    """The passes of a rank, one after the other. Raises ValueError where micro-batches do not go into
    rounds of one size."""
    total = num_micro * num_chunks
    if schedule == "gpipe":
        return [Pass("forward", micro) for micro in range(num_micro)] + [
            Pass("backward", micro) for micro in range(num_micro)
        ]
    per_round = num_micro // max(1, num_micro // num_ranks)
    if num_chunks > 1 and num_micro % per_round:
        raise ValueError(f"{num_micro} micro-batches do not go into rounds of {per_round}")
    behind = num_ranks - 1 - rank
    ahead = behind if num_chunks == 1 or schedule == "zero_bubble" else 2 * behind
    ahead = min(total, (num_chunks - 1) * per_round + ahead)
    puts_off = rank if schedule == "zero_bubble" else None

    def at(kind: Kind, index: int) -> Pass:
        if num_chunks == 1:
            return Pass(kind, index)
        turn, place = divmod(index, per_round * num_chunks)
        chunk = place // per_round
        return Pass(kind, turn * per_round + place % per_round, chunk if kind == "forward" else num_chunks - 1 - chunk)

    order = [at("forward", index) for index in range(ahead)]
    for index in range(total):
        order += [at("forward", index + ahead)] if index + ahead < total else []
        order.append(at("backward", index))
        if puts_off is not None and index >= puts_off:
            order.append(at("weights", index - puts_off))
    if puts_off is not None:
        order += [at("weights", index) for index in range(max(0, total - puts_off), total)]
    return order


def pipeline_tasks(
    costs: Sequence[StageCost],
    *,
    schedule: Schedule,
    num_ranks: int,
    num_micro: int,
    send_s: Sequence[float] = (),
    sends_block: bool = True,
) -> Iterator[Task]:
    """Tasks of all ranks, named (kind, micro, virtual stage), on streams (rank, "compute").

    costs: one for each virtual stage in the model's order, as many as a multiple of the ranks. send_s: seconds to send
    to a neighbour over the boundary after each rank, the last of which is passed from the last rank to the first; 0
    where it is empty. A send stops the compute of the sender where `sends_block`, as in Megatron without overlap;
    otherwise it goes beside it, on a stream for each direction.
    """
    num_virtual = len(costs)
    for rank in range(num_ranks):
        order = pipeline_order(
            schedule, rank=rank, num_ranks=num_ranks, num_micro=num_micro, num_chunks=num_virtual // num_ranks
        )
        for one in order:
            virtual = one.chunk * num_ranks + rank
            cost = costs[virtual]
            name = (one.kind, one.micro, virtual)
            compute = (rank, "compute")
            if one.kind == "weights":
                yield Task(name, compute, cost.weights_s, (("backward", one.micro, virtual),))
                continue
            step = 1 if one.kind == "forward" else -1
            after: list[tuple[str | int, ...]] = (
                [("sent", one.kind, one.micro, virtual - step)] if 0 <= virtual - step < num_virtual else []
            )
            if one.kind == "backward":
                after.append(("forward", one.micro, virtual))
            put_off = cost.weights_s if schedule == "zero_bubble" else 0.0
            seconds = cost.forward_s if one.kind == "forward" else cost.backward_s - put_off
            yield Task(name, compute, seconds, tuple(after))
            if 0 <= virtual + step < num_virtual:
                stream = compute if sends_block else (rank, f"send {one.kind}")
                over = rank if one.kind == "forward" else (rank - 1) % num_ranks
                yield Task(("sent", *name), stream, send_s[over] if send_s else 0.0, (name,))
