"""Restore the user's model after sharded training, since torch's `fully_shard` cannot undo itself.

Written against torch 2.13, whose private names it uses; tests/strategies/test_fsdp.py fails if these change."""

import gc

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from scaleray.parallel.experts import DivisibleExperts

MARKS = (REGISTRY_KEY, STATE_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params")


def reshard(model: nn.Module) -> None:
    """Free the parameters that the last pass gathered, if the model is sharded, because the values of the shards are
    about to change. Not collective."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def unshard_for_good(model: nn.Module, *, keeps_shards: bool) -> None:
    """Remove every hook of `fully_shard` from a model, and make its parameters whole and plain again. Collective,
    unless `keeps_shards`.

    keeps_shards: leave parameters as DTensors, for a model that no worker could hold or that is not needed later.
    Gradients are dropped. A second call does nothing."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.reshard()
    uses: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                uses.setdefault(parameter, []).append((module, name))
    for parameter, places in uses.items() if units else ():
        parameter.grad = None
        if keeps_shards or not isinstance(parameter, DTensor):
            continue
        whole = _whole(parameter)
        for module, name in places:  # a tied one stays tied
            module._parameters[name] = whole
            if isinstance(module, DivisibleExperts):
                module.group = None  # each worker has them all again
    for unit in units:
        _forget(unit)
    for module in model.modules():
        for mark in MARKS:
            module.__dict__.pop(mark, None)
    gc.collect()  # unit and state know each other, and the state holds the process group


def _whole(parameter: nn.Parameter) -> nn.Parameter:
    mesh_device = parameter.device_mesh.device_type  # type: ignore[attr-defined]
    with torch.no_grad():
        tensor = parameter.detach()
        if tensor.device.type != mesh_device:  # offloaded
            tensor = tensor.to(mesh_device)
        return nn.Parameter(tensor.full_tensor(), requires_grad=parameter.requires_grad)  # type: ignore[attr-defined]


def _forget(unit: FSDPModule) -> None:
    state = unit._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for group in state._fsdp_param_groups:
        for handles in (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        ):
            for handle in handles.values():
                handle.remove()
            handles.clear()
    assert isinstance(unit, nn.Module)
    _module_state_mapping.pop(unit, None)
    unit.__class__ = type(unit).__mro__[FSDPModule._orig_cls_mro_index]
