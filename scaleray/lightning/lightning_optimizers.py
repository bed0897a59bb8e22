"""Optimizer and schedulers returned by `configure_optimizers`, in all of its forms, stepped as in Lightning."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from scaleray.errors import ConfigError, WorkloadError, text_of

KEYS = {"scheduler", "interval", "frequency", "monitor", "strict", "reduce_on_plateau", "name"}
WHAT = "configure_optimizers()"
RATES = ("lr", "learning_rate")
"""Hyperparameters and attributes that may contain a module's learning rate, as in Lightning's learning-rate finder."""


@dataclass
class Due:
    """A scheduler and its interval: every `frequency` steps or epochs, or after evaluations if it has a monitor."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    reduce_on_plateau: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        self.reduce_on_plateau = self.reduce_on_plateau or isinstance(self.scheduler, ReduceLROnPlateau)
        if self.interval not in ("step", "epoch"):
            raise WorkloadError(f"interval of a scheduler in {WHAT}", self.interval, "it must be 'step' or 'epoch'")
        if not isinstance(self.scheduler, LRScheduler):
            kind = type(self.scheduler).__name__
            raise WorkloadError(f"a scheduler in {WHAT}", kind, "it must be from torch.optim.lr_scheduler")
        if self.reduce_on_plateau and self.monitor is None:
            raise WorkloadError.problem(
                f"a ReduceLROnPlateau in {WHAT}",
                "needs the name of a metric as monitor",
                "for example 'monitor': 'val_loss'",
            )

    def is_due(self, number: int) -> bool:
        """Whether it is stepped after step or epoch `number` of its interval, counted from 1."""
        return number % self.frequency == 0


@dataclass(frozen=True)
class Configured:
    """Optimizer and schedule of a module; `optimizer` is None if it leaves that to the config."""

    optimizer: Optimizer | None = None
    schedulers: list[Due] = field(default_factory=list)


def configured(given: Any) -> Configured:
    """Result of `configure_optimizers`, in any of Lightning's forms. Raises WorkloadError for anything else."""
    optimizers, schedulers, monitor = _taken_apart(given)
    if not optimizers:
        return Configured()
    if len(optimizers) > 1:
        allowed = "automatic optimisation accepts one, as in Lightning"
        hint = "use one optimizer, with separate values for its parameter groups"
        raise WorkloadError.problem(WHAT, f"returned {len(optimizers)} optimizers: {allowed}", hint)
    own = optimizers[0]
    found = [_due(scheduler, monitor) for scheduler in schedulers]
    if any(due.scheduler.optimizer is not own for due in found):
        raise WorkloadError.problem(WHAT, "returned a scheduler for an optimizer that it did not return")
    return Configured(own, found)


def configured_by_hand(given: Any) -> list[tuple[Optimizer, dict[int, Due]]]:
    """Result of `configure_optimizers` for manual optimisation: each optimizer, with its schedulers by index among
    all."""
    optimizers, schedulers, _ = _taken_apart(given)
    found = [each["scheduler"] if isinstance(each, Mapping) else each for each in schedulers]
    if any(all(each.optimizer is not own for own in optimizers) for each in found):
        raise WorkloadError.problem(WHAT, "returned a scheduler for an optimizer that it did not return")
    dues = {number: Due(each, monitor="") for number, each in enumerate(found)}
    return [(own, {n: due for n, due in dues.items() if due.scheduler.optimizer is own}) for own in optimizers]


def _taken_apart(given: Any) -> tuple[list[Any], list[Any], str | None]:
    if given is None:
        return [], [], None
    if isinstance(given, Optimizer):
        return [given], [], None
    if isinstance(given, Mapping):
        return _of_mapping(given)
    if isinstance(given, (list, tuple)):
        if len(given) == 2 and isinstance(given[0], list) and all(isinstance(o, Optimizer) for o in given[0]):
            schedulers = given[1] if isinstance(given[1], list) else [given[1]]
            return list(given[0]), schedulers, None
        if all(isinstance(one, Mapping) for one in given):
            parts = [_of_mapping(one) for one in given]
            return [o for part in parts for o in part[0]], [s for part in parts for s in part[1]], None
        if all(isinstance(one, Optimizer) for one in given):
            return list(given), [], None
    allowed = "an optimizer, [optimizer], ([optimizer], [scheduler]), or {'optimizer': ..., 'lr_scheduler': ...}"
    raise WorkloadError.problem(WHAT, f"returned {type(given).__name__}: it must return {allowed}")


def _of_mapping(given: Mapping[str, Any]) -> tuple[list[Any], list[Any], str | None]:
    if not isinstance(given.get("optimizer"), Optimizer):
        raise WorkloadError.problem(WHAT, f"returned a dict with the keys {sorted(given)}: it needs 'optimizer'")
    scheduler = given.get("lr_scheduler")
    return [given["optimizer"]], [] if scheduler is None else [scheduler], given.get("monitor")


