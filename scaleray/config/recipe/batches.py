"""Division of a global batch among workers, replicas and micro-batches."""

import math

from scaleray.common.printed import quantity
from scaleray.config import RunConfig
from scaleray.config.parallel import Degrees
from scaleray.config.recipe.shares import shares_by_speed
from scaleray.config.recipe.values import DataSize, nearest_multiples
from scaleray.config.strategy_traits import names_with, traits_of
from scaleray.errors import ConfigError, DataError

WHY_EVEN = {
    "fsdp": "every micro-batch gathers parameters on all workers, so all must run the same number",
    "tensor": "workers of a replica compute the same samples together",
    "pipeline": "a schedule has one number of micro-batches for all replicas",
    "others": "replicas train separately and have equal weight in the average, whatever their number of samples",
}
"""Reasons why strategies need equal shares."""


def global_batch_size_of(config: RunConfig, data: DataSize, why: dict[str, str]) -> int:
    """Return the samples of a global batch. why: receives the derivation of each value, by name. Raises ConfigError."""
    size = config.batch.global_size
    if config.batch.unit == "samples":
        why["global_batch_size"] = "batch.global_size"
        return size
    if (steps := data.packed_steps(config)) is not None:
        return _packed_batch_size(config, data, steps, why)
    tokens = data.tokens_of("batch.unit")
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


