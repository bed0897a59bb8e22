"""FSDP on the data axis of a pipeline: between steps, replicas shard a stage's parameters, gradients and optimizer
state. In a step, a stage's parameters are gathered once and stay until its last micro-batch; freeing them after each
pass, FSDP's default, would gather them once per micro-batch. Gradients are reduced to the shards once, at the end.
torch's `fully_shard` lays out, gathers and reduces; its hooks, which would do so in every pass, are removed. Written
against torch 2.13, whose private names are used as in torch's own pipelines (`perform_reduce_grad`)."""

import contextlib
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, share_comm_ctx
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from scaleray.config import RunConfig
from scaleray.profiling.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from scaleray.strategies.contract.later import on_device
from scaleray.strategies.fsdp import check_one_dtype, has_statistics, mixed_precision
from scaleray.strategies.sharding.counted_collectives import CountedAllGather, CountedReduceScatter
from scaleray.strategies.sharding.unsharding import unshard_for_good
from scaleray.strategies.traffic.ledger import Ledger


class Shards:
    """Parts of a stage whose parameters are shards between steps. Collective over the replicas unless noted. modules:
    modules that are whole on this worker. mesh: one axis, or two of which the first replicates. group: all workers of
    the mesh. kept_whole: ids of parameters that stay whole. Some others stay whole too: single numbers, parameters that
    are not contiguous or that several modules use, and parameters of layers with running statistics if others are
    gathered in a narrower type. The gradients of all these are summed by an all-reduce. sent: counts the collectives.
    Raises WorkloadError."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: DeviceMesh,
        group: dist.ProcessGroup,
        config: RunConfig,
        *,
        kept_whole: set[int],
        sent: Ledger,
    ) -> None:
        self.group = group
        self.is_gathered = False
        uses = Counts(id(p) for module in modules for p in module.parameters())
        self.sharded: set[int] = set()
        """Ids of the parameters that are shards, as the optimizer has them."""
        self._units: list[nn.Module] = []
        self._hooks: list[RemovableHandle] = []
        for module in modules:
            whole = {
                p
                for p in module.parameters()
                if id(p) in kept_whole or uses[id(p)] > 1 or p.ndim == 0 or not p.is_contiguous()
            }
            if config.gathered_dtype is not None:
                whole |= {p for part in module.modules() if has_statistics(part) for p in part.parameters()}
            if not any(p not in whole for p in module.parameters()):
                continue
            dtype = check_one_dtype((name, p) for name, p in module.named_parameters() if p not in whole)
            policy, _ = mixed_precision(config, dtype)
            fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=whole, mp_policy=policy)
            if policy.param_dtype is not None:  # as FSDP's own hook does
                self._hooks.append(module.register_forward_pre_hook(_casting(policy.param_dtype), with_kwargs=True))
            self.sharded |= {id(p) for p in module.parameters() if p not in whole}
            self._units.append(module)
        for unit in self._wrapped:
            unit.set_gradient_divide_factor(1.0)  # the sum, as an all-reduce gives it
            unit.set_force_sum_reduction_for_comms(True)  # no product with 1 on the way, which gloo cannot do
            axis, shards = (mesh.mesh_dim_names or ("dp",))[-1], mesh.size(-1)
            unit.set_custom_all_gather(CountedAllGather(sent.entry(axis, shards, ALL_GATHER)))
            unit.set_custom_reduce_scatter(CountedReduceScatter(sent.entry(axis, shards, REDUCE_SCATTER)))
            if mesh.ndim == 2:
                unit.set_all_reduce_hook(sent.entry("replicate", mesh.size(0), ALL_REDUCE).add)
            state = unit._get_fsdp_state()
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
            state._lazy_init()  # which the first forward pass would do
        share_comm_ctx(self._wrapped)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which all parameters are whole. Collective. Nested use has no effect."""
        if self.is_gathered:
            yield
            return
        for unit in self._wrapped:
            unit.unshard()
        self.is_gathered = True
        try:
            yield
        finally:
            for unit in self._wrapped:
                unit.reshard()
            self.is_gathered = False

    def put_by(self) -> None:
        """Add the gradients of a micro-batch to earlier ones, in the type used for the reduction, since sums of many
        gradients would lose most digits of a narrower type. Not collective."""
        for parameter in self._parameters:
            if parameter.unsharded_param.grad is not None:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()

    def reduce(self) -> None:
        """Sum the gradients of this step over the replicas into the shards. Collective, while parameters are gathered.

        A parameter without a gradient on any replica gets none."""
        self.put_by()
        trained = [p for p in self._parameters if p.sharded_param.requires_grad]
        if not trained:
            return
        has_one = [p.unsharded_accumulated_grad is not None or p.unsharded_param.grad is not None for p in trained]
        somewhere = present_anywhere(has_one, self.group, trained[0].unsharded_param.device)
        for parameter, has, is_present in zip(trained, has_one, somewhere, strict=True):
            if is_present and not has:
                parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
        self.put_by()
        for unit in self._wrapped:
            state = unit._get_fsdp_state()
            for group in state._fsdp_param_groups:
                group.post_backward()
            state._root_post_backward_final_callback()

    def close(self, module: nn.Module, *, keeps_shards: bool) -> None:
        """Remove FSDP from `module`, which contains all units. Unless `keeps_shards`, also make parameters whole and
        plain again, which is collective."""
        unshard_for_good(module, keeps_shards=keeps_shards)
        for hook in self._hooks:
            hook.remove()
        self._units.clear()

    @property
    def _parameters(self) -> list[FSDPParam]:
        """FSDP's parameters of all units, for use while they are gathered."""
        groups = [group for unit in self._wrapped for group in unit._get_fsdp_state()._fsdp_param_groups]
        return [parameter for group in groups for parameter in group.fsdp_params]

    @property
    def _wrapped(self) -> list[FSDPModule]:
        return [unit for unit in self._units if isinstance(unit, FSDPModule)]


def present_anywhere(has_one: Sequence[bool], group: dist.ProcessGroup, device: torch.device) -> list[bool]:
    """For each gradient, whether any rank of `group` has it, given those that this rank has. Collective.

    Only a rank that lacks one waits for the device."""
    present = on_device(has_one, device, torch.int32)
    dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group)
    return [True] * len(has_one) if all(has_one) else [bool(n) for n in present.tolist()]


def _casting(dtype: torch.dtype) -> Callable[..., tuple[Any, Any]]:
    """Hook that casts floating-point inputs."""

    def cast(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        narrowed: tuple[Any, Any] = tree_map_only(
            torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs)
        )
        return narrowed

    return cast