def _due(given: Any, monitor: str | None) -> Due:
    if not isinstance(given, Mapping):
        return Due(given, monitor=monitor)
    if "scheduler" not in given:
        raise WorkloadError.problem(
            f"a scheduler in {WHAT}", f"is a dict with the keys {sorted(given)}: it needs 'scheduler'"
        )
    return Due(**{key: value for key, value in given.items() if key in KEYS})


def give_rate(module: Any, settings: Any, args: Mapping[str, Any]) -> None:
    """Let a module's `configure_optimizers` use the config's learning rate, if any, instead of its own: sets the first
    of `RATES` that the module has, as hyperparameter and attribute. No change without one, or if `args` sets it."""
    try:
        rate = settings.learning_rate
    except ConfigError:  # there is none
        return
    if rate is None or set(RATES) & args.keys():
        return
    hyperparameters = getattr(module, "hparams", {})
    for name in RATES:
        is_attribute = isinstance(getattr(module, name, None), (int, float))
        if name in hyperparameters:
            hyperparameters[name] = rate
        if is_attribute:
            setattr(module, name, rate)
        if name in hyperparameters or is_attribute:
            return


def without_schedule(optimizer: Optimizer) -> Optimizer:
    """The optimizer with its rates before its schedulers, which set the rates of the first step, were created."""
    for group in optimizer.param_groups:
        group["lr"] = group.get("initial_lr", group["lr"])
    return optimizer


class LightningSchedule(LRScheduler):
    """Schedulers stepped as in Lightning: by steps, by epochs, or by evaluation values. made: original optimizer of the
    schedulers; `optimizer` takes over its groups, in order."""

    def __init__(self, optimizer: Optimizer, made: Optimizer, schedulers: list[Due], steps_per_epoch: int) -> None:
        # not LRScheduler's own, which would take a first step
        self.optimizer, self.schedulers, self.steps_per_epoch = optimizer, schedulers, steps_per_epoch
        self.last_epoch = 0
        for group, theirs in zip(optimizer.param_groups, made.param_groups, strict=True):
            group.update({key: value for key, value in theirs.items() if key != "params"})
        for due in schedulers:
            _move(due.scheduler, optimizer)

    @property
    def plateaus(self) -> list[Due]:
        """The schedulers that follow a measured value."""
        return [due for due in self.schedulers if due.reduce_on_plateau]

    def step(self, epoch: int | None = None) -> None:
        """Step the schedulers that are due after an optimizer step."""
        self.last_epoch += 1
        in_epoch = (self.last_epoch - 1) % self.steps_per_epoch + 1
        self._step_all("step", in_epoch)
        if in_epoch == self.steps_per_epoch:
            self._step_all("epoch", self.last_epoch // self.steps_per_epoch)

    def _step_all(self, interval: str, number: int) -> None:
        for due in self.schedulers:
            if due.interval == interval and not due.reduce_on_plateau and due.is_due(number):
                step_scheduler(due.scheduler)

    def follow(self, due: Due, value: float) -> None:
        """Step a scheduler with a measured value."""
        due.scheduler.step(value)

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """The next step's rate for each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Number of steps taken, and the state of every scheduler."""
        return {"last_epoch": self.last_epoch, "schedulers": [due.scheduler.state_dict() for due in self.schedulers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.last_epoch = state_dict["last_epoch"]
        for due, state in zip(self.schedulers, state_dict["schedulers"], strict=True):
            due.scheduler.load_state_dict(state)


def step_scheduler(scheduler: Any) -> None:
    """Step a scheduler even if torch has not noticed a step of its optimizer."""
    try:
        if _has_begun(scheduler):
            scheduler.step()
            return
        with warnings.catch_warnings():  # torch misses the optimizer's step, whose method others have wrapped since
            warnings.simplefilter("ignore", UserWarning)
            scheduler.step()
    except ValueError as exc:  # OneCycleLR, over its end
        hint = "use self.trainer.estimated_stepping_batches as its length"
        raise WorkloadError.problem(f"{type(scheduler).__name__} in {WHAT}", f"fails: {text_of(exc)}", hint) from exc


def _has_begun(scheduler: Any) -> bool:
    return scheduler.last_epoch > 0 and all(_has_begun(inner) for inner in getattr(scheduler, "_schedulers", ()))


def _move(scheduler: Any, optimizer: Optimizer) -> None:
    """Attach a scheduler, and the schedulers inside it, to another optimizer."""
    scheduler.optimizer = optimizer
    for inner in getattr(scheduler, "_schedulers", ()):
        _move(inner, optimizer)
