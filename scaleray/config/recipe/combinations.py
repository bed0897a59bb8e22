"""Checks for settings that cannot be combined, from the config alone; each error states the reason.

Settings of a strategy that is not used are not rejected but reported: see config.idle_settings. Called by
`recipe.derive`, before any worker starts. Every function here raises ConfigError.
"""

from scaleray.config import RunConfig
from scaleray.config.optimizer_schedule import OptimizerSettings
from scaleray.config.recipe.pipeline_bubble import suits
from scaleray.config.strategy_traits import names_with, traits_of
from scaleray.errors import ConfigError

OTHER_RULES = {
    "sgd": ({"adam"}, "use linear for sgd"),
    "lars": ({"adam"}, "use linear, sqrt or legw for lars"),
    # LAMB's step does not grow with the gradient, so the argument for the linear rule does not apply
    "lamb": ({"adam", "linear"}, "use sqrt or legw for lamb"),
}
"""Rules that do not suit an optimizer, and what to use instead, according to the rule's own paper: see `lr_rules`."""
ONLY_FOR = {"nesterov": ("sgd",), "trust_coefficient": ("lars",), "adapt_vectors": ("lars", "lamb")}
"""Settings supported by only some optimizers, with the names of these."""


def check_optimizer(settings: OptimizerSettings) -> None:
    """Check that the rule and all changed settings suit the optimizer."""
    refused, hint = OTHER_RULES.get(settings.name, (set(), ""))
    if settings.rule in refused:
        raise ConfigError(
            "optimizer.rule",
            settings.rule,
            f"it is a rule for {'adamw' if settings.rule == 'adam' else 'sgd'}, and optimizer.name is {settings.name}",
            hint,
        )
    for key, names in ONLY_FOR.items():
        value = getattr(settings, key)
        if settings.name not in names and value != type(settings).model_fields[key].default:
            raise ConfigError(
                f"optimizer.{key}",
                value,
                f"it is for {' and '.join(names)}, and optimizer.name is {settings.name}",
                "leave it out",
            )


def check_averaging(config: RunConfig) -> None:
    """Check that there is a single set of weights to average."""
    name = config.strategy.name
    if config.averaging.decay is not None and traits_of(name).trains_apart:
        raise ConfigError(
            "averaging.decay",
            config.averaging.decay,
            f"the workers of {name} hold different weights and average them anyway",
            "use ddp, zero1, fsdp, tensor or pipeline",
        )


def check_pruning(config: RunConfig, total_steps: int) -> None:
    """Check that pruning happens within the training, and that one mask serves all workers. total_steps: steps of the
    run."""
    settings, defaults = config.pruning, type(config.pruning)()
    idle = ["every_steps"] if settings.end_step is None else []
    if settings.method == "none":
        idle = [key for key in type(settings).model_fields if key != "method"]
    for key in idle:
        if getattr(settings, key) != getattr(defaults, key):
            missing = "pruning.method is none" if settings.method == "none" else "pruning.end_step is not set"
            raise ConfigError(
                f"pruning.{key}", getattr(settings, key), f"{missing}, so it has no effect", "leave it out"
            )
    if settings.method == "none":
        return
    reasons = {
        **dict.fromkeys(
            names_with("averages_now_and_then"), "replicas differ between averagings, and all must share one mask"
        ),
        **dict.fromkeys(names_with("mixes_with_neighbours"), "replicas always differ, and all must share one mask"),
        "pipeline": "no worker has the weights of all stages",
    }
    name = config.strategy.name
    if name in reasons:
        raise ConfigError("pruning.method", config.pruning.method, f"under {name} {reasons[name]}", "use ddp or fsdp")
    for key in ("start_step", "end_step"):
        step = getattr(config.pruning, key)
        if step is not None and step > total_steps - 1:
            raise ConfigError(
                f"pruning.{key}",
                step,
                f"the whole training has {total_steps} steps, and the remaining weights must adapt",
                "prune earlier, or lengthen stop.after",
            )


def check_fine_tuning(config: RunConfig) -> None:
    """Check that adapters have layers and a suitable strategy, and that adapter settings are not used without
    adapters."""
    settings, defaults = config.fine_tuning, type(config.fine_tuning)()
    if settings.lora_rank == 0:
        for key in ("lora_alpha", "lora_layers", "trained_whole", "merge"):
            if getattr(settings, key) != getattr(defaults, key):
                raise ConfigError(
                    f"fine_tuning.{key}",
                    getattr(settings, key),
                    "without adapters it has no effect",
                    "set --fine-tuning.lora-rank",
                )
        return
    if settings.freeze:
        raise ConfigError(
            "fine_tuning.freeze", list(settings.freeze), "adapters already freeze everything else", "leave it out"
        )
    if not settings.lora_layers:
        raise ConfigError("fine_tuning.lora_layers", [], "adapters need layers", "for example [query, value]")
    if config.degrees().tensor > 1:
        raise ConfigError(
            "fine_tuning.lora_rank",
            settings.lora_rank,
            "tensor parallelism does not support adapters",
            "use ddp or fsdp",
        )


def is_whole(config: RunConfig, strategy: str, workers: int) -> bool:
    """Whether each worker has the whole state of the training, so that any of them can pass it on to a spare."""
    return (
        strategy in ("ddp", "single") and config.degrees(workers).data == workers and config.compression.name == "none"
    )


def check_recovery(config: RunConfig, strategy: str, workers: int) -> None:
    """Check that another worker can get the state of any worker, and that the others can continue without it."""
    settings = config.recovery
    if not settings.is_on:
        return
    key, value = ("recovery.spares", settings.spares) if settings.spares else ("recovery.on_loss", settings.on_loss)
    shrinks, degrees = settings.on_loss == "shrink", config.degrees(workers)
    reasons = {
        "no other worker could notice the loss of a single one": config.scale.max_workers == 1,
        "it is for a fixed number of workers": config.scale.is_elastic,
        "shares.by speed depends on measured times": config.shares.by == "speed",
        "memory.on_out_of_memory halve repeats steps as well": config.memory.on_out_of_memory == "halve",
        "with recovery.on_loss shrink, shares.speeds would have no worker": shrinks and config.shares.by == "given",
        f"with recovery.on_loss shrink, {degrees.text()} needs a fixed number of workers": shrinks
        and (degrees.model > 1 or (degrees.replicate > 1 and degrees.shard > 1)),
        f"under {strategy} another number of workers changes the training": shrinks
        and traits_of(strategy).trains_apart,
    }
    if (why := next((why for why, holds in reasons.items() if holds), None)) is not None:
        raise ConfigError(key, value, why, "omit it, or use neither spares nor shrink")
    if config.checkpoint.memory is None and not is_whole(config, strategy, workers):
        owner = f"under {strategy}" if config.compression.name == "none" else "with compression.name"
        raise ConfigError(
            key,
            value,
            f"{owner} each worker has a part of the state, which is lost with the worker",
            "add --checkpoint.memory.every '1 step', which stores copies of it on other nodes, or use no spares",
        )


def check_training_apart(config: RunConfig) -> None:
    """Check the limits of replicas that train separately: no shared loss scale, no change of their number, no gradient
    compression."""
    name = config.strategy.name
    if not traits_of(name).trains_apart or config.scale.max_workers == 1:  # a single worker has no other replicas
        return
    if config.precision.dtype == "fp16":
        raise ConfigError(
            "precision.dtype",
            "fp16",
            f"workers need a common loss scale in every step, and under {name} they rarely communicate",
            "use bf16, whose range needs no scale",
        )
    if config.scale.is_elastic:
        raise ConfigError(
            "scale.workers",
            str(config.scale.workers),
            f"under {name} a different number of workers changes the training",
            "give one number; a run can be resumed with another, from the mean of its replicas",
        )
    if config.compression.name != "none":
        raise ConfigError(
            "compression.name",
            config.compression.name,
            f"it compresses the gradients of ddp, and {name} sends parameters",
            "omit it, or use --strategy.name ddp",
        )
    degrees = config.degrees()
    if degrees.whole == 1:
        return
    if degrees.replicate == 1:
        raise ConfigError(
            "parallel.replicate",
            1,
            f"{name} averages several replicas, but all workers together have a single replica",
            "use --strategy.name fsdp, or more replicas",
        )
    if config.local_sgd.node_sync_every is not None:
        raise ConfigError(
            "local_sgd.node_sync_every",
            config.local_sgd.node_sync_every,
            f"each replica is spread over several workers ({degrees.text()}), which are the level within a node",
            "omit it, or give each worker a whole replica",
        )
    if config.fsdp.cpu_offload:
        raise ConfigError(
            "fsdp.cpu_offload", True, f"{name} averages parameters where they are computed", "leave it out"
        )


def check_compression(config: RunConfig, strategy: str) -> None:
    """Check that DDP sends gradients to compress. strategy: name, with `auto` resolved."""
    name = config.compression.name
    if name == "none":
        return
    if config.scale.max_workers == 1:
        raise ConfigError(
            "compression.name", name, "one worker sends no gradients", "omit it, or use more --scale.workers"
        )
    # an elastic run may temporarily shrink to one worker
    if strategy != "single" and not traits_of(strategy).reduces_by_ddp:
        raise ConfigError(
            "compression.name",
            name,
            f"it is a hook of DDP, and the strategy is {strategy}",
            "use --strategy.name ddp, or compression.name none",
        )
    if name == "adaptive" and config.deterministic:
        raise ConfigError(
            "compression.name",
            name,
            "it chooses by measured times, so runs differ, and deterministic is true",
            "choose one method, such as int8",
        )


def check_fsdp(config: RunConfig, workers: int) -> None:
    """Check that the state is sharded over workers, and that offloading has a GPU to offload from."""
    degrees = config.degrees(workers)
    if degrees.shard * degrees.context == 1 < workers:
        near = [n for n in range(1, workers) if workers % n == 0]
        raise ConfigError(
            "parallel.replicate",
            degrees.replicate,
            f"{workers} workers would each hold the whole state, so nothing is sharded",
            f"use {' or '.join(map(str, near))}, or strategy.name ddp for whole replicas",
        )
    if config.fsdp.cpu_offload and not config.scale.may_have_gpus:
        raise ConfigError(
            "fsdp.cpu_offload", True, "the workers have no GPU to offload from", "omit it, or set scale.gpus_per_worker"
        )


def check_shard_dtypes(config: RunConfig) -> None:
    """Check that the dtypes of gathering and reducing suit the precision."""
    precision = config.precision.dtype
    for key in ("parameter_dtype", "reduce_dtype"):
        dtype = getattr(config.fsdp, key)
        if dtype == "fp16" and precision != "fp16":
            raise ConfigError(
                f"fsdp.{key}",
                dtype,
                f"gradients in it underflow without loss scaling, and precision.dtype is {precision}",
                "use bf16, or --precision.dtype fp16",
            )
        if dtype is not None and precision == "fp64":
            raise ConfigError(
                f"fsdp.{key}", dtype, "precision.dtype fp64 computes in float64 throughout", "leave it out"
            )


def check_float8(config: RunConfig) -> None:
    settings = config.precision
    if settings.float8 == "none":
        return
    if config.degrees().tensor > 1:
        raise ConfigError(
            "precision.float8",
            settings.float8,
            "tensor parallelism does not support float8",
            "use fsdp, or float8 none",
        )
    if not config.scale.may_have_gpus and not settings.emulate_float8:
        raise ConfigError(
            "precision.float8",
            settings.float8,
            "the workers have no GPU, and CPUs have no float8 arithmetic",
            "set scale.gpus_per_worker, or precision.emulate_float8 to study its effect",
        )


def check_context(config: RunConfig, workers: int) -> None:
    """Check that workers that share sequences compute in the same way."""
    if config.degrees(workers).context == 1:
        return
    for key, value, allowed, why in (
        ("shares.by", config.shares.by, "equal", "its workers have the same samples"),
        ("compilation.what", config.compilation.what, "nothing", "compiled graphs do not exchange tokens"),
    ):
        if value != allowed:
            raise ConfigError(key, value, f"under parallel.context it must be {allowed}: {why}", "leave it out")


def check_schedule(config: RunConfig, accumulation: int) -> None:
    """Check that the schedule supports the micro-batches of a full step. accumulation: their number."""
    schedule, workers = config.pipeline.schedule, config.degrees().pipeline
    if suits(schedule, num_workers=workers, num_micro_batches=accumulation):
        return
    raise ConfigError(
        "batch.micro_size",
        config.batch.micro_size,
        f"a step has {accumulation} micro-batches, and {schedule} on {workers} workers "
        f"orders them in {accumulation // workers} equal rounds",
        f"choose a size that gives a multiple of {workers} micro-batches, or the schedule 1f1b",
    )


def check_search(config: RunConfig) -> None:
    """Reject a search for a micro-batch on CPUs without a limit, once `auto` has been resolved to a number of GPUs."""
    if config.memory.find_micro_size and config.memory.limit_gib is None and not config.scale.may_have_gpus:
        raise ConfigError(
            "memory.find_micro_size",
            True,
            "CPU workers share memory, so it needs memory.limit_gib",
            "for example --memory.limit-gib 4",
        )


def check_tf32(config: RunConfig) -> None:
    """Reject TF32 without GPUs, or without computation in fp32."""
    is_fp64 = config.precision.dtype == "fp64"
    if config.precision.tf32 and (is_fp64 or not config.scale.may_have_gpus):
        raise ConfigError(
            "precision.tf32",
            True,
            "it has no effect on float64" if is_fp64 else "it applies to GPUs, and the workers have none",
            "leave it out",
        )


def check_cuda_graphs(config: RunConfig, accumulation: int) -> None:
    """Reject accumulation of gradients in the memory of a CUDA graph, which its next replay overwrites."""
    has_graphs = config.compilation.what != "nothing" and config.compilation.mode != "default"
    if has_graphs and config.scale.gpus and accumulation > 1:
        raise ConfigError(
            "compilation.mode",
            config.compilation.mode,
            f"its CUDA graphs overwrite the gradients of the previous micro-batch, and a step has {accumulation} "
            "micro-batches",
            "use compilation.mode default, or a batch.micro_size with one micro-batch per step",
        )


def check_static_graph(config: RunConfig, strategy: str, *, accumulation: int, per_worker: int) -> None:
    """Reject accumulation under torch's static graph. per_worker: samples of a worker's step."""
    if traits_of(strategy).reduces_by_ddp and config.strategy.static_graph and accumulation > 1:
        # torch 2.13 fails an assertion; without it, it would stop reducing: github.com/pytorch/pytorch/pull/187732
        raise ConfigError(
            "strategy.static_graph",
            True,
            f"torch's static graph cannot accumulate, and each worker's step has {accumulation} micro-batches",
            f"omit it, or use --batch.micro-size {per_worker}",
        )
