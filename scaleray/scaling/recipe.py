"""Everything that follows from the config and the size of the data: shares, steps, learning rate.

Computed once on the driver, printed, saved with the run and sent to the workers, so that no worker derives anything.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from scaleray.config import Duration, RunConfig
from scaleray.config.shares import UNEVEN_STRATEGIES
from scaleray.errors import ConfigError, DataError
from scaleray.scaling.combinations import (
    check_compression,
    check_fine_tuning,
    check_float8,
    check_fsdp,
    check_optimizer,
    check_pruning,
    check_schedule,
    check_shard_dtypes,
    check_training_apart,
)
from scaleray.scaling.lr_rules import MOVED_BY_RULES, RULES, Hyperparameters
from scaleray.scaling.noise_way import check_noise_scale
from scaleray.scaling.shares import shares_by_speed

WHY_EVEN = {
    "fsdp": "every micro-batch gathers parameters on all workers, so that all must run equally many",
    "tensor": "workers of a replica compute the same samples together",
    "pipeline": "a schedule has one number of micro-batches for all replicas",
    "others": "replicas train apart and weigh the same in their average, whatever number of samples each has seen",
}
"""Why a strategy needs equal shares."""


@dataclass(frozen=True)
class DataSize:
    """Size of the training split. tokens_per_sample: None when samples are not sequences of one length."""

    num_samples: int
    tokens_per_sample: int | None = None


@dataclass(frozen=True)
class Recipe:
    """The derived values. Batch sizes are samples; steps are optimizer steps."""

    global_batch_size: int
    per_worker_batch_size: int
    micro_batch_size: int
    evaluation_micro_batch_size: int
    accumulation_steps: int
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int
    schedule_steps: int
    evaluate_every_steps: int | None
    checkpoint_every_steps: int | None
    keep_checkpoint_every_steps: int | None
    learning_rate: float
    betas: tuple[float, float]
    epsilon: float
    strategy: str
    model_parallel_size: int = 1
    worker_shares: tuple[int, ...] | None = None
    """Samples of a full global batch by worker; None is equal, at least at first."""
    measure_shares_every_steps: int | None = None
    """Steps between two measurements of the workers' speed, after which shares may change; None: they do not."""
    parameter_dtype: str | None = None
    """dtype in which sharded parameters are gathered and used; None: nothing is sharded, or in the parameters' own."""
    explanations: dict[str, str] = dataclasses.field(default_factory=dict)
    """How each value was derived, by name."""

    def values(self) -> dict[str, Any]:
        """The derived values without their explanations."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "explanations"}


def derive(config: RunConfig, data: DataSize, *, workers: int | None = None) -> Recipe:
    """The recipe of a config on data of this size. Raises ConfigError or DataError naming what does not fit.

    workers: how many there are now, for an elastic run; None is its largest number.
    """
    why: dict[str, str] = {}
    workers = workers or config.scale.max_workers
    batch_size = _global_batch_size(config, data, why)
    model_parallel = _model_parallel_size(config, workers, why)
    per_worker, micro_size, accumulation = _shares(config, batch_size, workers // model_parallel, why)
    evaluation_micro_size = config.evaluation.micro_size or micro_size
    why["evaluation_micro_batch_size"] = "evaluation.micro_size" if config.evaluation.micro_size else "that of training"
    if data.num_samples < batch_size:
        raise DataError(
            "the training data",
            f"{data.num_samples} samples",
            f"one global batch needs {batch_size}",
            f"use --batch.global-size {_largest_batch(config, data)} or less, or more data"
            if data.num_samples >= workers
            else f"{workers} workers need at least a sample each: use fewer workers, or more data",
        )
    steps_per_epoch = (
        data.num_samples // batch_size if config.batch.drop_last else math.ceil(data.num_samples / batch_size)
    )
    remainder = data.num_samples % batch_size
    why["steps_per_epoch"] = f"{data.num_samples} samples / {batch_size}" + (
        ""
        if not remainder
        else f", last {remainder} left out"
        if config.batch.drop_last
        else f", last step has {remainder}"
    )

    def to_steps(duration: Duration, name: str) -> int:
        steps, how = _to_steps(duration, config, data, batch_size=batch_size, steps_per_epoch=steps_per_epoch)
        why[name] = how
        return steps

    total_steps = max(1, to_steps(config.stop.after, "total_steps"))
    check_pruning(config, total_steps)
    check_fine_tuning(config)
    kappa = config.batch.global_size / (config.optimizer.reference_batch_size or config.batch.global_size)
    rule = config.optimizer.rule
    check_optimizer(config.optimizer)
    if rule != "none" and config.optimizer.reference_batch_size is None:
        raise ConfigError(
            "optimizer.reference_batch_size",
            None,
            f"the rule {rule} needs the batch at which the learning rate was tuned",
            f"for example --optimizer.reference-batch-size {config.batch.global_size}",
        )
    scaled = RULES[rule](
        Hyperparameters(config.optimizer.learning_rate, config.optimizer.betas, config.optimizer.epsilon), kappa
    )
    for name in MOVED_BY_RULES:
        why[name] = (
            "as tuned (rule none)"
            if rule == "none"
            else f"rule {rule} at kappa = {kappa:.4g} = {config.batch.global_size} / {config.optimizer.reference_batch_size}"
        )
    # kappa times as many epochs are the same number of steps, each of them kappa times as large
    stretch = 1.0 if config.schedule.warmup.unit == "steps" else scaled.warmup_factor
    warmup = Duration(config.schedule.warmup.value * stretch, config.schedule.warmup.unit)
    warmup_steps = to_steps(warmup, "warmup_steps")
    if scaled.warmup_factor != 1:
        why["warmup_steps"] += f", {scaled.warmup_factor:.4g} x as many epochs as at the reference batch by {rule}"
    if warmup_steps >= total_steps > 1:
        raise ConfigError(
            "schedule.warmup",
            str(config.schedule.warmup),
            f"it is {warmup_steps} steps here and the whole training only {total_steps}",
            "shorten the warm-up or lengthen stop.after",
        )
    if config.schedule.length and config.schedule.name == "constant":
        raise ConfigError(
            "schedule.length", str(config.schedule.length), "a constant schedule has no decay that could end there",
            "leave it out, or use --schedule.name cosine or linear",
        )  # fmt: skip
    schedule_steps = to_steps(config.schedule.length, "schedule_steps") if config.schedule.length else total_steps
    why.setdefault("schedule_steps", "the whole training")
    if config.schedule.length and schedule_steps <= warmup_steps:
        raise ConfigError(
            "schedule.length",
            str(config.schedule.length),
            f"it is {schedule_steps} steps here, and the warm-up alone {warmup_steps}",
            "it counts from the start of training: lengthen it, or leave it out for the whole training",
        )
    evaluate_every = (
        max(1, to_steps(config.evaluation.every, "evaluate_every_steps")) if config.evaluation.every else None
    )
    why.setdefault("evaluate_every_steps", "at the end only")
    checkpoint_every, keep_every = (
        max(1, to_steps(duration, name)) if duration else None
        for duration, name in (
            (config.checkpoint.every, "checkpoint_every_steps"),
            (config.checkpoint.keep_every, "keep_checkpoint_every_steps"),
        )
    )
    why.setdefault("checkpoint_every_steps", "by time alone" if config.checkpoint.every_minutes else "none")
    why.setdefault("keep_checkpoint_every_steps", "none stays for good")
    strategy = resolve_strategy(config, workers)
    check_compression(config, strategy)
    if workers == config.scale.max_workers:  # an elastic run may come down to a single worker for a while
        check_noise_scale(config, strategy, data_size=workers // model_parallel, accumulation_steps=accumulation)
    why["strategy"] = f"strategy.name {config.strategy.name}, {workers} worker{'s' if workers > 1 else ''}"
    check_training_apart(config)
    if config.precision.tf32 and (config.precision.dtype == "fp64" or not config.scale.gpus_per_worker):
        raise ConfigError(
            "precision.tf32", True,
            "float64 has no use for it" if config.precision.dtype == "fp64" else "it is a mode of GPUs, and the workers have none",
            "leave it out",
        )  # fmt: skip
    check_float8(config, strategy)
    if strategy == "fsdp":
        check_fsdp(config, workers)
    why["parameter_dtype"] = "nothing is sharded"
    if is_sharded := strategy == config.strategy.name and config.shards_replicas:
        check_shard_dtypes(config)
        why["parameter_dtype"] = "fsdp.parameter_dtype" if config.fsdp.parameter_dtype else "that of precision.dtype"
    if strategy in ("ddp", "zero1") and config.strategy.static_graph and accumulation > 1:
        # torch 2.13 fails an assertion, and without it would stop reducing: github.com/pytorch/pytorch/pull/187732
        raise ConfigError(
            "strategy.static_graph",
            True,
            f"torch's static graph cannot accumulate, and each worker's step has {accumulation} micro-batches",
            f"leave it out, or use --batch.micro-size {per_worker}",
        )
    worker_shares, measure_every = _uneven_shares(config, strategy, batch_size, workers, why)
    if strategy == "pipeline":
        check_schedule(config, accumulation)
    return Recipe(
        global_batch_size=batch_size,
        per_worker_batch_size=per_worker,
        micro_batch_size=micro_size,
        evaluation_micro_batch_size=evaluation_micro_size,
        accumulation_steps=accumulation,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        warmup_steps=warmup_steps,
        schedule_steps=schedule_steps,
        evaluate_every_steps=evaluate_every,
        checkpoint_every_steps=checkpoint_every,
        keep_checkpoint_every_steps=keep_every,
        learning_rate=scaled.learning_rate,
        betas=scaled.betas,
        epsilon=scaled.epsilon,
        strategy=strategy,
        worker_shares=worker_shares,
        measure_shares_every_steps=measure_every,
        model_parallel_size=model_parallel,
        parameter_dtype=config.gathered_dtype if is_sharded else None,
        explanations=why,
    )


def resolve_strategy(config: RunConfig, workers: int | None = None) -> str:
    """The strategy's name with `auto` decided, for the largest number of workers if none is given. One worker has nobody to average with, so that ddp is `single` there."""
    name, workers = config.strategy.name, workers or config.scale.max_workers
    if name == "single" and config.scale.max_workers > 1:
        raise ConfigError(
            "strategy.name",
            "single",
            f"it is for one worker, and scale.workers is {config.scale.workers!s}",
            "use ddp or auto",
        )
    if name in ("auto", "ddp"):
        return "single" if workers == 1 else "ddp"
    return "single" if workers == 1 else name


