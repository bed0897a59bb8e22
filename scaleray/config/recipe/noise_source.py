"""Choice of the gradients for measuring noise, which needs two batch sizes; the larger one is that of the step."""

from dataclasses import dataclass
from typing import Literal

from scaleray.config import RunConfig
from scaleray.config.strategy_traits import traits_of
from scaleray.errors import ConfigError

SourceName = Literal["workers", "first micro-batch", "consecutive steps"]

ROUNDING = ("none", "fp16", "bf16")
"""Compressions that preserve the mean gradient up to rounding."""


@dataclass(frozen=True)
class NoiseSource:
    """Gradients from which a run measures its noise.

    name: None: noise is not measured. why: reason why no better source was chosen.
    """

    name: SourceName | None
    why: str = ""

    def __str__(self) -> str:
        """The source as text, `noise scale: from ...`, or the reason why noise is not measured."""
        text = {
            "workers": "from the workers' gradients before their average",
            "first micro-batch": "from the first micro-batch of a step",
            "consecutive steps": "from consecutive steps, which underestimates it at high learning rates",
        }.get(self.name or "", "not measured")
        return f"noise scale: {text}{f' ({self.why})' if self.why else ''}"


def noise_source(config: RunConfig, strategy: str, *, data_parallel_size: int, accumulation_steps: int) -> NoiseSource:
    """Choose the gradients from which a run of this strategy measures its noise."""
    measure = config.noise_scale.measure
    if measure is False:
        return NoiseSource(None)
    if never := _why_never(config, strategy):
        return NoiseSource(None, never)
    workers = _why_not_from_workers(config, strategy, data_parallel_size)
    if not workers:
        return NoiseSource("workers")
    first = _why_not_from_micro_batches(config, strategy, data_parallel_size, accumulation_steps)
    if not first:
        return NoiseSource("first micro-batch")
    return NoiseSource(None if measure == "auto" else "consecutive steps", f"{workers}; {first}")


def check_noise_scale(config: RunConfig, strategy: str, *, data_parallel_size: int, accumulation_steps: int) -> None:
    """Raise ConfigError if `noise_scale.measure: true` is impossible."""
    if config.noise_scale.measure is not True:
        return
    found = noise_source(config, strategy, data_parallel_size=data_parallel_size, accumulation_steps=accumulation_steps)
    if found.name is None:
        raise ConfigError("noise_scale.measure", True, found.why, "omit it, or measure under --strategy.name ddp")


def _why_not_from_workers(config: RunConfig, strategy: str, data_parallel_size: int) -> str:
    if not traits_of(strategy).sums_gradients:
        return {"single": "one worker", "tensor": "under tensor the workers of a replica have the same samples"}.get(
            strategy, f"under {strategy} gradients are not averaged"
        )
    if data_parallel_size < 2:
        return "one worker"
    if strategy == "fsdp" and config.noise_scale.preconditioned:
        return "under fsdp no worker has the second moments of a whole gradient"
    return ""


def _why_not_from_micro_batches(
    config: RunConfig, strategy: str, data_parallel_size: int, accumulation_steps: int
) -> str:
    if accumulation_steps < 2:
        return "no accumulation"
    if strategy == "tensor" and data_parallel_size > 1:
        return "under tensor with replicas FSDP holds whole gradients until the last micro-batch"
    if strategy == "fsdp" and config.fsdp.accumulate == "whole":
        return "fsdp.accumulate whole keeps gradients until the last micro-batch"
    return ""


def _why_never(config: RunConfig, strategy: str) -> str:
    """Reason why no source is suitable, as gradients change when they are averaged or are not accessible; otherwise
    ""."""
    settings = config.noise_scale
    if settings.preconditioned and config.optimizer.name not in ("adamw", "lamb"):
        return f"noise_scale.preconditioned is true, but {config.optimizer.name} does not divide by a second moment"
    if traits_of(strategy).reduces_by_ddp and config.compression.name not in ROUNDING:
        return f"compression.name {config.compression.name} does not send the mean gradient"
    if config.pruning.method != "none":
        return f"pruning.method {config.pruning.method} masks gradients after their average"
    if config.degrees().context > 1:
        return "under parallel.context workers have parts of the same samples"
    if config.degrees().expert > 1:
        return "under parallel.expert a worker's gradients have the tokens of others"
    if settings.preconditioned and strategy == "zero1":
        return "under zero1 no worker has the second moments of all parameters"
    if settings.preconditioned and strategy == "tensor":
        return "under tensor second moments and gradients are laid out in several ways"
    if traits_of(strategy).trains_apart and config.degrees().whole > 1:
        return f"under {strategy} each replica is spread over several workers, whose gradients cannot be measured alone"
    if strategy == "pipeline":
        return "under pipeline the gradients of micro-batches and of tied weights are spread over several workers"
    return ""
