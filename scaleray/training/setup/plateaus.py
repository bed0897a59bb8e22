"""Learning rates that follow an evaluation: torch's ReduceLROnPlateau, from the config or the workload."""

from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from scaleray.config.optimizer_schedule import ScheduleSettings

MOVES = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
"""Attributes of a ReduceLROnPlateau that evaluations change, in addition to the rates."""


class ConfiguredPlateau:
    """Factor that `schedule.name: plateau` applies to the rate after the warm-up. It is the rate, starting from 1, of
    an optimizer that trains nothing. mode: direction in which the metric improves."""

    def __init__(self, settings: ScheduleSettings, mode: Literal["min", "max"]) -> None:
        stand_in = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        self.scheduler = ReduceLROnPlateau(
            stand_in,
            mode,
            factor=settings.factor,
            patience=settings.patience,
            threshold=settings.threshold,
            cooldown=settings.cooldown,
            min_lr=settings.final_ratio,
            eps=0.0,
        )

    @property
    def factor(self) -> float:
        """Factor by which the rate of every parameter group is multiplied."""
        return float(self.scheduler.optimizer.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        """State that evaluations change; the settings are those of the config."""
        return {"factor": self.factor, **{name: getattr(self.scheduler, name) for name in MOVES}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.scheduler.optimizer.param_groups[0]["lr"] = state["factor"]
        self.scheduler.__dict__.update({name: state[name] for name in MOVES})


class OwnPlateau(LRScheduler):
    """A workload's own ReduceLROnPlateau as a schedule that optimizer steps do not change.

    first_rates: rate of each parameter group before any evaluation."""

    def __init__(self, scheduler: ReduceLROnPlateau) -> None:
        # not LRScheduler's own, which would take a first step
        self.scheduler, self.optimizer, self.last_epoch = scheduler, scheduler.optimizer, 0
        self.first_rates = [float(rate) for rate in self.get_last_lr()]

    @property
    def plateaus(self) -> list[ReduceLROnPlateau]:
        """The scheduler that follows evaluations."""
        return [self.scheduler]

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1

    def follow_evaluation(self, value: float) -> None:
        """Advance the scheduler with the value of an evaluation."""
        self.scheduler.step(value)

    def get_last_lr(self) -> list[float | torch.Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def restart(self, first: dict[str, Any], position: int) -> None:
        """Apply this training's reductions to the groups' current rates, the first ones of another training."""
        now, before = [float(rate) for rate in self.get_last_lr()], self.scheduler._last_lr
        for group, rate, was, start in zip(self.optimizer.param_groups, now, before, self.first_rates, strict=True):
            set_rate(group, float(was) if rate == start else rate * float(was) / start)
        self.first_rates, self.last_epoch, self.scheduler._last_lr = now, position, self.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        scheduler = self.scheduler.state_dict()
        return {"last_epoch": self.last_epoch, "first_rates": self.first_rates, "scheduler": scheduler}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch, self.first_rates = state_dict["last_epoch"], state_dict["first_rates"]
        self.scheduler.load_state_dict(state_dict["scheduler"])


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a parameter group, which may be a tensor."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
