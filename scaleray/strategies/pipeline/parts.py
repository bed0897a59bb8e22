"""This worker's part of a pipelined model: its stages, its shared parameters, and reassembly of the whole model."""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from scaleray.common.printed import quantity
from scaleray.config import RunConfig
from scaleray.config.recipe.pipeline_bubble import bubble_share
from scaleray.errors import WorkloadError
from scaleray.profiling.collectives import ALL_REDUCE, SEND
from scaleray.strategies.contract.weight_shares import Placed, WeightShare, share_of, shared_out, sizes
from scaleray.strategies.fsdp import total_norm
from scaleray.strategies.pipeline.chain_check import check_chain
from scaleray.strategies.pipeline.costs import measured_costs
from scaleray.strategies.pipeline.pipeline_shards import Shards, present_anywhere
from scaleray.strategies.pipeline.stages import (
    Stage,
    Unit,
    balanced_bounds,
    counted_costs,
    find_units,
    make_part,
    make_stage,
    stage_of_block,
)
from scaleray.strategies.sharding.counted_passes import data_axis
from scaleray.strategies.tensor import SplitLayers, complete, data_axes
from scaleray.strategies.traffic.ledger import Ledger


class Parts:
    """This worker's stages of a model. `module`: the model with only these stages, under the names of the whole model.
    Building it is collective.

    Stage s is on worker s modulo the number of workers of a replica. A parameter that several stages use (a tied head)
    is on each of their workers, and its gradient is the sum of theirs. The other stages stay until the first batch has
    shown that the stages equal the whole model; until then, before there is optimizer state, this takes the memory of
    `build_model`."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, config: RunConfig, workload: Any) -> None:
        settings = config.pipeline
        self.group: dist.ProcessGroup = mesh.get_group("pp")
        data = data_axis(mesh)
        self.replicas: dist.ProcessGroup | None = data.get_group() if data.size() > 1 else None
        # of each stage's copies and parts, by worker; also of other replicas, if these train apart
        self._ranks: list[list[int]] = mesh._get_root_mesh().mesh.flatten(1).T.tolist()
        self.num_workers, self.worker = mesh["pp"].size(), mesh.get_local_rank("pp")
        self.num_stages = self.num_workers * settings.stages_of_each_worker
        self.device = next(model.parameters()).device
        self.config, self.sent = config, Ledger()
        self.sends = self.sent.entry("pp", self.num_workers, SEND)
        self.split, self.part = None, 0
        if "tp" in (mesh.mesh_dim_names or ()):
            self.split, self.part = SplitLayers(model, mesh["tp"], config, workload), mesh.get_local_rank("tp")
        blocks, self.units = cut(model, config, workload, self.num_workers)
        costs = counted_costs(self.units, len(blocks))
        if settings.split == "measured":
            costs = measured_costs(model, self.units, len(blocks), config=config, workload=workload)
            shared = [costs]
            dist.broadcast_object_list(shared, src=0, device=self.device)
            costs = shared[0]  # times differ from worker to worker, and all must cut alike
        self.costs, self.bounds = costs, balanced_bounds(costs, self.num_stages)
        self.stage_of = stage_of_block(self.bounds, len(blocks))
        self.names = [name for name, _ in model.named_parameters()]
        self.state_names = list(model.state_dict())
        held = [self._names_on(model, worker) for worker in range(self.num_workers)]
        self._refuse_idle(model, held)
        self.module, self._containers = make_part(model, self.units, lambda unit: self._owner_of(unit) == self.worker)
        everything = [make_stage(model, self.units, self.stage_of, index) for index in range(self.num_stages)]
        self.stages = [stage for stage in everything if self.owner(stage.index) == self.worker]
        self._unchecked: tuple[nn.Module, list[Stage]] | None = (model, everything)
        self._original = weakref.ref(model)
        self._shared = self._shared_parameters(held)
        mine = dict(self.module.named_parameters())
        first = {name: next(w for w, names in enumerate(held) if name in names) for name in self.names}
        self._counted_elsewhere = [p for name, p in mine.items() if first[name] != self.worker]
        self.shards: Shards | None = None
        if config.degrees(dist.get_world_size()).shard > 1:  # last, as it replaces parameters
            self.shards = self._shard(held, data_axes(mesh))
        self._whole_ids = {id(p) for p in self.module.parameters()} - (self.shards.sharded if self.shards else set())

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Context in which this worker's stages can run. Collective over the replicas of a stage."""
        return self.shards.gathered() if self.shards is not None else contextlib.nullcontext()

    @property
    def has_first(self) -> bool:
        return self.worker == 0

    @property
    def has_last(self) -> bool:
        return self.owner(self.num_stages - 1) == self.worker

    @property
    def is_checked(self) -> bool:
        """Whether the chain of stages has been compared with the whole model."""
        return self._unchecked is None

    def owner(self, stage: int) -> int:
        """Number, within the replica, of the worker that has a stage."""
        return stage % self.num_workers

    def check_chain(self, call: Callable[[nn.Module], Any]) -> None:
        """Compare the stages, run one after the other on this worker, with the whole model, and free the other stages.
        call: runs the given model. Raises WorkloadError if they differ. Every worker does the same, and communicates
        only in `gathered`."""
        assert self._unchecked is not None
        cuts_tokens = self.split is not None and self.config.tensor.sequence_parallel
        with self.gathered():
            check_chain(*self._unchecked, call, self.device, or_else="--tensor.sequence-parallel false" * cuts_tokens)
        self._unchecked = None

    def in_mode_of_module(self, stage: Stage) -> None:
        """Set the copies of the modules around a stage's blocks to the same mode as those of `module`."""
        for copied, original in zip(stage.containers, self._containers, strict=True):
            copied.training = original.training

    def put_by_gradients(self) -> None:
        """Set aside a micro-batch's gradients after each of its backward passes. Not collective."""
        if self.shards is not None:
            self.shards.put_by()

    def sum_gradients(self) -> None:
        """Sum gradients over the replicas, and gradients of shared parameters over their stages. Collective, within
        `gathered`.

        At the end of the step, one all-reduce of all gradients of a type in one piece, or one reduce-scatter for each
        sharded part; it does not overlap with computation."""
        if self.split is not None:
            for parameter in self._whole_parameters:
                complete(parameter)
        if self.replicas is not None:
            self._sum([p for p in self._whole_parameters if p.requires_grad], self.replicas)
        if self.shards is not None:
            self.shards.reduce()
        for parameters, group in self._shared:
            self._sum(parameters, group)

    def share_buffers(self) -> None:
        """Give the first replica's statistics to the others. Collective. Constants, which are not saved, are equal
        anyway."""
        if self.replicas is None:
            return
        saved = self.module.state_dict(keep_vars=True)
        for name, buffer in self.module.named_buffers():
            if name in saved and buffer.layout == torch.strided:
                dist.broadcast(_local(buffer), group=self.replicas, group_src=0)

    def total_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Norm of the gradient over all stages, counting a shared parameter once. Collective over the replica."""
        skipped = {id(p.grad) for p in self._counted_elsewhere}
        own = [g for g in gradients if id(g) not in skipped]
        squared = torch.zeros((), dtype=torch.float64, device=self.device)
        if own:
            is_plain = self.shards is None and self.split is None
            squared += (torch.nn.utils.get_total_norm if is_plain else total_norm)(own).double() ** 2
        dist.all_reduce(squared, group=self.group)
        return squared.sqrt()

    def weights(self) -> WeightShare:
        """This rank's share of the whole model's weights; the weights of its stages are divided among their replicas.
        Collective over the replica, and over the replicas if they have shards."""
        everyone: list[Any] = [None] * self.num_workers
        no_tensors = tuple(n for n, v in self.module.state_dict().items() if not isinstance(v, torch.Tensor))
        dist.all_gather_object(everyone, (sizes(self.module), no_tensors), group=self.group)
        layout: dict[str, Placed] = {}
        for worker, (theirs, _) in enumerate(everyone):
            first_here = {name: size for name, size in theirs.items() if name not in layout}
            parts = shared_out(first_here, len(self._ranks))
            layout |= {n: Placed(self._ranks[parts[n]][worker], size) for n, size in first_here.items()}
        in_order = {name: layout[name] for name in self.state_names if name in layout}
        share = share_of(self.module, in_order, rank=dist.get_rank())
        return replace(share, left_out=tuple(dict.fromkeys(name for _, theirs in everyone for name in theirs)))

    def let_go(self) -> None:
        """Remove the sharding from the stages if the model is no longer needed. Not collective."""
        if self.shards is not None:
            self.shards.close(self.module, keeps_shards=True)
        if self.split is not None:
            self.split.take_off()

    def give_back(self) -> None:
        """Copy all stages' values into the original model, if every worker of the replica still has it. Collective."""
        if self.shards is not None:
            self.shards.close(self.module, keeps_shards=False)
        whole = self._original()
        is_held = torch.tensor(whole is not None, dtype=torch.int32, device=self.device)
        dist.all_reduce(is_held, op=dist.ReduceOp.MIN, group=self.group)
        if whole is None or not is_held:
            return
        mine = self.module.state_dict()
        everyone: list[Any] = [None] * self.num_workers
        dist.all_gather_object(everyone, list(mine), group=self.group)
        for name, tensor in whole.state_dict().items():
            if isinstance(tensor, torch.Tensor):
                dist.broadcast(
                    _local(tensor),
                    group=self.group,
                    group_src=next(w for w, held in enumerate(everyone) if name in held),
                )

        if self.split is not None:
            self.split.take_off()
            self.split.make_plain()

    def note(self) -> str:
        """Text about the cuts, how even they are, and the expected idle share."""
        settings = self.config.pipeline
        ends = [*self.bounds[1:], len(self.stage_of)]
        blocks = ", ".join(f"{a}-{b - 1}" if b - a > 1 else f"{a}" for a, b in zip(self.bounds, ends, strict=True))
        totals = [sum(self.costs[a:b]) for a, b in zip(self.bounds, ends, strict=True)]
        slowest = max(totals) / (sum(totals) / len(totals))
        sizes: dict[str, Any] = {"num_workers": self.num_workers, "stages_per_worker": settings.stages_of_each_worker}
        shares = {m: bubble_share(settings.schedule, num_micro_batches=m, **sizes) for m in (1, 4, 16)}
        formula = ", ".join(f"{100 * share:.0f} % with {m}" for m, share in shares.items())
        data_axis = ""
        if self.shards is not None:
            whole = sum(p.numel() for p in self._whole_parameters)
            sharded = sum(p.numel() for p in self.module.parameters()) - whole
            data_axis = (
                f"; of worker {self.worker}'s parameters {sharded:,} are divided among replicas, "
                f"{whole:,} whole on each"
            )
        return (
            f"pipeline of {self.num_stages} stages on {self.num_workers} workers, {settings.schedule}: "
            f"blocks {blocks}; the largest stage is {slowest:.2f} times the mean ({settings.split}). "
            f"Idle share by formula, for even stages: {formula} micro-batches a step "
            f"(measured: perf/bubble_share){data_axis}"
        )

    def _shard(self, held: list[set[str]], replicas: DeviceMesh) -> Shards:
        """Shard the parts of this worker's stages, except parameters that other stages use too: their gradients are
        summed over stages while they are whole."""
        elsewhere = {name for worker, names in enumerate(held) if worker != self.worker for name in names}
        kept = {id(p) for name, p in self.module.named_parameters() if name in elsewhere}
        kept |= {id(p) for container in self._containers for p in container.parameters(recurse=False)}
        here = {id(unit.module): unit.module for unit in self.units if self._owner_of(unit) == self.worker}
        assert self.replicas is not None
        return Shards(list(here.values()), replicas, self.replicas, self.config, kept_whole=kept, sent=self.sent)

    @property
    def _whole_parameters(self) -> list[nn.Parameter]:
        """Parameters of `module` that are not shards, excluding gathered ones."""
        return [p for p in self.module.parameters() if id(p) in self._whole_ids]

    def _owner_of(self, unit: Unit) -> int:
        return self.owner(self.stage_of[unit.block])

    def _names_on(self, model: nn.Module, worker: int) -> set[str]:
        part, _ = make_part(model, self.units, lambda unit: self._owner_of(unit) == worker)
        return {name for name, _ in part.named_parameters()}

    def _refuse_idle(self, model: nn.Module, held: list[set[str]]) -> None:
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        idle = [worker for worker, names in enumerate(held) if not names & trained]
        if idle:
            raise WorkloadError.problem(
                "the pipeline",
                f"has no trained parameter on worker {idle[0]} of {self.num_workers}: "
                "each must have something to train",
                "use a smaller parallel.pipeline, or freeze less of the model",
            )

    def _shared_parameters(self, held: list[set[str]]) -> list[tuple[list[nn.Parameter], dist.ProcessGroup]]:
        """Trained parameters that are on several workers of this replica, each with the group of these workers.
        Collective over the mesh."""
        mine = dict(self.module.named_parameters())
        by_workers: dict[tuple[int, ...], list[str]] = {}
        for name in self.names:
            workers = tuple(w for w, names in enumerate(held) if name in names)
            if len(workers) > 1:
                by_workers.setdefault(workers, []).append(name)
        found = []
        for workers, names in sorted(by_workers.items()):
            for replica in self._ranks:  # every worker of all replicas takes part in making a group
                group = dist.new_group([replica[w] for w in workers])
                if dist.get_rank() in replica and self.worker in workers:
                    found.append(([mine[n] for n in names if mine[n].requires_grad], group))
        return found

    def _sum(self, parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        """Sum gradients over `group`. If no rank has a gradient, the result has none. Collective."""
        if not parameters:
            return
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        has_one = [p.grad is not None for p in parameters]
        somewhere = present_anywhere(has_one, group, self.device)
        for parameter, is_present in zip(parameters, somewhere, strict=True):
            if is_present:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                by_type.setdefault(parameter.grad.dtype, []).append(_local(parameter.grad))
        for gradients in by_type.values():
            flat = torch.cat([g.reshape(-1) for g in gradients])
            name = "dp" if group is self.replicas else "shared parameters"
            entry = self.sent.entry(name, dist.get_world_size(group), ALL_REDUCE)
            entry.run(lambda flat=flat: dist.all_reduce(flat, group=group), flat)  # type: ignore[misc]
            for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(total.view_as(gradient))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's part of a tensor that may be split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut(model: nn.Module, config: RunConfig, workload: Any, num_workers: int) -> tuple[list[nn.Module], list[Unit]]:
    """Blocks of a model, and its units with those around blocks. Raises WorkloadError if they cannot form stages."""
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise WorkloadError.problem(
                f"the model's {name}", "has sparse gradients, but a pipeline sums dense ones", "use sparse=False"
            )
    blocks, each = find_blocks(model, workload), config.pipeline.stages_of_each_worker
    if len(blocks) < num_workers * each:
        raise WorkloadError(
            "the model",
            f"made of {len(blocks)} blocks",
            f"{num_workers} workers with {quantity(each, 'stage')} each need {num_workers * each}",
            "use a smaller parallel.pipeline or pipeline.stages_per_worker",
        )
    return blocks, find_units(model, blocks)


def all_stages(model: nn.Module, config: RunConfig, workload: Any) -> list[Stage]:
    """All stages of a model on this worker, balanced by counted operations."""
    num_workers = config.parallel.pipeline if isinstance(config.parallel.pipeline, int) else 2
    blocks, units = cut(model, config, workload, num_workers)
    num_stages = num_workers * config.pipeline.stages_of_each_worker
    stage_of = stage_of_block(balanced_bounds(counted_costs(units, len(blocks)), num_stages), len(blocks))
    return [make_stage(model, units, stage_of, index) for index in range(num_stages)]


def find_blocks(model: nn.Module, workload: Any) -> list[nn.Module]:
    """The workload's blocks or, without these, the children of an nn.Sequential. Raises WorkloadError if there are
    neither."""
    given = workload.blocks(model) if callable(getattr(workload, "blocks", None)) else None
    if given is not None:
        return list(given)
    if isinstance(model, nn.Sequential):
        return list(model.children())
    raise WorkloadError.problem(
        "the workload",
        "lacks blocks(): parallel.pipeline needs to know where the model can be cut",
        "return the model's repeated blocks from blocks(model), in the order of use",
    )
