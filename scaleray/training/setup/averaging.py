"""An exponential moving average of the trained weights, which takes their place in evaluations and at the end.

Each rank averages what it has of the parameters, whole ones or shards. Buffers, such as BatchNorm's statistics, are the
trained model's. Source: Polyak & Juditsky 1992, doi:10.1137/0330046, as torch.optim.swa_utils computes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.swa_utils import get_ema_multi_avg_fn

from scaleray.config.averaging import AveragingSettings
from scaleray.training.setup.shards import local


class Averaging:
    """The average of a module's trained parameters; without a decay it does nothing.

    averages: by the names of the module's state dict, in which a tied parameter has several. num_updates: how often it
    has been updated.
    """

    def __init__(self, module: nn.Module, settings: AveragingSettings) -> None:
        self.settings, self.num_updates = settings, 0
        self._module = module
        named: list[tuple[str, nn.Parameter]] = []
        if settings.decay is not None:
            self._update = get_ema_multi_avg_fn(settings.decay)
            everyone = module.named_parameters(remove_duplicate=False)
            named = [(name, p) for name, p in everyone if p.requires_grad and p.is_floating_point()]
        self._parameters = list(dict.fromkeys(p for _, p in named))
        self._averages = [p.detach().clone() for p in self._parameters]
        of = dict(zip(self._parameters, self._averages, strict=True))
        self.averages = {name: of[p] for name, p in named}

    @property
    def is_on(self) -> bool:
        """Whether there is an average."""
        return self.settings.decay is not None

    def after_step(self, step: int) -> None:
        """Update the average, if it is due after optimizer step `step`, counted from 1."""
        if not self.is_on or step % self.settings.every:
            return
        with torch.no_grad():
            averages, trained = self._pairs()
            if self.num_updates == 0:
                torch._foreach_copy_(averages, trained)
            else:
                self._update(averages, trained, self.num_updates)
        self.num_updates += 1

    def begin_anew(self) -> None:
        """Take the weights as they are for the average, as a checkpoint without one was restored."""
        with torch.no_grad():
            torch._foreach_copy_(*self._pairs()) if self.is_on else None
        self.num_updates = 0

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the module has the average, and the average the trained weights."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def swap(self) -> None:
        """Let the module and the average change places. Not while a checkpoint is being copied."""
        if not self.is_on:
            return
        for part in self._module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # what is still gathered from a pass before is of the other weights
        with torch.no_grad():
            averages, trained = self._pairs()
            kept = torch._foreach_add(averages, 0)  # copies
            torch._foreach_copy_(averages, trained)
            torch._foreach_copy_(trained, kept)

    def _pairs(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """This rank's parts of the averages and of the parameters, sharing their memory."""
        return [local(a) for a in self._averages], [local(p.detach()) for p in self._parameters]
