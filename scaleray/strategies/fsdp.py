"""Fully sharded data parallel training: parameters, gradients and optimizer state are sharded over the workers. Each
unit of the model is gathered for use and then freed; its gradient is reduced to the shards. Built on torch's
`fully_shard` (FSDP2). Sources: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054; Zhao et al. 2023, PyTorch FSDP,
arXiv:2304.11277, section 3.2.2 for HSDP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.modules.batchnorm import _NormBase

from scaleray.common.equal_models import dense_buffers
from scaleray.config import RunConfig
from scaleray.errors import WorkloadError
from scaleray.parallel.experts import DivisibleExperts, divisible_experts
from scaleray.profiling.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER
from scaleray.strategies.contract.parallel import Computation, OnModel, Parallel
from scaleray.strategies.contract.weight_shares import WeightShare, share_among
from scaleray.strategies.sharding.counted_collectives import CountedAllGather, CountedReduceScatter, Window
from scaleray.strategies.sharding.fsdp_units import Units, choose_units, prefetch_distance
from scaleray.strategies.sharding.unit_arrivals import UnitArrivals
from scaleray.strategies.sharding.unsharding import unshard_for_good
from scaleray.strategies.traffic.flat_broadcast import broadcast
from scaleray.strategies.traffic.ledger import Ledger

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Sharded:
    """Model whose parameters are shards. sent: counts its collectives. window: passes own gradients to a watcher.
    arrivals: times at which this rank arrives at the collectives."""

    model: nn.Module
    root: Root
    units: Units
    sent: Ledger
    window: Window
    arrivals: UnitArrivals
    notes: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes leave whole gradients on each worker; the next pass outside reduces their
        sum."""
        _wrapped(self.model).set_requires_gradient_sync(False)
        try:
            yield
        finally:
            _wrapped(self.model).set_requires_gradient_sync(True)


class Root(OnModel):
    """Module that runs user code while parameters outside units are whole; units are gathered when they are called.

    It has no parameters of its own. torch treats the outermost `fully_shard` module as the root and gathers and
    completes only in its forward pass. It would do neither for a separately called method or part of the model."""

    @classmethod
    def over(cls, model: nn.Module, mesh: DeviceMesh) -> Root:
        """Make the root of a model processed by `fully_shard`, with its units."""
        root = cls(model)
        # inputs and results are the user's, who gets them as they are; the model casts its own
        fully_shard(
            root, mesh=mesh, reshard_after_forward=False, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False)
        )
        return root

    def forward(self, computation: Computation) -> Any:
        _wrapped(self.module).unshard()
        return super().forward(computation)

    def run_alone(self, computation: Computation) -> Any:
        """The result of a computation without a backward pass."""
        try:
            result = self(computation)
        except BaseException:
            _wrapped(self).reset_iter_state()  # it is in the middle of a forward pass
            raise
        if torch.is_grad_enabled():
            _wrapped(self).reset_iter_state()  # it waits for the backward pass
        return result


def apply(model: nn.Module, mesh: DeviceMesh | None, config: RunConfig, workload: Any) -> Parallel:
    """Shard the model over `mesh`, with one axis `dp`, or `replicate` and `shard` (HSDP). Its passes are collective.

    Parameters become DTensors with the same names. Buffers are whole on each worker and follow rank 0 after every step.
    Raises WorkloadError for a model that cannot be sharded, ConfigError for units that do not fit the settings."""
    if mesh is None:
        raise ValueError("fsdp needs a device mesh with the axis 'dp', or 'replicate' and 'shard'")
    settings = config.fsdp
    degree = config.degrees(dist.get_world_size()).expert
    experts = divide_experts(model, mesh, degree) if degree > 1 else None
    sharded = shard(model, mesh, config, workload, experts)
    buffers = [buffer for buffer in dense_buffers(model) if buffer.numel()]
    group = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
    assert group is not None

    shared = Ledger()
    entry = shared.entry("all", dist.get_world_size(group), BROADCAST)

    def share_buffers() -> None:
        broadcast(dense_buffers(model), group, entry=entry)

    def after_update(step: int) -> None:
        if buffers:
            share_buffers()  # as DDP does at the start of a forward pass

    def weights() -> WeightShare:
        share_buffers()
        return share_among(model, range(dist.get_world_size()), rank=dist.get_rank())

    return Parallel(
        model=sharded.root,
        module=model,
        alone=sharded.root.run_alone,
        gradient_divisor=mesh.size(),  # fully_shard averages, over both axes of HSDP
        no_sync=sharded.no_sync if settings.accumulate == "whole" else contextlib.nullcontext,
        before_evaluation=share_buffers,
        weights=weights,
        close=lambda: unshard_for_good(sharded.root, keeps_shards=settings.build_gib is not None),
        let_go=lambda: unshard_for_good(sharded.root, keeps_shards=True),
        total_norm=total_norm,
        share_of_square=lambda gradients: share_of_square(gradients, mesh),
        forward_is_collective=True,
        after_update=after_update,
        tell_phases=sharded.sent.tell_phases,
        bytes_sent=lambda: sharded.sent.num_bytes,
        collectives=lambda: [*sharded.sent.rows(), *shared.rows()],
        arrivals=sharded.arrivals,
        show_own_gradients=sharded.window.show,
        notes=[*sharded.units.notes, *sharded.notes],
    )