def _model_parallel_size(config: RunConfig, workers: int, why: dict[str, str]) -> int:
    size = config.model_parallel_size
    if workers % size:
        name = config.strategy.name
        near = " or ".join(str(n) for n in nearest_multiples(workers, size))
        raise ConfigError(
            f"{name}.size", size, f"{workers} workers are no multiple of it", f"use {near} workers, or another size"
        )
    if size > 1 and config.scale.is_elastic:
        raise ConfigError(
            "scale.workers", str(config.scale.workers), f"with {config.strategy.name} the number is fixed"
        )
    why["model_parallel_size"] = f"{config.strategy.name}.size" if size > 1 else "every worker has a whole model"
    return size


def nearest_multiples(value: int, of: int) -> list[int]:
    """The multiples of `of` next to `value`, at least `of`: what to suggest when `value` does not divide."""
    below = value // of * of
    return sorted({max(of, below), below + of})


def _global_batch_size(config: RunConfig, data: DataSize, why: dict[str, str]) -> int:
    size = config.batch.global_size
    if config.batch.unit == "samples":
        why["global_batch_size"] = "batch.global_size"
        return size
    tokens = _tokens_per_sample(config, data, "batch.unit")
    if size % tokens:
        near = " or ".join(str(n) for n in nearest_multiples(size, tokens * config.scale.max_workers))
        raise ConfigError(
            "batch.global_size",
            size,
            f"a sample has {tokens} tokens, so it must be a multiple of {tokens}",
            f"nearest for {config.scale.max_workers} workers: {near}",
        )
    why["global_batch_size"] = f"{size} tokens / {tokens} tokens per sample"
    return size // tokens


