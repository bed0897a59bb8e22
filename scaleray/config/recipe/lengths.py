"""Lengths of a training and its parts, in optimizer steps."""

import math
from typing import Any

from scaleray.common.printed import quantity
from scaleray.config import Duration, RunConfig
from scaleray.config.recipe.values import DataSize
from scaleray.errors import ConfigError


class StepCounter:
    """Converts durations to optimizer steps of `global_batch_size` samples. why: receives the derivation of each
    number."""

    def __init__(self, config: RunConfig, data: DataSize, global_batch_size: int, why: dict[str, str]) -> None:
        self._drops_last, self._data, self._why = config.batch.drop_last, data, why
        self._global_batch_size = global_batch_size
        self._samples_per_step: float = global_batch_size
        if (packed := data.packed_steps(config)) is not None:
            self.per_epoch, self._samples_per_step = packed, data.num_samples / packed
            why["steps_per_epoch"] = f"{data.total_tokens} tokens / {config.batch.global_size}"
            return
        whole, remainder = divmod(data.num_samples, global_batch_size)
        self.per_epoch = whole if self._drops_last or not remainder else whole + 1
        partial = f", last {remainder} omitted" if self._drops_last else f", last step has {remainder}"
        why["steps_per_epoch"] = f"{data.num_samples} samples / {global_batch_size}{partial if remainder else ''}"

    def steps(self, duration: Duration, name: str) -> int:
        """Optimizer steps of a duration. name: of the derived value. Raises ConfigError if tokens are unknown."""
        steps, self._why[name] = self._steps(duration)
        return steps

    def every(self, duration: Duration | None, name: str, *, otherwise: str) -> int | None:
        """Steps between two events, at least 1; None without a duration. otherwise: explanation of the None."""
        if duration is None:
            self._why[name] = otherwise
            return None
        return max(1, self.steps(duration, name))

    def _steps(self, duration: Duration) -> tuple[int, str]:
        if duration.unit == "steps":
            return round(duration.value), "given in steps"
        if duration.unit == "epochs":
            return round(duration.value * self.per_epoch), f"{duration} x {quantity(self.per_epoch, 'step')}"
        samples = duration.value
        if duration.unit == "tokens":
            samples = duration.value / self._data.tokens_a_sample("a duration")
        # whole epochs separately, since the last step of each may be partial
        samples_per_epoch = self.per_epoch * self._global_batch_size if self._drops_last else self._data.num_samples
        epochs, rest = divmod(samples, samples_per_epoch)
        steps = int(epochs) * self.per_epoch + math.ceil(rest / self._samples_per_step)
        return steps, f"{duration} at {self._samples_per_step:g} samples per step, {self.per_epoch} steps per epoch"


def schedule_lengths(
    config: RunConfig, counter: StepCounter, total_steps: int, *, warmup_factor: float, why: dict[str, str]
) -> tuple[int, int]:
    """Return the steps of the warm-up, and the steps until the end of the decay. warmup_factor: factor of the
    learning-rate rule.

    Raises ConfigError if one does not fit into the other, or into the training.
    """
    given = config.schedule
    # kappa times as many epochs are the same number of steps, each kappa times as large
    stretch = 1.0 if given.warmup.unit == "steps" else warmup_factor
    warmup_steps = counter.steps(Duration(given.warmup.value * stretch, given.warmup.unit), "warmup_steps")
    if warmup_factor != 1:
        rule = config.optimizer.rule
        why["warmup_steps"] += f", {warmup_factor:.4g} x as many epochs as at the reference batch by {rule}"
    if warmup_steps >= total_steps > 1:
        raise ConfigError(
            "schedule.warmup",
            str(given.warmup),
            f"it is {quantity(warmup_steps, 'step')} here, and the whole training only {total_steps}",
            "shorten the warm-up or lengthen stop.after",
        )
    if given.length is None:
        why["schedule_steps"] = "the whole training"
        return warmup_steps, total_steps
    if given.name in ("constant", "plateau"):
        raise ConfigError(
            "schedule.length",
            str(given.length),
            f"a {given.name} schedule has no decay",
            "omit it, or use --schedule.name cosine or linear",
        )
    schedule_steps = counter.steps(given.length, "schedule_steps")
    if schedule_steps <= warmup_steps:
        raise ConfigError(
            "schedule.length",
            str(given.length),
            f"it is {schedule_steps} steps here, and the warm-up alone is {warmup_steps}",
            "it counts from the start of training: lengthen it, or omit it for the whole training",
        )
    return warmup_steps, schedule_steps


def lengths_of(
    config: RunConfig, counter: StepCounter, total_steps: int, *, warmup_factor: float, why: dict[str, str]
) -> dict[str, Any]:
    """Return all lengths of a training with this number of steps, as fields of `Recipe`. Raises the errors of
    `schedule_lengths`."""
    warmup, schedule = schedule_lengths(config, counter, total_steps, warmup_factor=warmup_factor, why=why)
    memory = config.checkpoint.memory
    by_time = "by time only" if config.checkpoint.every_minutes else "none"
    every = {
        "evaluate_every_steps": (config.evaluation.every, "only at the end"),
        "checkpoint_every_steps": (config.checkpoint.every, by_time),
        "keep_checkpoint_every_steps": (config.checkpoint.keep_every, "none is permanent"),
        "memory_every_steps": (None if memory is None else memory.every, "no copies in memory"),
    }
    return {
        "steps_per_epoch": counter.per_epoch,
        "total_steps": total_steps,
        "warmup_steps": warmup,
        "schedule_steps": schedule,
        **{name: counter.every(duration, name, otherwise=otherwise) for name, (duration, otherwise) in every.items()},
    }
