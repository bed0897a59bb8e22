"""Settings that a workload's own learning-rate schedule uses, and those that it ignores.

To find them, the schedule is rehearsed on a copy of the optimizer that trains nothing, and again with other values. A
rate that changes with a value follows it in some way."""

import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from scaleray.config import RunConfig
from scaleray.config.recipe.values import Recipe
from scaleray.errors import ConfigError, WorkloadError, text_of
from scaleray.training.setup.own_optimizer import InUse
from scaleray.training.setup.plateaus import OwnPlateau
from scaleray.training.setup.several_optimizers import SeveralOptimizers, SeveralSchedules, members
from scaleray.workload import call_user_code

Build = Callable[[Any, Recipe], Any]
Rates = list[tuple[float, ...]]
"""Learning rate of every parameter group, step by step."""
MOST_REHEARSED = 10_000
"""Maximum number of steps that are rehearsed, which takes about 0.2 s."""
NEVER_USED = ("name", "final_ratio", "factor", "patience", "threshold", "cooldown")
"""Settings of the section `schedule` that `schedule()` does not receive."""
LENGTHS = {"warmup": "warmup_steps", "length": "schedule_steps"}
"""Settings that it receives as numbers of steps, under their names in the recipe."""


def build_own(
    build: Build,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    recipe: Recipe,
    in_use: InUse,
    varied: Collection[str] = (),
    *,
    configured: Callable[[torch.optim.Optimizer], LRScheduler],
) -> tuple[LRScheduler | None, InUse]:
    """Build the workload's own schedule, if it has one, and return it with the settings in use. in_use: settings in use
    without the schedule.

    build: calls `schedule()`, with the optimizers by name if there are several; it is called again on copies of them.
    varied: keys of the config in which this training differs from the others of a sweep. configured: makes the schedule
    of optimizers for which it returns none. Raises ConfigError if a swept value, or a rule, would have no effect."""
    make = partial(_made, build, configured)
    recipe = dataclasses.replace(recipe, total_steps=whole_steps(config, recipe))
    rehearsal = _stand_in(optimizer)
    first = make(rehearsal, recipe)
    if first is None:
        return None, in_use
    num_steps = min(recipe.total_steps, MOST_REHEARSED)
    rates = _rates(first, rehearsal, num_steps)
    ignored = [name for name in NEVER_USED if _is_set(name, config, varied)]
    for name, field in LENGTHS.items():
        if _is_set(name, config, varied):
            other = dataclasses.replace(recipe, **{field: max(1, getattr(recipe, field) // 2)})
            if _try(make, _stand_in(optimizer), other, num_steps) == rates:
                ignored.append(name)
    halved = _stand_in(optimizer, factor=0.5)
    rate = recipe.learning_rate
    half = dataclasses.replace(recipe, learning_rate=None if rate is None else rate / 2)
    ignores_rate = _try(make, halved, half, num_steps) == rates and rate is not None
    peak = max(of_step[0] for of_step in rates)
    for name in ignored:
        _refuse_varied(f"schedule.{name}", getattr(config.schedule, name), varied)
    if ignores_rate:
        _refuse_rate(peak, config, recipe, varied)
    warnings = [
        f"the workload's own schedule() ignores schedule.{name}: use {LENGTHS[name]} of its recipe there, or leave "
        f"schedule.{name} out"
        if name in LENGTHS
        else f"schedule.{name} has no effect on the workload's own schedule()"
        for name in ignored
    ]
    due = in_use.values.get("learning_rate", math.nan if rate is None else rate)
    if ignores_rate and not _same(peak, due):
        warnings.append(
            f"the workload's own schedule() ignores optimizer.learning_rate: its largest rate is {peak:g}, not "
            f"{due:g}; start from the optimizer's rate, or from recipe.learning_rate"
        )
    values = in_use.values if _same(peak, due) else {**in_use.values, "learning_rate": peak}
    own = make(optimizer, recipe)  # last, so that a workload that keeps what it made keeps this one
    _no_warning(optimizer)  # of a first step that was skipped, which is no mistake here
    return own, InUse(values, [*in_use.warnings, *warnings])


def whole_steps(config: RunConfig, recipe: Recipe) -> int:
    """Number of optimizer steps of the whole training, even if only its first part runs, or more than the whole."""
    return recipe.total_steps if config.schedule.length else max(recipe.total_steps, recipe.schedule_steps)


def _made(
    build: Build,
    configured: Callable[[torch.optim.Optimizer], LRScheduler],
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
) -> LRScheduler | None:
    given = dict(optimizer.by_name) if isinstance(optimizer, SeveralOptimizers) else optimizer
    found = call_user_code(lambda: build(given, recipe), what="schedule()", doing="building the schedule")
    if not isinstance(optimizer, SeveralOptimizers) or found is None:
        return _checked(found)
    if not isinstance(found, Mapping) or not set(found) <= set(members(optimizer)):
        shown = f"a mapping of {', '.join(map(str, found))}" if isinstance(found, Mapping) else type(found).__name__
        allowed = f"with several optimizers it must return schedules by name, of {', '.join(members(optimizer))}"
        hint = "omitted optimizers use the configured schedule"
        raise WorkloadError.problem("schedule()", f"returned {shown}: {allowed}", hint)
    own = {name: _checked(found.get(name)) or configured(each) for name, each in members(optimizer).items()}
    return SeveralSchedules(optimizer, own)


def _no_warning(optimizer: torch.optim.Optimizer) -> None:
    """Suppress torch's warning about a schedule that steps before its optimizer."""
    for each in members(optimizer).values():
        setattr(each, "_opt_called", True)  # noqa: B010


def _checked(own: Any) -> LRScheduler | None:
    if isinstance(own, ReduceLROnPlateau):
        return OwnPlateau(own)
    if own is not None and not isinstance(own, LRScheduler):
        raise WorkloadError(
            "schedule()", type(own).__name__, "it must return a torch.optim.lr_scheduler.LRScheduler or None"
        )
    return own


def _stand_in(optimizer: torch.optim.Optimizer, *, factor: float = 1.0) -> torch.optim.Optimizer:
    """Copy of an optimizer with `factor` times its rates, sharing neither parameters nor state with it."""
    if isinstance(optimizer, SeveralOptimizers):
        return SeveralOptimizers({name: _stand_in(own, factor=factor) for name, own in members(optimizer).items()})
    found = copy.copy(optimizer)
    found.param_groups = [
        {**group, "lr": group["lr"] * factor, "params": [torch.zeros(1, requires_grad=True)]}
        for group in optimizer.param_groups
    ]
    found.state = type(optimizer.state)(dict)
    found.defaults = {**optimizer.defaults, "lr": optimizer.defaults.get("lr", 0.0) * factor}
    return found


def _rates(schedule: LRScheduler, optimizer: torch.optim.Optimizer, num_steps: int) -> Rates:
    _no_warning(optimizer)  # that nothing was trained
    found = []
    for number in range(1, num_steps + 1):
        found.append(tuple(float(group["lr"]) for group in optimizer.param_groups))
        take_step(schedule, number)
    return found


def take_step(schedule: LRScheduler, number: int) -> None:
    """Advance a schedule after step `number`. Raises WorkloadError if it is exhausted, as OneCycleLR can be."""
    try:
        schedule.step()
    except (ValueError, IndexError) as exc:
        raise WorkloadError.problem(
            "schedule()",
            f"must give a learning rate for every step of the training, but fails after step {number}: {text_of(exc)}",
            "use recipe.total_steps as its length",
        ) from exc


def _try(make: Callable[..., Any], optimizer: torch.optim.Optimizer, recipe: Recipe, num_steps: int) -> Rates | None:
    try:
        return _rates(make(optimizer, recipe), optimizer, num_steps)
    except Exception:  # it may know some values only
        return None


def _is_set(name: str, config: RunConfig, varied: Collection[str]) -> bool:
    default = type(config.schedule).model_fields[name].default
    return f"schedule.{name}" in varied or getattr(config.schedule, name) != default


def _same(left: float, right: float) -> bool:
    return abs(left - right) <= 1e-6 * max(abs(left), abs(right))  # a rate may be a tensor in float32


def _refuse_varied(key: str, value: Any, varied: Collection[str]) -> None:
    if key in varied:
        raise ConfigError(
            key, value, "the workload's own schedule() ignores it in every trial", f"leave {key} out of the sweep"
        )


def _refuse_rate(peak: float, config: RunConfig, recipe: Recipe, varied: Collection[str]) -> None:
    """Raise ConfigError for a rule, or for a sweep over rates, if the schedule sets its own rates."""
    advice = "start from the optimizer's rate, or from recipe.learning_rate, in schedule()"
    if "optimizer.learning_rate" in varied:
        raise ConfigError(
            "optimizer.learning_rate",
            config.optimizer.learning_rate,
            f"the workload's own schedule() ignores it and has a largest rate of {peak:g} in every trial",
            f"{advice}, or leave optimizer.learning_rate out of the sweep",
        )
    if config.optimizer.rule != "none" or "optimizer.rule" in varied:
        raise ConfigError(
            "optimizer.rule",
            config.optimizer.rule,
            f"the workload's own schedule() ignores the derived learning rate: its largest rate is {peak:g}, "
            f"not {recipe.learning_rate:g}",
            f"{advice}, or --optimizer.rule none",
        )
