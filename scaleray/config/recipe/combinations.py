"""Settings that cannot be combined, found from the config alone: each refusal with its reason.

Settings of a strategy that was not chosen are not refused but reported: see config.idle_settings. Called by
`recipe.derive`, before any worker starts. Every function here raises ConfigError.
"""

from __future__ import annotations

from scaleray.config import RunConfig
from scaleray.config.optimizer_schedule import OptimizerSettings
from scaleray.config.recipe.pipeline_bubble import suits
from scaleray.config.strategy_traits import names_with, traits_of
from scaleray.errors import ConfigError

OTHER_RULES = {
    "sgd": ({"adam"}, "use linear for sgd"),
    "lars": ({"adam"}, "use linear, sqrt or legw for lars"),
    # LAMB's step does not grow with the gradient, so nothing of the linear rule's argument is left
    "lamb": ({"adam", "linear"}, "use sqrt or legw for lamb"),
}
"""Rules that were not made for an optimizer, and what to use instead. Each is the choice of the rule's own
paper: see `lr_rules`."""
ONLY_FOR = {"nesterov": ("sgd",), "trust_coefficient": ("lars",), "adapt_vectors": ("lars", "lamb")}
"""Settings that only some optimizers have, with the names of these."""


def check_optimizer(settings: OptimizerSettings) -> None:
    """Check that the rule was made for the optimizer, and that the optimizer has all settings that were changed."""
    refused, hint = OTHER_RULES.get(settings.name, (set(), ""))
    if settings.rule in refused:
        raise ConfigError(
            "optimizer.rule",
            settings.rule,
            f"it is a rule for {'adamw' if settings.rule == 'adam' else 'sgd'}, but optimizer.name is {settings.name}",
            hint,
        )
    for key, names in ONLY_FOR.items():
        value = getattr(settings, key)
        if settings.name not in names and value != type(settings).model_fields[key].default:
            raise ConfigError(
                f"optimizer.{key}",
                value,
                f"it is for {' and '.join(names)}, but optimizer.name is {settings.name}",
                "leave it out",
            )


def check_averaging(config: RunConfig) -> None:
    """Check that there is one set of weights to average."""
    name = config.strategy.name
    if config.averaging.decay is not None and traits_of(name).trains_apart:
        raise ConfigError(
            "averaging.decay",
            config.averaging.decay,
            f"strategy.name is {name}: its workers hold different weights and average them anyway",
            "use ddp, zero1, fsdp, tensor or pipeline",
        )


