"""Matrix products of linear layers in float8, through torchao: `precision.float8`.

A layer keeps its parameters and their type, its names and its hooks; only its class, which computes the products,
becomes torchao's. Inputs, weights and gradients are scaled to float8's range in every product ("dynamic scaling"), so
there is no state to save. Sources: Micikevicius et al. 2022, FP8 formats for deep learning, arXiv:2209.05433; torchao's
float8 training, https://github.com/pytorch/ao/tree/main/torchao/float8. This has not been run on a GPU; tests emulate
the rounding."""

import contextlib
import dataclasses
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from scaleray.common.installed import install_command
from scaleray.config.precision import PrecisionSettings
from scaleray.errors import ConfigError, WorkloadError
from scaleray.training.setup.blocks import model_blocks

MULTIPLE = 16  # both sizes of a weight must be multiples of it for the GPU's float8 products
LEAST_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}
"""Minimum NVIDIA compute capability: float8 came with Ada; torchao's row-wise kernels require Hopper or later."""


def convert(
    model: nn.Module, device: torch.device, settings: PrecisionSettings, workload: Any, undo: contextlib.ExitStack
) -> list[str]:
    """Let linear layers of `model` compute in float8, in place; `undo` reverts this. Returns messages for the user.

    The layers are those in the workload's blocks or, without blocks, all but the last one of the model, whose output
    determines the loss. Layers of other classes, such as adapters, and layers of sizes that float8 products do not
    support are left out. Raises ConfigError if the device does not support float8 or torchao is missing, WorkloadError
    if no layer remains."""
    if settings.float8 == "none":
        return []
    check_device(device, settings)
    make = _converter(settings)
    chosen, left_out = _layers(model, settings, workload)
    if not chosen:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(left_out.items())[:3]) or "it has no linear layers"
        raise WorkloadError.problem(
            "the model",
            f"lacks a linear layer that can compute in float8: precision.float8 is {settings.float8} ({reasons})",
            "use precision.float8 none",
        )
    for layer in chosen.values():
        undo.callback(_become(layer, make(layer)))
    if device.type != "cuda":
        # torchao asks for CUDA's autocast type on every device
        undo.callback(torch.set_autocast_dtype, "cuda", torch.get_autocast_dtype("cuda"))
        torch.set_autocast_dtype("cuda", torch.bfloat16)
    shown = ", ".join(f"{name} ({why})" for name, why in list(left_out.items())[:5])
    more = f" and {len(left_out) - 5} more" if len(left_out) > 5 else ""
    emulated = ", emulated in float32: for checks, not for speed" if settings.emulate_float8 else ""
    return [
        f"float8 ({settings.float8}{emulated}): {len(chosen)} linear layers compute in it"
        + (f"; not {shown}{more}" if left_out else "")
    ]


def check_device(device: torch.device, settings: PrecisionSettings) -> None:
    """Raise ConfigError if the device cannot compute float8 products, unless they are emulated."""
    if settings.emulate_float8:
        return
    if device.type != "cuda":
        raise ConfigError(
            "precision.float8",
            settings.float8,
            f"a {device.type} device has no float8 arithmetic",
            "use none, or set precision.emulate_float8 to see its effect on a training",
        )
    least = LEAST_CAPABILITY[settings.float8]
    has = torch.cuda.get_device_capability(device)
    if has < least:
        raise ConfigError(
            "precision.float8",
            settings.float8,
            f"{torch.cuda.get_device_name(device)} has compute capability {has[0]}.{has[1]}, "
            f"but it needs {least[0]}.{least[1]}",
            "use tensorwise" if has >= LEAST_CAPABILITY["tensorwise"] else "use none, which computes in bf16",
        )


def _converter(settings: PrecisionSettings) -> Callable[[nn.Linear], nn.Module]:
    """Function that makes torchao's layer from an ordinary one and keeps its parameters."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as exc:
        raise ConfigError(
            "precision.float8",
            settings.float8,
            f"it needs torchao, which cannot be imported ({exc})",
            install_command("float8"),
        ) from exc
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(settings.float8),
        emulate=settings.emulate_float8,
        # only where a micro-batch's number of rows is no multiple of 16, as at the end of an epoch: such products
        # are refused
        pad_inner_dim=not settings.emulate_float8,
    )
    return lambda layer: convert_to_float8_training(layer, config=config)


def _layers(
    model: nn.Module, settings: PrecisionSettings, workload: Any
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """The layers to convert, by name, and the reasons for leaving out the others."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if callable(getattr(workload, "blocks", None)) and workload.blocks(model) is not None:
        blocks = model_blocks(workload, model, wanted_by="precision.float8")
        within = {id(module) for block in blocks for module in block.modules()}
        outside = {name: "outside the blocks" for name, module in linear.items() if id(module) not in within}
    else:
        outside = dict.fromkeys(list(linear)[-1:], "the last layer")
    for pattern in settings.float8_leave_out:
        if not any(fnmatchcase(name, pattern) for name in linear):
            raise WorkloadError(
                "precision.float8_leave_out",
                pattern,
                f"no linear layer has this name; the linear layers are {', '.join(list(linear)[:8])}",
            )
    chosen, left_out = {}, {}
    for name, module in linear.items():
        if name in outside:
            left_out[name] = outside[name]
        elif any(fnmatchcase(name, pattern) for pattern in settings.float8_leave_out):
            left_out[name] = "left out by float8_leave_out"
        elif type(module) is not nn.Linear:
            left_out[name] = f"a {type(module).__name__}"
        elif module.in_features % MULTIPLE or module.out_features % MULTIPLE:
            left_out[name] = f"{module.out_features} x {module.in_features}, not multiples of {MULTIPLE}"
        else:
            chosen[name] = module
    return chosen, left_out


def _become(layer: nn.Linear, like: nn.Module) -> Callable[[], None]:
    """Give a layer the class and the attributes of `like`, so that its hooks and references to it remain valid. Returns
    a function that undoes it.

    torchao's own conversion replaces the module, which would lose the hooks and the model's references to it."""
    added = [name for name in like.__dict__ if name not in layer.__dict__]
    for name in added:
        layer.__dict__[name] = like.__dict__[name]
    layer.__class__ = type(like)  # type: ignore[assignment]

    def undo() -> None:
        layer.__class__ = nn.Linear
        for name in added:
            layer.__dict__.pop(name, None)

    return undo