@dataclass(frozen=True)
class DividedExperts:
    """Experts of a model, divided equally among the workers of a group. mesh: over which each worker's are sharded."""

    modules: list[DivisibleExperts]
    mesh: DeviceMesh
    degree: int

    def shard(self, **options: Any) -> None:
        """Make each a unit, sharded along the width if the number of workers divides it. Must be called before the
        units around them are made."""
        for module in self.modules:
            dim = 1 if all(p.shape[1] % self.mesh.size(-1) == 0 for p in module.parameters()) else 0
            fully_shard(module, mesh=self.mesh, shard_placement_fn=partial(_along, Shard(dim)), **options)


def _along(placement: Shard, parameter: nn.Parameter) -> Shard:
    return placement


def experts_of(model: nn.Module, degree: int) -> list[DivisibleExperts]:
    """Experts of a model, to be divided among `degree` workers. Raises WorkloadError for a model without experts, or if
    their number cannot be divided equally."""
    modules = divisible_experts(model)
    if not modules:
        raise WorkloadError(
            "parallel.expert",
            degree,
            "it divides experts of scaleray.parallel.MixtureOfExperts and transformers, but the model has none",
            "leave it out",
        )
    for module in modules:
        if module.num_experts % degree:
            near = [n for n in range(1, module.num_experts + 1) if module.num_experts % n == 0]
            raise WorkloadError(
                "parallel.expert", degree, f"it must divide the {module.num_experts} experts of a layer",
                f"possible: {', '.join(map(str, near))}",
            )  # fmt: skip
    return modules


