"""Arithmetic of a step: autocast for bf16 and fp16, dynamic loss scaling for fp16, float64 for checks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scaleray.config.scale import PrecisionSettings
from scaleray.errors import ConfigError

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """`autocast()` gives the context of a forward pass; `scaler` is enabled for fp16 only."""

    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    scaler: torch.amp.GradScaler
    input_dtype: torch.dtype | None = None
    """Floating-point inputs are converted to this; None leaves them."""


def prepare(model: nn.Module, device: torch.device, settings: PrecisionSettings) -> Precision:
    """The precision of a run. fp64 converts `model` in place. Raises ConfigError where the device cannot."""
    dtype = settings.dtype
    if dtype == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        name = torch.cuda.get_device_name(device)
        raise ConfigError("precision.dtype", "bf16", f"{name} has no bf16 arithmetic", "use fp16 or fp32")
    if dtype == "fp64":
        model.double()
    target = AUTOCAST_DTYPES.get(dtype)
    autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    if target is not None:
        autocast = lambda: torch.autocast(device.type, dtype=target)
    scaler = torch.amp.GradScaler(device.type, init_scale=settings.initial_loss_scale, enabled=dtype == "fp16")
    return Precision(autocast, scaler, torch.float64 if dtype == "fp64" else None)
