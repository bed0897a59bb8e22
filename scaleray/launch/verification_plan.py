"""Which variants of a training are verified: strategies x numbers of workers x accumulation, as far as they exist."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaleray.config import RunConfig
from scaleray.config.compression import CompressionSettings
from scaleray.data.sources import Source
from scaleray.errors import ConfigError, DataError
from scaleray.launch.run import data_size
from scaleray.scaling.recipe import derive
from scaleray.strategies import STRATEGIES
from scaleray.training.job import TRAIN, Split, TrainJob
from scaleray.training.verification import Outcome, Variant, short_job

CPUS_PER_WORKER = 0.25
"""Numbers are compared, not speed: four workers share a core rather than not fit on a small machine."""


@dataclass(frozen=True)
class Question:
    """What is to be verified. strategies: names, or `all`. accumulation: micro-batches in a worker's step."""

    strategies: Sequence[str] = ("all",)
    world_sizes: Sequence[int] = (1, 2)
    accumulation: Sequence[int] = (1, 2)
    steps: int = 20
    bound: float = 1e-9
    precision: str = "fp64"

    def __post_init__(self) -> None:
        for option, values in (("--world-sizes", self.world_sizes), ("--accumulation", self.accumulation)):
            if not values or min(values) < 1:
                raise ConfigError(option, list(values), "it must be whole numbers from 1, such as 1,2,4")
        if self.steps < 1:
            raise ConfigError("--steps", self.steps, "it must be at least 1")
        if not 0 <= self.bound < 1:
            raise ConfigError("--bound", self.bound, "it must be at least 0 and below 1", "1e-9 fits float64")
        for name in self.strategies:
            if name not in (*STRATEGIES, "all"):
                raise ConfigError("--strategies", name, f"there are: all, {', '.join(STRATEGIES)}")


@dataclass(frozen=True)
class Plan:
    """groups: variants by number of workers, of which the first holds the reference. refused: with the reason."""

    reference: Variant
    groups: Mapping[int, list[Variant]]
    refused: list[Outcome]


def make_plan(config: RunConfig, question: Question, workload: Any, sources: Mapping[str, Source]) -> Plan:
    """Every variant asked for that the config and the strategies allow; the others with the reason. Raises UsageError."""
    splits = {name: Split.of(name, source) for name, source in sources.items()}
    if splits[TRAIN].is_streamed:
        raise DataError(
            "the train data", "a Ray Dataset", "its order depends on the number of workers, so that runs cannot be compared",
            "verify with rows that can be read by index: arrays, ParquetSource, TokenSource or a torch Dataset",
        )  # fmt: skip
    size = data_size(sources)
    batch_size = derive(_spread(config, "auto", 1, micro_size=None), size).global_batch_size

    def variant(strategy: str, world_size: int, accumulation: int) -> Variant:
        share = batch_size // world_size
        if share % accumulation:
            raise ConfigError(
                "--accumulation", accumulation, f"it must divide the {share} samples of each of {world_size} workers"
            )
        spread = _spread(config, strategy, world_size, micro_size=share // accumulation)
        job = TrainJob(spread, derive(spread, size), workload, splits, time.time())
        in_check = short_job(job, steps=question.steps, precision=question.precision)
        own = short_job(job, steps=question.steps)
        return Variant(job.recipe.strategy, world_size, accumulation, in_check, own)

    groups: dict[int, list[Variant]] = {1: []}  # the reference runs there, even if nothing else does
    refused: dict[tuple[str, int, str], Outcome] = {}
    first_error: ConfigError | None = None
    asked = list(STRATEGIES) if "all" in question.strategies else list(dict.fromkeys(question.strategies))
    for world_size in sorted(set(question.world_sizes)):
        _check_world_size(world_size, batch_size)
        found: dict[tuple[str, int], Variant] = {}
        # `single` is for one worker, which need not be said when others were asked for too
        for strategy in [s for s in asked if s != "single" or world_size == 1 or len(asked) == 1]:
            for accumulation in sorted(set(question.accumulation)):
                try:
                    made = variant(strategy, world_size, accumulation)
                    found.setdefault((made.strategy, accumulation), made)
                except ConfigError as exc:
                    first_error = first_error or exc
                    reason = f"{exc.what} {exc.found}: {exc.allowed}"
                    refused[strategy, world_size, reason] = Outcome(
                        strategy, world_size, accumulation, "refused", reason
                    )
        if found:
            groups[world_size] = list(found.values())
    if first_error is not None and not any(groups.values()):
        raise first_error
    try:
        reference = variant("auto", 1, min(question.accumulation))
    except ConfigError:
        reference = variant("auto", 1, 1)
    return Plan(reference, groups, list(refused.values()))


def _check_world_size(world_size: int, batch_size: int) -> None:
    if batch_size % world_size == 0:
        return
    below = next(n for n in range(min(world_size, batch_size), 0, -1) if batch_size % n == 0)
    above = next((n for n in range(world_size, min(batch_size, 10**6) + 1) if batch_size % n == 0), batch_size)
    near = " or ".join(str(n) for n in sorted({below, above}))
    raise ConfigError(
        "--world-sizes", world_size, f"it must divide the global batch of {batch_size} samples", f"nearest: {near}"
    )


def _spread(config: RunConfig, strategy: str, world_size: int, *, micro_size: int | None) -> RunConfig:
    """The same training on other workers."""
    # by copy, which checks nothing: a strategy of the table need not be one that a config file may name
    cpus = min(CPUS_PER_WORKER, config.scale.cpus_per_worker)
    scale = {"workers": world_size, "cpus_per_worker": cpus, "max_failures": 0}
    shares = config.shares
    if shares.by != "equal":  # measured shares would hardly differ here, and not twice in the same way
        speeds = tuple(1 + rank / max(1, world_size - 1) for rank in range(world_size))
        shares = shares.model_copy(update={"by": "given", "speeds": speeds})
    compression = CompressionSettings() if world_size == 1 else config.compression  # one process sends nothing
    return config.model_copy(
        update={
            "shares": shares,
            "compression": compression,
            "scale": config.scale.model_copy(update=scale),
            "strategy": config.strategy.model_copy(update={"name": strategy}),
            "batch": config.batch.model_copy(update={"micro_size": micro_size}),
        }
    )