def _packed_batch_size(config: RunConfig, data: DataSize, steps: int, why: dict[str, str]) -> int:
    """Return the approximate number of samples in a step of tokens. Raises ConfigError."""
    size, longest, piece = config.batch.global_size, data.longest or 0, (data.total_tokens or 0) // steps
    if longest > piece:
        raise ConfigError(
            "batch.global_size",
            size,
            f"a step has only {piece} tokens, and the longest row has {longest}, so some steps would get no row",
            f"use {longest * 2} or more, or cut long rows",
        )
    why["global_batch_size"] = f"{data.num_samples / steps:.4g} samples on average in {size} tokens"
    return -(-data.num_samples // steps)


def degrees_on(config: RunConfig, workers: int, why: dict[str, str]) -> Degrees:
    """Return the number of workers along each axis of the mesh. Raises ConfigError."""
    found = config.degrees(workers)
    if config.scale.is_elastic and (found.model > 1 or (found.replicate > 1 and found.shard > 1)):
        raise ConfigError("scale.workers", str(config.scale.workers), f"with {found.text()} the number is fixed")
    why["degrees"] = f"strategy and parallel, {quantity(workers, 'worker')}"
    return found


def cut_batch(
    config: RunConfig, data: DataSize, global_batch_size: int, workers: int, why: dict[str, str]
) -> tuple[int, int, int]:
    """Return the samples per worker, the samples per micro-batch, and the number of micro-batches.

    workers: those with samples of their own. If steps are packed with tokens, all three are averages. Raises
    ConfigError for sizes that do not divide.
    """
    if config.scale.is_elastic and config.scale.on_resize == "rescale" and config.batch.global_size % workers:
        near = " or ".join(str(n) for n in nearest_multiples(config.batch.global_size, workers))
        raise ConfigError(
            "batch.global_size",
            config.batch.global_size,
            f"scale.on_resize rescale needs a multiple of {workers} workers",
            f"nearest: {near}",
        )
    given = _micro_size_in_samples(config, data, why)
    varies = data.packed_steps(config) is not None
    has_shrunk = config.recovery.on_loss == "shrink" and workers < config.scale.max_workers
    if varies or has_shrunk or config.scale.is_elastic:  # shares may be uneven: sums and counts keep that exact
        per_worker = math.ceil(global_batch_size / workers)
        micro_size = given or math.ceil(global_batch_size / config.scale.max_workers)
        why["per_worker_batch_size"] = f"{global_batch_size} / {quantity(workers, 'worker')}, at most"
        why.setdefault("micro_batch_size", "batch.micro_size" if given else "the share at most workers")
        why["accumulation_steps"] = f"{per_worker} per worker / {micro_size}"
        return per_worker, micro_size, math.ceil(per_worker / micro_size)
    if global_batch_size % workers:
        size, unit = config.batch.global_size, config.batch.unit
        multiple = workers * size // global_batch_size  # in the user's unit
        near = " or ".join(str(n) for n in nearest_multiples(size, multiple))
        raise ConfigError(
            "batch.global_size", size, f"{workers} workers need a multiple of {multiple} {unit}", f"nearest: {near}"
        )
    per_worker = global_batch_size // workers
    why["per_worker_batch_size"] = f"{global_batch_size} / {quantity(workers, 'worker')}"
    asked, a_sample = config.batch.micro_size, data.tokens_per_sample or 1 if config.batch.unit == "tokens" else 1
    if asked is not None and (asked % a_sample or per_worker % (asked // a_sample)):
        divisors = (
            [d for d in range(1, per_worker + 1) if per_worker % d == 0] if per_worker <= 10**6 else [1, per_worker]
        )
        below = max((d * a_sample for d in divisors if d * a_sample < asked), default=a_sample)
        above = min((d * a_sample for d in divisors if d * a_sample > asked), default=per_worker * a_sample)
        near = " or ".join(str(n) for n in sorted({below, above}))
        of_unit = f"{per_worker * a_sample} {config.batch.unit} of one worker"
        whole = f" in whole samples of {a_sample}" if a_sample > 1 else ""
        raise ConfigError("batch.micro_size", asked, f"it must divide the {of_unit}{whole}", f"nearest: {near}")
    micro_size = given or per_worker
    why.setdefault("micro_batch_size", "batch.micro_size" if given else "the worker's whole share")
    why["accumulation_steps"] = f"{per_worker} per worker / {micro_size}"
    return per_worker, micro_size, per_worker // micro_size


def _micro_size_in_samples(config: RunConfig, data: DataSize, why: dict[str, str]) -> int | None:
    """Return the samples of `batch.micro_size`, approximate if they differ in length; None if it is not set.

    Raises ConfigError.
    """
    size = config.batch.micro_size
    if size is None or config.batch.unit == "samples":
        return size
    if data.packed_steps(config) is None:
        tokens = data.tokens_of("batch.unit")
        why["micro_batch_size"] = f"{size} tokens / {tokens} tokens per sample"
        return max(1, size // tokens)
    if size < (data.longest or 0):
        allowed = f"it is in tokens, by batch.unit, and the longest row has {data.longest}"
        raise ConfigError("batch.micro_size", size, allowed, f"use {data.longest} or more, or cut long rows")
    mean = (data.total_tokens or 0) / data.num_samples
    why["micro_batch_size"] = f"about {size} tokens, at {mean:.4g} per sample on average"
    return max(1, int(size / mean))


def check_data_fills(config: RunConfig, data: DataSize, global_batch_size: int, workers: int) -> None:
    """Raise DataError if the data is smaller than a global batch."""
    if data.num_samples < global_batch_size and data.packed_steps(config) is None:
        raise DataError.problem(
            "the training data",
            f"has {data.num_samples} samples: one global batch needs {global_batch_size}",
            f"use --batch.global-size {data.largest_batch(config)} or less, or more data"
            if data.num_samples >= workers
            else f"{workers} workers need at least one sample each: use fewer workers, or more data",
        )


def uneven_shares(
    config: RunConfig, strategy: str, global_batch_size: int, workers: int, why: dict[str, str]
) -> tuple[tuple[int, ...] | None, int | None]:
    """Return the samples by worker, or None for equal shares, and the steps between speed measurements, or None.

    Raises ConfigError if the strategy or the group does not support uneven shares.
    """
    settings, by = config.shares, config.shares.by
    why["measure_shares_every_steps"] = "shares are not measured"
    if by == "equal":
        why["worker_shares"] = "equal"
        return None, None
    if config.scale.is_elastic:
        raise ConfigError(
            "shares.by",
            by,
            f"scale.workers is {config.scale.workers!s}, and shares need a fixed number of workers",
            "give one number of workers, or use equal shares",
        )
    if settings.speeds is not None and len(settings.speeds) != workers:
        raise ConfigError(
            "shares.speeds", list(settings.speeds), f"there are {workers} workers", "give one speed per worker"
        )
    if workers == 1:
        why["worker_shares"] = "one worker has the whole batch"
        return None, None
    if not traits_of(strategy).reduces_by_ddp:
        raise ConfigError(
            "shares.by",
            by,
            f"under {strategy} {WHY_EVEN.get(strategy, WHY_EVEN['others'])}",
            f"use equal shares, or one of {', '.join(names_with('reduces_by_ddp'))}",
        )
    if strategy == "ddp" and config.strategy.static_graph:
        raise ConfigError(
            "strategy.static_graph",
            True,
            "torch's static graph cannot accumulate, and larger shares need more micro-batches",
            "omit it, or use equal shares",
        )
    if by == "speed":
        why["worker_shares"] = "equal until speeds are measured"
        why["measure_shares_every_steps"] = "shares.measure_every"
        return None, settings.measure_every
    assert settings.speeds is not None
    why["worker_shares"] = f"{global_batch_size} samples in proportion to shares.speeds"
    return shares_by_speed(settings.speeds, total=global_batch_size, smallest=settings.smallest), None
