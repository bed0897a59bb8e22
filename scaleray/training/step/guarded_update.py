"""The optimizer's update with scaled gradients, which is skipped in a step that is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from scaleray.strategies.contract.later import on_device
from scaleray.strategies.contract.numbers import Number, Truth, Unread
from scaleray.strategies.sharding.shards import local
from scaleray.training.setup.model_setup import Setup


class GuardedUpdate:
    """Updates the weights if the step is finite; otherwise changes nothing.

    The optimizer's own kernel decides on the device, if it can: torch's fused optimizers take a factor and a verdict,
    as mixed precision needs them. For any other optimizer the host reads the verdict first, which waits for the device.
    waits: whether it may always do so, as on the CPU, where this costs nothing and a factor of 1 saves a pass over the
    gradients."""

    def __init__(self, setup: Setup, device: torch.device, *, waits: bool) -> None:
        self.optimizer, self.scaler = setup.optimizer, setup.precision.scaler
        self._device, self._waits = device, waits

    def __call__(self, gradients: Sequence[torch.Tensor], factor: Number, is_sound: Truth) -> None:
        """Update with `factor` times the unscaled gradients."""
        if self.scaler.is_enabled():
            found = self.scaler._found_inf_per_device(self.optimizer)
            is_sound = is_sound & (sum(there.to(self._device) for there in found.values()) == 0)
        if isinstance(is_sound, torch.Tensor) and not self._waits and self._decides_itself():
            self._update_on_device(factor, ~is_sound)
            return
        sound, number = Unread([is_sound, factor]).read()
        if not sound:
            return
        if number != 1.0:
            # their own parts: one call takes neither DTensors beside plain tensors nor those of several meshes
            torch._foreach_mul_([local(gradient) for gradient in gradients], number)
        self.optimizer.step()

    def _decides_itself(self) -> bool:
        groups = self.optimizer.param_groups
        if not getattr(self.optimizer, "_step_supports_amp_scaling", False) or not all(g.get("fused") for g in groups):
            return False
        # torch 2.13: fused SGD takes a momentum for initialised whose first step was left out
        has_momentum = any(group.get("momentum") for group in groups)
        return not has_momentum or all(
            p in self.optimizer.state for g in groups for p in g["params"] if p.grad is not None
        )

    def _update_on_device(self, factor: Number, is_left_out: torch.Tensor) -> None:
        """Pass factor and verdict to the optimizer as torch's GradScaler does, which has already divided the
        gradients."""
        optimizer: Any = self.optimizer
        optimizer.found_inf = is_left_out.float()
        if isinstance(factor, torch.Tensor):
            optimizer.grad_scale = factor.reciprocal().float()
        else:
            optimizer.grad_scale = None if factor == 1.0 else on_device([1.0 / factor], self._device, torch.float32)[0]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf
