"""Changed settings that have no effect in this run, such as those of a strategy that is not used.

They are reported in the run's events, but never rejected. One file often serves several strategies
(`--strategy.name`, `verify --strategies all`, a sweep), and a setting that one of them ignores may be needed by the
next. Impossible settings (compression.name under fsdp), and settings without their method (pruning.sparsity without
pruning.method), are rejected: see config.recipe.combinations.
"""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from scaleray.config.parallel import short_form
from scaleray.config.run import RunConfig
from scaleray.config.strategy_traits import names_with, traits_of

DDP, WITH_WARM_UP, MIXING = map(names_with, ("reduces_by_ddp", "averages_now_and_then", "mixes_with_neighbours"))
USERS: dict[str, tuple[str, ...]] = {
    "strategy.bucket_size_mib": (*DDP, *WITH_WARM_UP, *MIXING),
    "strategy.gradient_as_bucket_view": (*DDP, *WITH_WARM_UP),
    "strategy.static_graph": (*DDP, *WITH_WARM_UP),
    "strategy.find_unused_parameters": (*DDP, *WITH_WARM_UP),
    "fsdp": ("fsdp",),
    "fsdp.reshard_after_forward": ("fsdp", "tensor"),
    "fsdp.parameter_dtype": names_with("splits_parameters"),
    "fsdp.reduce_dtype": names_with("splits_parameters"),
    "tensor": ("tensor", "pipeline"),
    "pipeline": ("pipeline",),
    "local_sgd": WITH_WARM_UP,
    "local_sgd.average_momentum": ("local_sgd",),
    "local_sgd.outer_learning_rate": ("diloco",),
    "local_sgd.outer_momentum": ("diloco",),
    **dict.fromkeys(("local_sgd.fragments", "local_sgd.overlap", "local_sgd.mixing"), ("diloco",)),
    "gossip": ("gossip",),
    "gossip.max_staleness": MIXING,
    "gossip.meet_every": MIXING,
}
"""Strategies that use a section, or a single setting if that differs."""
NEEDS: dict[str, tuple[Callable[[RunConfig], bool], str]] = {
    "gossip.max_staleness": (
        lambda config: config.strategy.name == "async_sgd" or config.gossip.is_asynchronous,
        "without gossip.is_asynchronous",
    ),
    **dict.fromkeys(
        ("fsdp.parameter_dtype", "fsdp.reduce_dtype"),
        (lambda config: config.degrees().shard > 1, "without sharded replicas"),
    ),
    "context.exchange": (lambda config: config.degrees().context > 1, "without parallel.context"),
    "tensor.sequence_parallel": (lambda config: config.degrees().tensor > 1, "without parallel.tensor"),
    "fsdp.wrap_min_parameters": (lambda config: config.fsdp.wrap == "size", "without fsdp.wrap size"),
    **dict.fromkeys(
        ("noise_scale.every_steps", "noise_scale.averaging", "noise_scale.preconditioned"),
        (lambda config: config.noise_scale.measure is not False, "without noise_scale.measure"),
    ),
    "averaging.every": (lambda config: config.averaging.decay is not None, "without averaging.decay"),
    **dict.fromkeys(
        ("schedule.factor", "schedule.patience", "schedule.threshold", "schedule.cooldown"),
        (lambda config: config.schedule.name == "plateau", "without schedule.name plateau"),
    ),
    "stop.watch": (lambda config: config.stop.patience is not None, "without stop.patience"),
    "shares.measure_every": (lambda config: config.shares.by == "speed", "without shares.by speed"),
    "shares.smallest": (lambda config: config.shares.by != "equal", "with equal shares"),
    "checkpoint.best": (lambda config: config.checkpoint.keep_best > 0, "with checkpoint.keep_best 0"),
    "checkpoint.keep_best": (lambda config: config.checkpoint.best is not None, "without checkpoint.best"),
    "precision.float8_leave_out": (lambda config: config.precision.float8 != "none", "without precision.float8"),
    "precision.emulate_float8": (lambda config: config.precision.float8 != "none", "without precision.float8"),
    "recovery.silent_s": (lambda config: config.recovery.is_on, "without recovery.spares"),
    "precision.initial_loss_scale": (lambda config: config.precision.dtype == "fp16", "without precision.dtype fp16"),
}
"""Settings that have an effect only with another setting: a test of the config, and the text if it fails."""
OFF: dict[str, Callable[[RunConfig], bool]] = {
    "activations": lambda config: config.activations.checkpointing == "none",
    "compilation": lambda config: config.compilation.what == "nothing",
    "compression": lambda config: config.compression.name == "none",
    "fine_tuning": lambda config: config.fine_tuning.lora_rank == 0,
    "memory": lambda config: not config.memory.find_micro_size and config.memory.on_out_of_memory == "raise",
    "noise_scale": lambda config: config.noise_scale.measure is False,
    "precision.initial_loss_scale": lambda config: config.precision.dtype != "fp16",
    "pruning": lambda config: config.pruning.method == "none",
    "recovery": lambda config: not config.recovery.is_on,
    "shares": lambda config: config.shares.by == "equal",
    "study": lambda config: True,
    "alerts": lambda config: True,
    "scale.on_resize": lambda config: not config.scale.is_elastic,
    "scale.resize_interval_s": lambda config: not config.scale.is_elastic,
    "optimizer.betas": lambda config: config.optimizer.name in ("sgd", "lars"),
    "optimizer.epsilon": lambda config: config.optimizer.name in ("sgd", "lars"),
    "optimizer.momentum": lambda config: config.optimizer.name in ("adamw", "lamb"),
    "optimizer.nesterov": lambda config: config.optimizer.name != "sgd",
    "optimizer.trust_coefficient": lambda config: config.optimizer.name != "lars",
    "optimizer.adapt_vectors": lambda config: config.optimizer.name in ("adamw", "sgd"),
}
"""Sections and settings that a run does not use, with tests of the config; used by lists of the settings in use, in
which defaults of disabled parts would hide the rest.
"""


def idle_settings(config: RunConfig, strategy: str) -> list[str]:
    """Return a sentence for each setting that differs from its default and has no effect. strategy: name, with `auto`
    resolved."""
    where = "with one worker" if strategy == "single" else f"with strategy {strategy}"
    found, acting = [], _acting(config, strategy)
    for section in dict.fromkeys(key.partition(".")[0] for key in (*USERS, *NEEDS)):
        settings = getattr(config, section)
        for name, field in type(settings).model_fields.items():
            key = f"{section}.{name}"
            if getattr(settings, name) == field.default:
                continue
            users = USERS.get(key, USERS.get(section))
            is_on, unless = NEEDS.get(key, (lambda config: True, ""))
            if users is not None and acting.isdisjoint(users):
                found.append(f"{key} has no effect {where}")
            elif not is_on(config):
                found.append(f"{key} has no effect {unless}")
    return found


def used_settings(config: RunConfig, strategy: str) -> dict[str, dict[str, Any] | Any]:
    """Return the settings that a run uses, by section as in its file: all changed ones, and defaults of enabled parts.

    strategy: name, with `auto` resolved. `config.to_dict` has all settings.
    """
    used: dict[str, Any] = {}
    for section, values in config.to_dict().items():
        settings = getattr(config, section)
        if not isinstance(settings, BaseModel):
            used[section] = values
            continue
        fields = type(settings).model_fields
        kept = {
            name: value
            for name, value in values.items()
            if getattr(settings, name) != fields[name].default or _is_used(config, section, name, strategy)
        }
        if kept:
            used[section] = kept
    return used


def _acting(config: RunConfig, strategy: str) -> set[str | None]:
    """The strategy and, if replicas train independently, the strategy that divides each replica over workers."""
    return {strategy, short_form(dict(config.parallel)) if traits_of(strategy).trains_apart else None}


def _is_used(config: RunConfig, section: str, name: str, strategy: str) -> bool:
    key = f"{section}.{name}"
    users = USERS.get(key, USERS.get(section))
    is_on, _ = NEEDS.get(key, (lambda config: True, ""))
    is_off = OFF.get(key, OFF.get(section, lambda config: False))
    return (users is None or not _acting(config, strategy).isdisjoint(users)) and is_on(config) and not is_off(config)
