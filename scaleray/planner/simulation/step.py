"""One optimizer step of a layout, task by task: what `step_time` has in closed form, with every dependency as it is.

It serves `plan explain step`, and pipelines whose stages are unequal. The ranking of layouts stays with the closed
form: on the 98 published rows of pipelines, from data sheets, the simulation misses by 13.3 % (median; 90th percentile
27.5) where the closed form misses by 12.8 (26.0). It is nearer on Megatron's rows (3.5 instead of 6.6 % on
Megatron-Core's four), further on nanotron's, whose hand-overs the closed form was taught. One rank of each stage is
simulated, since replicas do the same; waiting for the slowest of them, and what lies outside the passes, is added by
`step_time` alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from scaleray.planner.cost.block_pass import BlockPass, Measured, block_passes
from scaleray.planner.cost.communication import all_gather_s, all_reduce_s
from scaleray.planner.cost.compute import optimizer_s
from scaleray.planner.cost.constants import DEFAULT, Constants
from scaleray.planner.cost.layout import Layout, group_of
from scaleray.planner.cost.pipeline import hand_overs_s
from scaleray.planner.cost.stages import balanced_cuts, even_cuts
from scaleray.planner.hardware.kinds import Cluster
from scaleray.planner.models.profile import ModelProfile
from scaleray.planner.simulation.data_schedule import COMPUTE, DATA, UnitCost, buckets, replicated_tasks, sharded_tasks
from scaleray.planner.simulation.pipeline_schedule import StageCost, pipeline_tasks
from scaleray.planner.simulation.simulate import Task, Timeline, critical_path_s, simulate

REPLICAS = "replica communication"
WEIGHTS_SHARE = 0.5
"""Share of a backward pass that the gradients of weights take: as many products as those of inputs."""


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step, whose streams are named (rank of the pipeline, kind of work)."""

    timeline: Timeline
    tasks: Sequence[Task]

    @property
    def total_s(self) -> float:
        """Seconds from the first task to the last."""
        return self.timeline.total_s

    @property
    def critical_path_s(self) -> float:
        """Seconds of the longest chain of dependencies: a lower bound."""
        return critical_path_s(self.tasks)

    def busy_shares(self) -> dict[tuple[int, str], float]:
        """Share of the step in which each stream works."""
        return {stream: seconds / self.total_s for stream, seconds in self.timeline.busy_s.items()}


def simulated_step(
    model: ModelProfile,
    layout: Layout,
    cluster: Cluster,
    *,
    measured: Measured | None = None,
    fused_attention: bool = True,
    constants: Constants = DEFAULT,
) -> SimulatedStep:
    """Simulate forward, backward, their communication and the optimizer's update.

    Raises ValueError for an interleaved schedule whose micro-batches do not go into rounds of one size.
    """
    passes = block_passes(
        model, layout, cluster, measured=measured, fused_attention=fused_attention, constants=constants
    )
    units = [_unit(one, layout, times) for times, one in passes for _ in range(times)]
    build = _pipeline if layout.pipeline > 1 else _replica
    tasks = build(units, model, layout, cluster, constants)
    # what a measurement taught of communication is in the tensor parallel part already
    scale = measured.comm_scale if measured else 1.0
    tasks = [replace(task, duration_s=task.duration_s * scale) if _is_scaled(task) else task for task in tasks]
    return SimulatedStep(simulate(tasks), tasks)


@dataclass(frozen=True)
class _Unit:
    cost: UnitCost
    num_params: float
    """Parameters that are gathered and reduced."""
    owned_params: float
    """Parameters that this rank's optimizer updates."""
    backward_alone_s: float
    """Seconds of the backward pass without what is computed again."""


def _unit(one: BlockPass, layout: Layout, times: int) -> _Unit:
    compute = one.forward_s + one.backward_s + one.recompute_s
    stretch = max(1.0, one.launch_s / max(compute, 1e-12))
    # one all-reduce in the forward pass, one in the backward, and the forward's again where it is repeated
    repeats = layout.checkpointing == "full" and times > 1
    forward_share = 1 / (3 if repeats else 2)
    return _Unit(
        UnitCost(
            forward_s=one.forward_s * stretch,
            backward_s=(one.backward_s + one.recompute_s) * stretch,
            forward_tensor_s=one.tensor_comm_s * forward_share,
            backward_tensor_s=one.tensor_comm_s * (1 - forward_share),
            gradient_bytes=one.reduced_params * layout.gradient_bytes,
        ),
        one.reduced_params,
        one.owned_params,
        one.backward_s * stretch,
    )


def _replica(
    units: Sequence[_Unit], model: ModelProfile, layout: Layout, cluster: Cluster, constants: Constants
) -> list[Task]:
    costs = [one.cost for one in units]
    if layout.sharding == "zero3" and layout.data > 1:
        group = group_of(cluster, layout.num_shards, layout.tensor, num_gpus=layout.num_gpus)
        costs = [
            replace(
                one.cost,
                gather_s=all_gather_s(one.num_params * layout.gather_bits / 8, group, cluster, constants),
                reduce_s=all_gather_s(one.num_params * layout.gradient_bytes, group, cluster, constants),
            )
            for one in units
        ]
        tasks = list(sharded_tasks(costs, num_micro=layout.accumulation))
        tasks += _between_shards(tasks, units, layout, cluster, constants)
    else:
        filled = buckets(costs, bucket_bytes=constants.bucket_bytes) if layout.data > 1 else []
        seconds = [(index, _reduce_s(nbytes, layout, cluster, constants)) for index, nbytes in filled]
        tasks = list(replicated_tasks(costs, num_micro=layout.accumulation, buckets_s=seconds))
    tasks = [replace(task, stream=(0, task.stream)) for task in tasks]
    return tasks + _update(units, layout, cluster, constants, rank=0, after=_ends(tasks))