def divide_experts(model: nn.Module, mesh: DeviceMesh, degree: int) -> DividedExperts:
    """Keep this worker's experts, as DTensors over `degree` neighbours along the last data axis of the mesh, and over
    `tp` if they are split over it. Collective. Raises WorkloadError for a model without experts, or if their number
    cannot be divided equally."""
    data = [name for name in mesh.mesh_dim_names or () if name != "tp"][:-1]
    fine = mesh._unflatten(len(data), (mesh.size(len(data)) // degree, degree), ("of_experts", "ep"))
    ours = fine["ep"]
    modules = experts_of(model, ours.size())
    for module in modules:
        module.group = ours.get_group()
        for name, weights in list(module.named_parameters()):
            part: Any = weights.detach()
            placements: list[Any] = [Shard(0)]
            over = ours
            if isinstance(part, DTensor):
                placements, over = [*placements, *part.placements], fine["ep", "tp"]
                part = part.to_local()
            own = part.tensor_split(ours.size())[ours.get_local_rank()].clone()
            divided = DTensor.from_local(own, over, placements, run_check=False)
            module.register_parameter(name, nn.Parameter(divided, weights.requires_grad))
    return DividedExperts(modules, fine[(*data, "of_experts")], degree)


def shard(
    model: nn.Module, mesh: DeviceMesh, config: RunConfig, workload: Any, experts: DividedExperts | None = None
) -> Sharded:
    """Shard a model in place over a mesh of one axis, or of two axes of which the first replicates. Parameters may
    already be DTensors of another mesh, as with tensor parallelism. Not collective. Raises WorkloadError and
    ConfigError."""
    settings = config.fsdp
    dtype = _check_parameters(model)
    units = choose_units(model, settings, workload)
    policy, notes = mixed_precision(config, dtype)
    gathered = (policy.param_dtype or dtype).itemsize
    distance = prefetch_distance(units, settings, bytes_per_parameter=gathered)
    if distance < min(settings.prefetch, len(units.modules)):
        notes.append(f"fsdp: prefetches {distance} units, not {settings.prefetch}, to keep fsdp.max_unsharded_gib")
    offload = CPUOffloadPolicy() if settings.cpu_offload else OffloadPolicy()
    sent, window = Ledger(), Window()
    replicas = mesh.get_group(0) if mesh.ndim == 2 else None
    axis, shards = (mesh.mesh_dim_names or ("dp",))[-1], mesh.size(-1)
    statistics = shard_statistics(model, policy, mesh=mesh, offload_policy=offload)
    if experts is not None:
        experts.shard(reshard_after_forward=settings.reshard_after_forward, mp_policy=policy, offload_policy=offload)
        statistics += experts.modules
        for each in experts.modules:
            each.run = sent.entry("expert", experts.degree, ALL_TO_ALL).run
    # inner units first: each takes what no other has taken
    for module in (m for m in reversed(units.modules) if m not in statistics):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=settings.reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
        )
    fully_shard(
        # its own parameters are used at the start of the backward pass: freed before, they would only be gathered again
        model,
        mesh=mesh,
        reshard_after_forward=False,
        mp_policy=with_output(policy, dtype),
        offload_policy=offload,
    )
    wrapped = [_wrapped(module) for module in units.modules]
    own = [_wrapped(module) for module in statistics if module not in units.modules]
    arrivals = UnitArrivals(model, units, distance)
    for unit in (*wrapped, *own, _wrapped(model)):
        over = (axis, shards)
        if experts is not None and unit in experts.modules:
            over = "of_experts", experts.mesh.size(-1)
        gather = CountedAllGather(sent.entry(*over, ALL_GATHER))
        scatter = CountedReduceScatter(sent.entry(*over, REDUCE_SCATTER), window, replicas=replicas)
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)
        arrivals.add(unit, gather, scatter)
        unit.set_reduce_scatter_unused_params(settings.reduce_unused, recurse=False)
        if mesh.ndim == 2:  # torch calls it after its own all-reduce over the replicas, with what that was given
            unit.set_all_reduce_hook(sent.entry("replicate", mesh.size(0), ALL_REDUCE).add)
    _prefetch(wrapped, _wrapped(model), distance)
    for unit in own:
        unit.set_modules_to_backward_prefetch([unit])  # itself, which is gathered already: nothing
    return Sharded(model, Root.over(model, mesh), units, sent, window, arrivals, notes)


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Euclidean norm over all gradients, whole or sharded on any meshes, as a plain tensor that is equal on all ranks.
    Collective over the meshes of sharded gradients, in the order in which they first occur. Computed in float64, since
    squares of large float32 gradients overflow."""
    by_layout: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        if isinstance(gradient, DTensor) and any(isinstance(p, Partial) for p in gradient.placements):
            gradient = gradient.redistribute(
                placements=[Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
            )
        layout = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        by_layout.setdefault(layout, []).append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    squares = []
    for layout, local in by_layout.items():
        norms = torch._foreach_norm(local, 2, dtype=torch.float64)
        square = torch.stack(list(norms)).square().sum()
        if layout is not None:
            mesh, placements = layout
            square = square.to(_device(mesh))  # offloaded shards are on the CPU, the mesh's group may not be
            for axis, placement in enumerate(placements):
                if not isinstance(placement, Replicate):
                    dist.all_reduce(square, group=mesh.get_group(axis))
        squares.append(square)
    if not squares:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()


def share_of_square(gradients: Sequence[torch.Tensor], mesh: DeviceMesh) -> float:
    """This rank's share of the squared norm of gradients, all of which are sharded over `mesh`. Not collective."""
    if not gradients:
        return 0.0
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    norms = torch._foreach_norm(local, 2, dtype=torch.float64)
    replicas = mesh.size(0) if mesh.ndim == 2 else 1
    return torch.stack(list(norms)).square().sum().item() / replicas