def _tokens_per_sample(config: RunConfig, data: DataSize, key: str) -> int:
    if data.tokens_per_sample is None:
        raise ConfigError(key, "tokens", "this data has no fixed number of tokens per sample", "count in samples")
    return data.tokens_per_sample


def _shares(config: RunConfig, batch_size: int, workers: int, why: dict[str, str]) -> tuple[int, int, int]:
    if config.scale.is_elastic and config.scale.on_resize == "rescale" and config.batch.global_size % workers:
        near = " or ".join(str(n) for n in nearest_multiples(config.batch.global_size, workers))
        raise ConfigError(
            "batch.global_size", config.batch.global_size, f"scale.on_resize rescale needs a multiple of {workers} workers",
            f"nearest: {near}",
        )  # fmt: skip
    if config.scale.is_elastic:  # shares may be uneven: sums and counts keep that exact
        per_worker = math.ceil(batch_size / workers)
        micro_size = config.batch.micro_size or math.ceil(batch_size / config.scale.max_workers)
        why["per_worker_batch_size"] = f"{batch_size} / {workers} workers, at most"
        why["micro_batch_size"] = "batch.micro_size" if config.batch.micro_size else "the share at most workers"
        why["accumulation_steps"] = f"{per_worker} per worker / {micro_size}"
        return per_worker, micro_size, math.ceil(per_worker / micro_size)
    if batch_size % workers:
        size, unit = config.batch.global_size, config.batch.unit
        multiple = workers * size // batch_size  # in the unit that the user counts in
        near = " or ".join(str(n) for n in nearest_multiples(size, multiple))
        raise ConfigError(
            "batch.global_size", size, f"{workers} workers need a multiple of {multiple} {unit}", f"nearest: {near}"
        )
    per_worker = batch_size // workers
    why["per_worker_batch_size"] = f"{batch_size} / {workers} workers"
    micro_size = config.batch.micro_size or per_worker
    if per_worker % micro_size:
        divisors = (
            [d for d in range(1, per_worker + 1) if per_worker % d == 0] if per_worker <= 10**6 else [1, per_worker]
        )
        below = max((d for d in divisors if d < micro_size), default=1)
        above = min((d for d in divisors if d > micro_size), default=per_worker)
        near = " or ".join(str(n) for n in sorted({below, above}))
        raise ConfigError(
            "batch.micro_size", micro_size, f"it must divide the {per_worker} samples of one worker", f"nearest: {near}"
        )
    why["micro_batch_size"] = "batch.micro_size" if config.batch.micro_size else "the worker's whole share"
    why["accumulation_steps"] = f"{per_worker} per worker / {micro_size}"
    return per_worker, micro_size, per_worker // micro_size