def check_pruning(config: RunConfig, total_steps: int) -> None:
    """Check that pruning happens within the training, under a strategy that has one mask for all workers.
    total_steps: steps of the run."""
    settings, defaults = config.pruning, type(config.pruning)()
    idle = ["every_steps"] if settings.end_step is None else []
    if settings.method == "none":
        idle = [key for key in type(settings).model_fields if key != "method"]
    for key in idle:
        if getattr(settings, key) != getattr(defaults, key):
            missing = "pruning.method is none" if settings.method == "none" else "pruning.end_step is not given"
            raise ConfigError(
                f"pruning.{key}", getattr(settings, key), f"{missing}, so it has no effect", "leave it out"
            )
    if settings.method == "none":
        return
    reasons = {
        **dict.fromkeys(
            names_with("averages_now_and_then"), "its replicas differ between averagings, but there is one mask for all"
        ),
        **dict.fromkeys(
            names_with("mixes_with_neighbours"), "its replicas always differ, but there is one mask for all"
        ),
        "pipeline": "no worker has the weights of all stages",
    }
    name = config.strategy.name
    if name in reasons:
        raise ConfigError(
            "pruning.method", config.pruning.method, f"strategy.name is {name}: {reasons[name]}", "use ddp or fsdp"
        )
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
    """Check that adapters have layers and a strategy that supports them, and that no adapter setting is given without
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
            "fine_tuning.freeze", list(settings.freeze), "with adapters everything but them is frozen", "leave it out"
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


def check_training_apart(config: RunConfig) -> None:
    """Check that nothing is asked of replicas that train apart which they cannot do: share a loss scale, change their
    number, or compress gradients."""
    name = config.strategy.name
    if not traits_of(name).trains_apart or config.scale.max_workers == 1:  # one worker has nobody to part from
        return
    if config.precision.dtype == "fp16":
        raise ConfigError(
            "precision.dtype",
            "fp16",
            f"workers need a common loss scale in every step, but under {name} they rarely communicate",
            "use bf16, whose range needs no scale",
        )
    if config.scale.is_elastic:
        raise ConfigError(
            "scale.workers",
            str(config.scale.workers),
            f"under {name} another number of workers changes the training",
            "give one number; a run can be resumed on another, where it continues from the mean of its replicas",
        )
    if config.compression.name != "none":
        raise ConfigError(
            "compression.name",
            config.compression.name,
            f"it compresses gradients of ddp, but {name} sends parameters",
            "leave it out, or use --strategy.name ddp",
        )


def check_compression(config: RunConfig, strategy: str) -> None:
    """Check that there are gradients to compress, sent by DDP. strategy: name with `auto` decided."""
    name = config.compression.name
    if name == "none":
        return
    if config.scale.max_workers == 1:
        raise ConfigError(
            "compression.name", name, "one worker sends no gradients", "leave it out, or use more --scale.workers"
        )
    # an elastic run may come down to a single worker for a while
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
            "it chooses by measured times, so runs differ, but deterministic is true",
            "name one method, such as int8",
        )


def check_fsdp(config: RunConfig, workers: int) -> None:
    """Check that workers share out the state, and that offloading has a GPU to offload from."""
    degrees = config.degrees(workers)
    if degrees.shard == 1 < workers:
        near = [n for n in range(1, workers) if workers % n == 0]
        raise ConfigError(
            "parallel.replicate",
            degrees.replicate,
            f"{workers} workers would each hold everything",
            f"there is {', '.join(map(str, near))}; strategy.name ddp holds everything",
        )
    if config.fsdp.cpu_offload and not config.scale.may_have_gpus:
        raise ConfigError(
            "fsdp.cpu_offload",
            True,
            "the workers have no GPU to offload from",
            "leave it out, or set scale.gpus_per_worker",
        )


def check_shard_dtypes(config: RunConfig) -> None:
    """Check that the dtypes of what is gathered and reduced go with the precision."""
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
            "set scale.gpus_per_worker, or precision.emulate_float8 to see its effect on a training",
        )


def check_schedule(config: RunConfig, accumulation: int) -> None:
    """Check that the schedule can order the micro-batches of a full step. accumulation: their number."""
    schedule, workers = config.pipeline.schedule, config.degrees().pipeline
    if suits(schedule, num_workers=workers, num_micro_batches=accumulation):
        return
    raise ConfigError(
        "batch.micro_size",
        config.batch.micro_size,
        f"a step has {accumulation} micro-batches, and {schedule} on {workers} workers "
        f"orders them in {accumulation // workers} equal rounds",
        f"choose one that gives a multiple of {workers} micro-batches, or the schedule 1f1b",
    )


def check_search(config: RunConfig) -> None:
    """Refuse a search for a micro-batch on CPUs without a limit, which is known once `auto` has become a number."""
    if config.memory.find_micro_size and config.memory.limit_gib is None and not config.scale.may_have_gpus:
        raise ConfigError(
            "memory.find_micro_size",
            True,
            "CPU workers share memory, so it needs memory.limit_gib",
            "for example --memory.limit-gib 4",
        )


def check_tf32(config: RunConfig) -> None:
    """Refuse a mode of GPUs where there are none, or where nothing is computed in fp32."""
    is_fp64 = config.precision.dtype == "fp64"
    if config.precision.tf32 and (is_fp64 or not config.scale.may_have_gpus):
        raise ConfigError(
            "precision.tf32",
            True,
            "it has no effect on float64" if is_fp64 else "it applies to GPUs, and the workers have none",
            "leave it out",
        )


def check_cuda_graphs(config: RunConfig, accumulation: int) -> None:
    """Refuse to accumulate gradients that lie in the memory of a CUDA graph: its next replay writes over them."""
    has_graphs = config.compilation.what != "nothing" and config.compilation.mode != "default"
    if has_graphs and config.scale.gpus and accumulation > 1:
        raise ConfigError(
            "compilation.mode",
            config.compilation.mode,
            f"its CUDA graphs overwrite the gradients of the previous micro-batch, but a step has {accumulation}",
            "use compilation.mode default, or a batch.micro_size with one micro-batch a step",
        )


def check_static_graph(config: RunConfig, strategy: str, *, accumulation: int, per_worker: int) -> None:
    """Refuse accumulation under torch's static graph. per_worker: samples of a worker's step."""
    if traits_of(strategy).reduces_by_ddp and config.strategy.static_graph and accumulation > 1:
        # torch 2.13 fails an assertion, and without it would stop reducing: github.com/pytorch/pytorch/pull/187732
        raise ConfigError(
            "strategy.static_graph",
            True,
            f"torch's static graph cannot accumulate, but each worker's step has {accumulation} micro-batches",
            f"leave it out, or use --batch.micro-size {per_worker}",
        )
