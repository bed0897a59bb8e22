"""An exponential moving average of the trained weights, which replaces them in evaluations and at the end.

Each rank averages its own parameters or shards. Buffers, such as BatchNorm's statistics, are those of the trained
model. Source: Polyak & Juditsky 1992, doi:10.1137/0330046, as computed by torch.optim.swa_utils."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from scaleray.config import RunConfig
from scaleray.config.averaging_pruning_fine_tuning import AveragingSettings
from scaleray.config.strategy_traits import traits_of
from scaleray.errors import WorkloadError
from scaleray.strategies.sharding.shards import local
from scaleray.strategies.sharding.unsharding import reshard
from scaleray.training.setup.several_optimizers import members


class Averaging:
    """Average of a module's trained parameters; without a decay it does nothing.

    averages: by the names in the module's state dict, where a tied parameter has several. num_updates: number of
    updates so far. keeps_trained: whether the trained weights are written as well."""

    keeps_trained = True

    def __init__(self, module: nn.Module, settings: AveragingSettings) -> None:
        self.settings, self.num_updates = settings, 0
        self._module = module
        named: list[tuple[str, nn.Parameter]] = []
        if settings.decay is not None:
            self._update = get_ema_multi_avg_fn(settings.decay)
            everyone = module.named_parameters(remove_duplicate=False)
            named = [(name, p) for name, p in everyone if p.requires_grad]
        self._parameters = list(dict.fromkeys(p for _, p in named))
        self._averages = [p.detach().clone() for p in self._parameters]
        of = dict(zip(self._parameters, self._averages, strict=True))
        self.averages = {name: of[p] for name, p in named}

    @property
    def is_on(self) -> bool:
        """Whether there is an average."""
        return self.settings.decay is not None

    def after_step(self, step: int) -> None:
        """Update the average if an update is due after optimizer step `step`, counted from 1."""
        if not self.is_on or step % self.settings.every:
            return
        with torch.no_grad():
            averages, trained = self._pairs()
            if self.num_updates == 0:
                torch._foreach_copy_(averages, trained)
            else:
                self._update(averages, trained, self.num_updates)
        self.num_updates += 1

    def reinitialise(self) -> None:
        """Initialise the average with the current weights, after restoring a checkpoint without one."""
        with torch.no_grad():
            torch._foreach_copy_(*self._pairs()) if self.is_on else None
        self.num_updates = 0

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the module has the averaged weights, and the average stores the trained ones."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def swap(self) -> None:
        """Exchange the module's weights and the average. Must not be called while a checkpoint is being copied."""
        if not self.is_on:
            return
        reshard(self._module)
        with torch.no_grad():
            averages, trained = self._pairs()
            kept = torch._foreach_add(averages, 0)  # copies
            torch._foreach_copy_(averages, trained)
            torch._foreach_copy_(trained, kept)

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """The averages by name for a checkpoint, by reference."""
        return self.averages

    def _pairs(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """This rank's parts of the averages and the parameters, sharing their memory."""
        return [local(a) for a in self._averages], [local(p.detach()) for p in self._parameters]


class OptimizersAverage(Averaging):
    """Weights of an optimizer's evaluation mode, as in schedulefree, which trains at one point and evaluates at
    another. Source: Defazio et al. 2024, The Road Less Scheduled, arXiv:2405.15682."""

    keeps_trained = False

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module, AveragingSettings())
        self._optimizers: list[Any] = [each for each in members(optimizer).values() if has_modes(each)]
        named = [(name, p) for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]
        self._named, self._parameters = named, list(dict.fromkeys(p for _, p in named))
        self._trained: list[torch.Tensor] = []
        self._call("train")

    @property
    def is_on(self) -> bool:
        """Whether there is an average."""
        return True

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """The averages by name for a checkpoint: copies."""
        with self.in_place():
            copies = {p: p.detach().clone() for p in self._parameters}
        return {name: copies[p] for name, p in self._named}

    def after_step(self, step: int) -> None:
        """Do nothing, since the optimizer's step has moved both points."""

    def reinitialise(self) -> None:
        """Do nothing, since the average follows from the optimizer's state."""

    def swap(self) -> None:
        """Switch the optimizer's mode. The trained weights return bit-identically. Must not be called while a
        checkpoint is being copied."""
        reshard(self._module)
        if self._trained:
            self._call("train")
            with torch.no_grad():
                torch._foreach_copy_([local(p.detach()) for p in self._parameters], self._trained)
            self._trained = []
        else:
            self._trained = [local(p.detach()).clone() for p in self._parameters]
            self._call("eval")

    def _call(self, mode: str) -> None:
        for optimizer in self._optimizers:
            getattr(optimizer, mode)()


def has_modes(optimizer: Any) -> bool:
    """Whether an optimizer has separate modes for training and evaluation."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def averaging_of(module: nn.Module, optimizer: torch.optim.Optimizer, config: RunConfig, strategy: str) -> Averaging:
    """Average of the weights as defined by the config or the optimizer. Raises WorkloadError for an optimizer whose
    modes cannot be used."""
    if not any(has_modes(each) for each in members(optimizer).values()):
        return Averaging(module, config.averaging)
    found = f"an optimizer with an evaluation mode ({type(optimizer).__name__})"
    if config.averaging.decay is not None:
        allowed = "it has its own average, which evaluations use"
        raise WorkloadError("optimizer()", found, allowed, "leave averaging.decay out")
    traits = traits_of(strategy)
    if traits.trains_apart or strategy == "zero1":
        allowed = f"under {strategy} no worker has the whole state that its average needs"
        raise WorkloadError("optimizer()", found, allowed, "use ddp, fsdp, tensor or pipeline")
    return OptimizersAverage(module, optimizer)
