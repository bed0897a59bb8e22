"""Values derived from the config and the size of the data: batches, steps, learning rate.

Computed on the driver, printed, saved with the run and sent to the workers; derived again only if an elastic run
changes its number of workers.
"""

import math

from scaleray.common.printed import quantity
from scaleray.config import RunConfig
from scaleray.config.optimizer_schedule import missing_rate
from scaleray.config.recipe.batches import check_data_fills, cut_batch, degrees_on, global_batch_size_of, uneven_shares
from scaleray.config.recipe.combinations import (
    check_averaging,
    check_compression,
    check_context,
    check_cuda_graphs,
    check_fine_tuning,
    check_float8,
    check_fsdp,
    check_optimizer,
    check_pruning,
    check_recovery,
    check_schedule,
    check_search,
    check_shard_dtypes,
    check_static_graph,
    check_tf32,
    check_training_apart,
)
from scaleray.config.recipe.lengths import StepCounter, lengths_of
from scaleray.config.recipe.lr_rules import MOVED_BY_RULES, RULES, Hyperparameters
from scaleray.config.recipe.noise_source import check_noise_scale
from scaleray.config.recipe.values import DataSize, Recipe
from scaleray.errors import ConfigError


def derive(config: RunConfig, data: DataSize, *, workers: int | None = None) -> Recipe:
    """Derive the recipe of a config for data of this size. Raises ConfigError or DataError for values that do not fit.

    workers: current number of workers of an elastic run; None: its largest number.
    """
    why: dict[str, str] = {}
    workers = workers or config.scale.max_workers
    global_batch_size = global_batch_size_of(config, data, why)
    degrees = degrees_on(config, workers, why)
    data_parallel_size = degrees.data
    per_worker, micro_size, accumulation_steps = cut_batch(config, data, global_batch_size, data_parallel_size, why)
    why["evaluation_micro_batch_size"] = "evaluation.micro_size" if config.evaluation.micro_size else "as in training"
    check_data_fills(config, data, global_batch_size, workers)
    counter = StepCounter(config, data, global_batch_size, why)
    total_steps = max(1, counter.steps(config.stop.after, "total_steps"))
    check_pruning(config, total_steps)
    check_averaging(config)
    check_fine_tuning(config)
    scaled = _scaled(config, why)
    lengths = lengths_of(config, counter, total_steps, warmup_factor=scaled.warmup_factor, why=why)
    strategy = resolve_strategy(config, workers)
    why["strategy"] = f"strategy.name {config.strategy.name}, {quantity(workers, 'worker')}"
    check_compression(config, strategy)
    check_recovery(config, strategy, workers)
    if workers == config.scale.max_workers:  # an elastic run may temporarily shrink to one worker
        check_noise_scale(
            config, strategy, data_parallel_size=data_parallel_size, accumulation_steps=accumulation_steps
        )
    _check(config, strategy, workers)
    check_static_graph(config, strategy, accumulation=accumulation_steps, per_worker=per_worker)
    check_cuda_graphs(config, accumulation_steps)
    is_sharded = degrees.shard > 1
    own_dtype = "fsdp.parameter_dtype" if config.fsdp.parameter_dtype else "that of precision.dtype"
    why["parameter_dtype"] = own_dtype if is_sharded else "nothing is sharded"
    shares, measure_every = uneven_shares(config, strategy, global_batch_size, workers, why)
    if degrees.pipeline > 1:
        check_schedule(config, accumulation_steps)
    return Recipe(
        global_batch_size=global_batch_size,
        per_worker_batch_size=per_worker,
        micro_batch_size=micro_size,
        evaluation_micro_batch_size=config.evaluation.micro_size or micro_size,
        accumulation_steps=accumulation_steps,
        degrees=degrees,
        **lengths,
        learning_rate=None if math.isnan(scaled.learning_rate) else scaled.learning_rate,
        betas=scaled.betas,
        epsilon=scaled.epsilon,
        strategy=strategy,
        worker_shares=shares,
        measure_shares_every_steps=measure_every,
        parameter_dtype=config.gathered_dtype if is_sharded else None,
        explanations=why,
    )


def resolve_strategy(config: RunConfig, workers: int | None = None) -> str:
    """Return the name of the strategy, with `auto` resolved. workers: None: the largest number that the config allows.
    With one worker there is nothing to average, so ddp becomes `single`.
    """
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


def _scaled(config: RunConfig, why: dict[str, str]) -> Hyperparameters:
    """Return the optimizer's values after the learning-rate rule. Raises ConfigError if the rule has no reference."""
    settings, size = config.optimizer, config.batch.global_size
    check_optimizer(settings)
    if settings.rule != "none" and settings.reference_batch_size is None:
        raise ConfigError(
            "optimizer.reference_batch_size",
            None,
            f"the rule {settings.rule} needs the batch size at which the learning rate was tuned",
            f"for example --optimizer.reference-batch-size {size}",
        )
    kappa = size / (settings.reference_batch_size or size)
    by_rule = f"rule {settings.rule} at kappa = {kappa:.4g} = {size} / {settings.reference_batch_size}"
    for name in MOVED_BY_RULES:
        why[name] = "as given (optimizer.rule none)" if settings.rule == "none" else by_rule
    rate = settings.learning_rate
    if rate is None:
        if settings.rule != "none":
            raise missing_rate(f"the rule {settings.rule} starts from it")
        why["learning_rate"] = "the workload's own"
        rate = math.nan
    return RULES[settings.rule](Hyperparameters(rate, settings.betas, settings.epsilon), kappa)


def _check(config: RunConfig, strategy: str, workers: int) -> None:
    """Reject settings that this strategy does not support with this number of workers. Raises ConfigError."""
    check_training_apart(config)
    check_search(config)
    check_tf32(config)
    check_float8(config)
    check_context(config, workers)
    if strategy == "fsdp":
        check_fsdp(config, workers)
    if config.degrees(workers).shard > 1:
        check_shard_dtypes(config)
