"""Tensor parallelism: neighbouring workers have a part of each layer, according to the workload's plan. FSDP is applied
on top, or the layers become stages of a pipeline.

Workers of one group have the same rows and compute the same loss. The styles in the plan define their communication in
forward and backward passes (torch.distributed.tensor.parallel)."""

import logging
import warnings
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleInput, PrepareModuleOutput, parallelize_module

from scaleray.common.equal_models import dense_buffers
from scaleray.config import RunConfig
from scaleray.errors import WorkloadError
from scaleray.parallel.tensor_styles import Replicated
from scaleray.strategies.contract.parallel import OnModel, Parallel
from scaleray.strategies.contract.weight_shares import WeightShare, share_among
from scaleray.strategies.fsdp import (
    DividedExperts,
    Root,
    check_one_dtype,
    divide_experts,
    mixed_precision,
    shard_statistics,
    total_norm,
    with_output,
)
from scaleray.strategies.sharding.counted_passes import CountedPasses
from scaleray.strategies.sharding.unsharding import unshard_for_good
from scaleray.workload import call_user_code

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


def apply(model: nn.Module, mesh: DeviceMesh | None, config: RunConfig, workload: Any) -> Parallel:
    """Split `model` over `mesh["tp"]` by `workload.tensor_plan`, and apply fully_shard to it over the data axes.

    Collective. A module that the plan leaves out computes the same on every worker of a group. Raises WorkloadError if
    there is no plan, or if it does not fit. Sources: Shoeybi et al. 2019, arXiv:1909.08053; sequence parallelism:
    Korthikanti et al. 2022, arXiv:2205.05198."""
    if mesh is None:
        raise ValueError("tensor needs a device mesh with the axis 'tp' and those of the data")
    replicas = data_axes(mesh)
    split = SplitLayers(model, mesh["tp"], config, workload)
    notes = [split.note]
    root = None
    degree, experts = config.degrees(dist.get_world_size()).expert, None
    if replicas.size() > 1:
        experts = divide_experts(model, mesh, degree) if degree > 1 else None
        notes += _shard(model, replicas, config, workload, experts)
        root = Root.over(model, replicas)
    else:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(complete)
    passes = CountedPasses(model, root or OnModel(model), mesh)
    if root is not None:
        passes.count_units(experts)
    is_compiled = config.compilation.what != "nothing"

    def share_buffers() -> None:
        for buffer in dense_buffers(model):
            local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
            for group in mesh.get_all_groups():
                dist.broadcast(local, group=group, group_src=0)

    def weights() -> WeightShare:
        share_buffers()
        return share_among(model, range(dist.get_world_size()), rank=dist.get_rank())

    def let_go() -> None:
        if isinstance(model, FSDPModule):
            unshard_for_good(root or model, keeps_shards=True)
        for parameter in model.parameters():
            parameter.grad = None
        split.take_off()

    def close() -> None:
        let_go()
        split.make_plain()

    return Parallel(
        model=root or model,
        module=model,
        alone=root.run_alone if root else None,
        gradient_divisor=replicas.size(),
        before_evaluation=share_buffers,
        weights=weights,
        close=close,
        let_go=let_go,
        total_norm=total_norm,
        forward_is_collective=True,
        run_micro_batches=passes.run,
        counts_loss=mesh.get_local_rank("tp") == 0,
        bytes_sent=lambda: passes.sent.num_bytes,
        collectives=passes.sent.rows,
        arrivals=None if is_compiled else passes.arrivals,
        no_arrivals="waits inside compiled graphs cannot be observed" if is_compiled else "",
        tell_phases=passes.tell_phases,
        notes=notes,
    )


def _ignore_known_warnings() -> None:
    """Hide two warnings that torch gives for every model whose layers are both split and sharded."""
    # outputs of split layers are views made by a function of torch's own, on which autograd refuses operations in place
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    # a parameter cut along two axes is gathered in two operations; gathers sum nothing
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class SplitLayers:
    """Layers of a model, split over `mesh` in place. Every parameter becomes a DTensor, either split according to its
    style or whole on each worker. Frozen and tied parameters remain so. Collective. Raises WorkloadError if there is no
    plan, or if it does not fit."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, config: RunConfig, workload: Any) -> None:
        _ignore_known_warnings()
        self._model, self._hooks = model, _Hooks(model)
        plan = plan_of(model, config, workload, size=mesh.size())
        self.note = f"tensor: {len(plan)} entries of the plan, each layer on {mesh.size()} workers"
        trained = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
        ties = _ties(model)
        with warnings.catch_warnings():  # torch warns of keys that match nothing, which is an error here
            warnings.simplefilter("error", UserWarning)
            parallelize_module(model, mesh, dict(plan))
        _replicate_the_rest(model, mesh, sequence_parallel=config.tensor.sequence_parallel)
        refuse_uneven_cuts(model, plan, size=mesh.size())
        _tie_again(model, ties)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            parameter.requires_grad_(trained[name])  # styles of norms make every parameter a trained one

    def take_off(self) -> None:
        """Remove the styles' hooks from the model."""
        self._hooks.take_off()

    def make_plain(self) -> None:
        """Make all parameters and buffers of the model whole and plain again. Collective."""
        _make_plain(self._model)


def data_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Part of the mesh whose workers have samples of their own: `dp`, or `replicate` and `shard`."""
    return mesh["replicate", "shard"] if "replicate" in (mesh.mesh_dim_names or ()) else mesh["dp"]


def plan_of(model: nn.Module, config: RunConfig, workload: Any, *, size: int) -> Mapping[str, ParallelStyle]:
    """Styles of the layers of a model that is split over `size` workers. Raises WorkloadError if there is no plan, or
    if it names modules that the model lacks."""
    make: Callable[..., Any] | None = getattr(workload, "tensor_plan", None)
    plan = None
    if callable(make):
        plan = call_user_code(
            lambda: make(model, size=size, sequence_parallel=config.tensor.sequence_parallel),
            what="tensor_plan()",
            doing="planning tensor parallelism",
        )
    if plan is None:
        raise WorkloadError.problem(
            "the workload",
            f"lacks tensor_plan(): parallel.tensor {size} needs to know how each layer is split",
            "return a style of torch.distributed.tensor.parallel for each layer's name, or use fsdp or pipeline",
        )
    names = [name for name, _ in model.named_modules()]
    for key, style in plan.items():
        if not any(fnmatchcase(name, key) and name.count(".") == key.count(".") for name in names):
            text = f"names {key!r}: the model has no such module"
            raise WorkloadError.problem("tensor_plan()", text, f"it has: {', '.join(names[1:8])}, ...")
        if not isinstance(style, ParallelStyle):
            raise WorkloadError(
                f"tensor_plan()[{key!r}]",
                type(style).__name__,
                "it must be a style of torch.distributed.tensor.parallel",
            )
    return plan


def _shard(
    model: nn.Module, mesh: DeviceMesh, config: RunConfig, workload: Any, experts: DividedExperts | None
) -> list[str]:
    """Shard the parts of a replica over the replicas. Returns notes for the user."""
    dtype = check_one_dtype(model.named_parameters())
    policy, notes = mixed_precision(config, dtype)
    blocks = workload.blocks(model) if callable(getattr(workload, "blocks", None)) else None
    statistics = shard_statistics(model, policy, mesh=mesh)
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": config.fsdp.reshard_after_forward}
    if experts is not None:
        experts.shard(reshard_after_forward=config.fsdp.reshard_after_forward, mp_policy=policy)
    for block in blocks or ():
        if block not in statistics:
            fully_shard(block, mp_policy=policy, **options)
    fully_shard(model, mp_policy=with_output(policy, dtype), **{**options, "reshard_after_forward": False})
    return notes


def _replicate_the_rest(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Turn the parameters that the plan left out into whole DTensors, which an update cannot mix with plain ones."""
    for name, module in list(model.named_modules()):
        left = [n for n, p in module.named_parameters(recurse=False) if not isinstance(p, DTensor)]
        if not left:
            continue
        where = f"{name}.{left[0]}" if name else left[0]
        if any(True for _ in module.children()):
            raise WorkloadError.problem(
                "tensor_plan()",
                f"lacks {where}: a parameter next to other modules cannot be left out",
                f"name {name or 'the model'} in the plan, or put the parameter into a module of its own",
            )
        if sequence_parallel:
            raise WorkloadError.problem(
                "tensor_plan()",
                f"lacks {where}: "
                "under sequence parallelism a module may see only part of the tokens, so every module must be named",
                "name it in the plan, or use --tensor.sequence-parallel false",
            )
        parallelize_module(module, mesh, Replicated())