def check_one_dtype(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.dtype:
    """Dtype of the parameters that need a gradient. Raises WorkloadError if there are several."""
    dtypes = {p.dtype: name for name, p in parameters if p.requires_grad}
    if len(dtypes) > 1:
        (first, one), (second, other), *_ = dtypes.items()
        raise WorkloadError.problem(
            "the model",
            f"has parameters of several types ({one} in {first}, {other} in {second}): "
            "fsdp reduces the gradients of a unit together",
            "convert them to one type, or use --strategy.name zero1",
        )
    return next(iter(dtypes), torch.float32)


def mixed_precision(config: RunConfig, dtype: torch.dtype) -> tuple[MixedPrecisionPolicy, list[str]]:
    """Types in which parameters of `dtype` are gathered and their gradients are reduced, and notes for the user."""
    settings = config.fsdp
    if config.precision.dtype == "fp64":
        ignored = [k for k in ("parameter_dtype", "reduce_dtype") if getattr(settings, k) is not None]
        return MixedPrecisionPolicy(), [f"fsdp.{key} has no effect with precision.dtype fp64" for key in ignored]
    parameter_dtype = DTYPES[config.gathered_dtype] if config.gathered_dtype else None
    reduce_dtype = DTYPES[settings.reduce_dtype] if settings.reduce_dtype else dtype
    # a unit's inputs are cast with its parameters, under autocast too: a normalisation that gets both as they come may
    # refuse the mixture (layer_norm on the CPU does)
    return MixedPrecisionPolicy(parameter_dtype, reduce_dtype), []


def with_output(policy: MixedPrecisionPolicy, dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Policy for the whole model, whose output has the model's own type, since the loss is computed in it."""
    if policy.param_dtype is None:
        return policy
    return MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, output_dtype=dtype)


def has_statistics(module: nn.Module) -> bool:
    """Whether a layer has running statistics in addition to its parameters, which must have the same type as these."""
    return isinstance(module, _NormBase) and module.track_running_stats


def shard_statistics(model: nn.Module, policy: MixedPrecisionPolicy, **options: Any) -> list[nn.Module]:
    """Make units of the layers with running statistics. They keep their own type while their inputs are narrower, as
    with autocast. Must be called before any module around them is sharded. Returns these layers; none if parameters are
    gathered in their own type."""
    if policy.param_dtype is None:
        return []
    found = [m for m in model.modules() if has_statistics(m) and any(True for _ in m.parameters(recurse=False))]
    own = MixedPrecisionPolicy(None, policy.reduce_dtype, cast_forward_inputs=False)
    for module in found:
        fully_shard(module, reshard_after_forward=False, mp_policy=own, **options)
    return found


def _prefetch(units: list[FSDPModule], root: FSDPModule, distance: int) -> None:
    """Let each unit gather the next `distance` units before it computes, in forward and backward passes."""
    for number, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[number + 1 : number + 1 + distance])
        # torch gathers one ahead by default where the list is empty; the unit itself is gathered already and costs
        # nothing
        before = units[max(0, number - distance) : number][::-1] if distance else []
        unit.set_modules_to_backward_prefetch(before or [unit])
    if units:
        root.set_modules_to_forward_prefetch(units[:distance])
        root.set_modules_to_backward_prefetch(units[::-1][:distance] or [root])


def _check_parameters(model: nn.Module) -> torch.dtype:
    """Dtype of the parameters that need a gradient. Raises WorkloadError for types that torch would refuse later or
    handle incorrectly."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise WorkloadError(
                f"the parameter {name}",
                "a single number",
                "fsdp shards along the first dimension",
                "give it the shape (1,), or use --strategy.name zero1",
            )
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            raise WorkloadError.problem(
                f"the parameter {name}", f"has strides {parameter.stride()}: fsdp needs contiguous parameters"
            )
    return check_one_dtype(model.named_parameters())


def _wrapped(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