def _between_shards(
    tasks: Sequence[Task], units: Sequence[_Unit], layout: Layout, cluster: Cluster, constants: Constants
) -> list[Task]:
    """Tasks of HSDP: the shards of each unit are summed over the replicas, through a communicator of their own, after
    the last micro-batch."""
    replicas = layout.data * layout.context // layout.num_shards
    if replicas < 2:
        return []
    between = group_of(cluster, replicas, layout.tensor * layout.num_shards, num_gpus=layout.num_gpus)
    last = layout.accumulation - 1
    return [
        Task(
            ("replicas", index),
            REPLICAS,
            all_reduce_s(
                units[index].num_params * layout.gradient_bytes / layout.num_shards, between, cluster, constants
            ),
            (("reduce", "backward", last, index),),
        )
        for index in range(len(units) - 1, -1, -1)
    ]


def _pipeline(
    units: Sequence[_Unit], model: ModelProfile, layout: Layout, cluster: Cluster, constants: Constants
) -> list[Task]:
    ranks = layout.pipeline
    parts = ranks * (layout.chunks if ranks * layout.chunks <= len(units) else 1)
    whole = [
        one.cost.forward_s + one.cost.backward_s + one.cost.forward_tensor_s + one.cost.backward_tensor_s
        for one in units
    ]
    cuts = even_cuts(model, parts) if layout.even_stages else balanced_cuts(whole, parts)
    stages = [units[start:end] for start, end in itertools.pairwise(cuts)]
    costs = [
        StageCost(
            sum(one.cost.forward_s + one.cost.forward_tensor_s for one in stage),
            sum(one.cost.backward_s + one.cost.backward_tensor_s for one in stage),
            WEIGHTS_SHARE * sum(one.backward_alone_s for one in stage),
        )
        for stage in stages
    ]
    # one way of a boundary; what hides behind other parts of an interleaved schedule, the simulation knows by itself
    plain = replace(layout, chunks=1, schedule="1f1b")
    sends = [one / 2 for one in hand_overs_s(model, plain, cluster, constants)]
    schedule = "1f1b" if parts == ranks and layout.schedule == "interleaved" else layout.schedule
    tasks = list(
        pipeline_tasks(
            costs,
            schedule=schedule,
            num_ranks=ranks,
            num_micro=layout.accumulation,
            sends_block=parts == ranks,
            send_s=[*sends, max(sends)],
        )
    )
    for rank in range(ranks):
        own = [task for task in tasks if task.stream[0] == rank]
        held = list(range(parts - ranks + rank, -1, -ranks))
        reduces = []
        for virtual in held if layout.data > 1 else []:
            # the last pass that adds to this part's gradients
            final = [task.name for task in own if task.name[0] in ("backward", "weights") and task.name[-1] == virtual][
                -1
            ]
            params = sum(one.num_params for one in stages[virtual])
            seconds = _reduce_s(params * layout.gradient_bytes, layout, cluster, constants)
            reduces.append(Task(("reduce", virtual), (rank, DATA), seconds, (final,)))
        held_units = [one for virtual in held for one in stages[virtual]]
        tasks += [*reduces, *_update(held_units, layout, cluster, constants, rank=rank, after=_ends([*own, *reduces]))]
    return tasks


def _reduce_s(nbytes: float, layout: Layout, cluster: Cluster, constants: Constants) -> float:
    group = group_of(cluster, layout.data * layout.context, layout.tensor, num_gpus=layout.num_gpus)
    reduce = all_reduce_s if layout.sharding == "none" else all_gather_s
    return reduce(nbytes, group, cluster, constants)


def _update(
    units: Sequence[_Unit],
    layout: Layout,
    cluster: Cluster,
    constants: Constants,
    *,
    rank: int,
    after: tuple[Hashable, ...],
) -> list[Task]:
    """The optimizer, and with ZeRO-1 and 2 the parameters that come back from the others."""
    seconds = optimizer_s(sum(one.owned_params for one in units), layout, cluster.gpu, constants)
    made = [Task(("update", rank), (rank, COMPUTE), seconds, after)]
    if layout.sharding in ("zero1", "zero2") and layout.data > 1:
        group = group_of(cluster, layout.data * layout.context, layout.tensor, num_gpus=layout.num_gpus)
        nbytes = sum(one.num_params for one in units) * layout.gather_bits / 8
        made.append(
            Task(
                ("gather updated", rank),
                (rank, DATA),
                all_gather_s(nbytes, group, cluster, constants),
                (("update", rank),),
            )
        )
    return made


def _is_scaled(task: Task) -> bool:
    return task.stream[1] in (DATA, REPLICAS) or task.name[0] == "sent"


def _ends(tasks: Sequence[Task]) -> tuple[Hashable, ...]:
    """The last task of each stream."""
    return tuple({task.stream: task.name for task in tasks}.values())
