"""Arithmetic of a step: autocast for bf16 and fp16, dynamic loss scaling for fp16, TF32, and float64 for checks."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from scaleray.config.precision import PrecisionSettings
from scaleray.errors import ConfigError

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """Arithmetic of a run. `autocast()` returns the context for a forward pass; `scaler` is enabled for fp16 only."""

    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    scaler: torch.amp.GradScaler
    input_dtype: torch.dtype | None = None
    """dtype to which floating-point inputs are converted; None leaves them unchanged."""

    def loss_scale(self) -> torch.Tensor | None:
        """Copy of the loss's factor, float64 () on the device, made without waiting for it; None without scaling."""
        if not self.scaler.is_enabled():
            return None
        scale = self.scaler._get_scale_async()  # get_scale() reads it, which waits for the device
        return torch.tensor(self.scaler.get_scale(), dtype=torch.float64) if scale is None else scale.double()


def prepare(
    model: nn.Module, device: torch.device, settings: PrecisionSettings, *, keeps_casts: bool = True
) -> Precision:
    """Set up a run's precision. fp64 converts `model` in place. Raises ConfigError if the device does not support it.

    keeps_casts: let autocast keep each 16-bit copy of a parameter until its context ends, for reuse. The backward pass
    needs those copies anyway, unless it recomputes activations: it then makes new ones, and the old ones would only
    take up memory."""
    dtype = settings.dtype
    if dtype == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        name = torch.cuda.get_device_name(device)
        raise ConfigError("precision.dtype", "bf16", f"{name} has no bf16 arithmetic", "use fp16 or fp32")
    if settings.tf32 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        raise ConfigError("precision.tf32", True, f"{name} has no TF32, which came with Ampere", "leave it out")
    if device.type == "cuda":  # switches of the whole process
        torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = settings.tf32
    if dtype == "fp64":
        in_float64(model)
    target = AUTOCAST_DTYPES.get(dtype)
    autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    if target is not None:
        autocast = lambda: torch.autocast(device.type, dtype=target, cache_enabled=keeps_casts)
    scaler = torch.amp.GradScaler(device.type, init_scale=settings.initial_loss_scale, enabled=dtype == "fp16")
    return Precision(autocast, scaler, torch.float64 if dtype == "fp64" else None)


def in_float64(model: nn.Module) -> None:
    """Convert parameters and buffers to float64, complex ones to complex128, in place."""
    model._apply(lambda tensor: as_dtype(tensor, torch.float64))


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Convert a floating-point tensor to `dtype`, a complex one to the complex type of that width, and others not at
    all."""
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.to(dtype if tensor.is_floating_point() else dtype.to_complex())


def share_loss_scale(precision: Precision, module: nn.Module, group: dist.ProcessGroup) -> Precision:
    """The precision with a scaler that skips a step on every rank if any rank finds an overflow. Needed by strategies
    whose ranks have different gradients or update different parameters; otherwise ranks agree without communication.
    Using it is collective."""
    if not precision.scaler.is_enabled():
        return precision
    return dataclasses.replace(precision, scaler=SharedScaler(precision.scaler, module.parameters(), group))


class SharedScaler(torch.amp.GradScaler):
    """GradScaler on whose decisions the ranks in `group` agree; `unscale_` is therefore collective. It scales the
    gradients of all `parameters`, even those that the optimizer does not have. For a single optimizer. Source of the
    method: Micikevicius et al. 2018, arXiv:1710.03740."""

    def __init__(
        self, like: torch.amp.GradScaler, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup
    ) -> None:
        super().__init__(like._device, init_scale=like._init_scale)
        self._lazy_init_scale_growth_tracker(torch.device(like._device))  # a stage without the loss never calls scale()
        self._parameters, self._group = list(parameters), group

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        own = [p for group in optimizer.param_groups for p in group["params"]]
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for parameter in dict.fromkeys([*self._parameters, *own]):
            if (gradient := parameter.grad) is not None:
                # the shard alone: DTensor would ask the ranks of its mesh, once for every mesh and device
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                local = local._values() if local.is_sparse else local
                alike.setdefault((local.device, local.dtype), []).append(local)
        with torch.no_grad():
            for (device, _), gradients in alike.items():
                found = found_inf.to(device, copy=True)
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inv_scale.to(device))
                found_inf.copy_(torch.maximum(found_inf, found.to(found_inf.device)))
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=self._group)
        # a fused optimizer reads the answer on the device of its parameters, which is the CPU with offloaded shards
        devices = {p.device for p in own} or {found_inf.device}
        return {device: found_inf.to(device) for device in devices}