def _uneven_shares(
    config: RunConfig, strategy: str, batch_size: int, workers: int, why: dict[str, str]
) -> tuple[tuple[int, ...] | None, int | None]:
    """(shares by worker or None, steps between measurements or None)."""
    settings, by = config.shares, config.shares.by
    why["measure_shares_every_steps"] = "shares are not measured"
    if by == "equal":
        why["worker_shares"] = "equal"
        return None, None
    if config.scale.is_elastic:
        raise ConfigError(
            "shares.by", by, f"scale.workers is {config.scale.workers!s}: shares are those of a fixed group of workers",
            "give one number of workers, or use equal shares",
        )  # fmt: skip
    if settings.speeds is not None and len(settings.speeds) != workers:
        raise ConfigError(
            "shares.speeds", list(settings.speeds), f"there are {workers} workers", "give one speed for each"
        )
    if workers == 1:
        why["worker_shares"] = "one worker has the whole batch"
        return None, None
    if strategy not in UNEVEN_STRATEGIES:
        raise ConfigError(
            "shares.by", by, f"under {strategy} {WHY_EVEN.get(strategy, WHY_EVEN['others'])}",
            f"use equal shares, or one of {', '.join(UNEVEN_STRATEGIES)}",
        )  # fmt: skip
    if strategy == "ddp" and config.strategy.static_graph:
        raise ConfigError(
            "strategy.static_graph", True, "torch's static graph cannot accumulate, and a larger share is more micro-batches",
            "leave it out, or use equal shares",
        )  # fmt: skip
    if by == "speed":
        why["worker_shares"] = "equal until speeds are measured"
        why["measure_shares_every_steps"] = "shares.measure_every"
        return None, settings.measure_every
    assert settings.speeds is not None
    why["worker_shares"] = f"{batch_size} samples in proportion to shares.speeds"
    return shares_by_speed(settings.speeds, total=batch_size, smallest=settings.smallest), None


def with_micro_size(recipe: Recipe, size: int, *, why: str) -> Recipe:
    """The recipe with smaller micro-batches, of which more make the same global batch. Evaluations follow where they did."""
    follows = recipe.evaluation_micro_batch_size == recipe.micro_batch_size
    return dataclasses.replace(
        recipe,
        micro_batch_size=size,
        accumulation_steps=math.ceil(recipe.per_worker_batch_size / size),
        evaluation_micro_batch_size=size if follows else recipe.evaluation_micro_batch_size,
        explanations={
            **recipe.explanations,
            "micro_batch_size": why,
            "accumulation_steps": f"{recipe.per_worker_batch_size} per worker / {size}",
        },
    )


def largest_divisor(of: int, *, at_most: int) -> int | None:
    """The largest divisor that is no larger; None where there is none."""
    return next((d for d in range(min(of, at_most), 0, -1) if of % d == 0), None)


def _largest_batch(config: RunConfig, data: DataSize) -> int:
    samples = data.num_samples // config.scale.max_workers * config.scale.max_workers
    return samples * (data.tokens_per_sample or 1) if config.batch.unit == "tokens" else samples


def _to_steps(
    duration: Duration, config: RunConfig, data: DataSize, *, batch_size: int, steps_per_epoch: int
) -> tuple[int, str]:
    if duration.unit == "steps":
        return round(duration.value), "given in steps"
    if duration.unit == "epochs":
        return round(duration.value * steps_per_epoch), f"{duration.value:g} epochs x {steps_per_epoch} steps"
    samples = duration.value
    if duration.unit == "tokens":
        samples = duration.value / _tokens_per_sample(config, data, "a duration")
    # whole epochs apart, since the last step of each may be a partial one
    epochs, rest = divmod(samples, steps_per_epoch * batch_size if config.batch.drop_last else data.num_samples)
    steps = int(epochs) * steps_per_epoch + math.ceil(rest / batch_size)
    return steps, f"{duration} at {batch_size} samples a step, {steps_per_epoch} steps an epoch"