def refuse_uneven_cuts(model: nn.Module, plan: Mapping[str, ParallelStyle], *, size: int) -> None:
    """Raise an error for inputs whose number of tokens the workers do not divide, if a layer splits its output along
    them, since a collective of unequal parts would end the process."""
    for name, module in model.named_modules():
        for key, style in plan.items():
            if isinstance(style, PrepareModuleOutput):  # its output has the layout before its style
                continue
            cut = "desired_input_layouts" if isinstance(style, PrepareModuleInput) else "output_layouts"
            ours, theirs = ((getattr(style, which, None) or (None,))[0] for which in (cut, "input_layouts"))
            if fnmatchcase(name, key) and isinstance(ours, Shard) and ours.dim > 0 and ours != theirs:

                def check(module: nn.Module, inputs: Any, *, name: str = name, dim: int = ours.dim) -> None:
                    if inputs and inputs[0].ndim > dim and (found := inputs[0].shape[dim]) % size:
                        raise WorkloadError.problem(
                            f"the input of {name}",
                            f"has {found} entries along dimension {dim}: "
                            f"parallel.tensor with sequence parallelism cuts it into {size} equal parts",
                            f"pad it to a multiple of {size}, or use --tensor.sequence-parallel false",
                        )

                module.register_forward_pre_hook(check, prepend=True)


def _ties(model: nn.Module) -> list[list[str]]:
    """Lists of two or more names of parameters that are the same tensor."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [same for same in names.values() if len(same) > 1]


def _tie_again(model: nn.Module, ties: list[list[str]]) -> None:
    """Merge the copies of each shared parameter that the styles made for its uses. Raises WorkloadError."""
    for first, *others in ties:
        shared = model.get_parameter(first)
        for name in others:
            other = model.get_parameter(name)
            ours, theirs = (p.placements if isinstance(p, DTensor) else None for p in (shared, other))
            if ours != theirs:
                raise WorkloadError.problem(
                    "tensor_plan()",
                    f"splits {first} as {ours} and {name} as {theirs}, but they are one parameter",
                    "untie them, or split both along the same dimension",
                )
            path, _, last = name.rpartition(".")
            model.get_submodule(path).register_parameter(last, shared)


def complete(parameter: torch.Tensor) -> None:
    """After each backward pass, sum a gradient computed from parts of the sequence, and split it like its parameter."""
    gradient = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


class _Hooks:
    """Records the forward hooks of a model, in order to remove those that are added later."""

    def __init__(self, model: nn.Module) -> None:
        self._before = {m: {kind: set(getattr(m, kind)) for kind in HOOKS} for m in model.modules()}

    def take_off(self) -> None:
        """Remove the hooks that were added later. A second call does nothing."""
        for module, kinds in self._before.items():
            for kind, had in kinds.items():
                for key in set(getattr(module, kind)) - had:
                    del getattr(module, kind)[key]
            module.__dict__.pop("_distribute_module_applied", None)


def _make_plain(model: nn.Module) -> None:
    """Make all parameters and buffers whole and plain again. Collective."""
    whole: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                if id(parameter) not in whole:
                    whole[id(parameter)] = nn.Parameter(parameter.detach().full_tensor(), parameter.requires_grad)
                module._parameters[name] = whole[id(parameter)]
        for name, buffer in module._buffers.items():
            if isinstance(buffer, DTensor):
                module._buffers[name] = buffer.full_tensor()
