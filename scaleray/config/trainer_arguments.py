"""Config values from `TrainingArguments` of transformers' Trainer, and the arguments that have no equivalent.

`synonyms.py` has the names of keys in other libraries; this module converts their values.
"""

import math
from collections.abc import Mapping
from typing import Any

from scaleray.config.loading import known_keys
from scaleray.config.synonyms import KEYS
from scaleray.errors import ConfigError

Arguments = Mapping[str, Any]
SAME = ("learning_rate", "weight_decay", "adam_epsilon", "seed", "run_name", "dataloader_drop_last", "output_dir",
        "tf32", "full_determinism", "per_device_eval_batch_size", "auto_find_batch_size")  # fmt: skip
"""Arguments whose value is used unchanged for the key."""
INSTEAD: dict[str, str] = {
    "data_seed": "seed also determines the order of rows",
    "deepspeed": "strategy.name: fsdp or zero1",
    "eval_delay": "only evaluation.every is used",
    "fsdp_config": "the section fsdp, such as fsdp.wrap_classes",
    "generation_max_length": "workload.args.target_length of SequenceToSequence",
    "generation_num_beams": "workload.args.num_beams of SequenceToSequence",
    "activation_checkpointing_kwargs": "activations.every, or activations.checkpointing: selective",
    "gradient_checkpointing_kwargs": "activations.every, or activations.checkpointing: selective",
    "label_smoothing_factor": "a loss() of your own with F.cross_entropy(..., label_smoothing=...)",
    "lr_scheduler_kwargs": "schedule.length and schedule.final_ratio, or a schedule() of your own",
    "neftune_noise_alpha": "a loss() of your own that adds the noise to the embeddings",
    "optim_args": "an optimizer() of your own",
    "optim_target_modules": "an optimizer() of your own",
    "parallelism_config": "the degrees of `parallel`, such as parallel.tensor",
    "predict_with_generate": "workload.args.generated_rows of SequenceToSequence",
    "push_to_hub": "scaleray export RUN --out FOLDER, and upload the folder",
    "resume_from_checkpoint": "scaleray train --resume RUN",
    "torch_compile_backend": "compilation.backend",
    "torch_compile_mode": "compilation.mode",
    "use_liger_kernel": "patch the model in a build_model() of your own",
}
"""What to do instead of an argument that has no equivalent."""
IDLE = ("accelerator_config", "average_tokens_across_devices", "dataloader_num_workers",
        "dataloader_persistent_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "ddp_backend",
        "ddp_timeout", "disable_tqdm", "do_eval", "do_predict", "do_train", "eval_on_start", "hub_token", "label_names",
        "length_column_name", "local_rank", "log_level", "log_level_replica", "log_on_each_node",
        "logging_dir", "logging_first_step", "logging_nan_inf_filter", "overwrite_output_dir",
        "remove_unused_columns", "report_to", "save_on_each_node", "save_only_model", "skip_memory_metrics",
        "trackio_space_id", "use_cache")  # fmt: skip
"""Arguments that have no meaning for a training in scaleray."""
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
             "reduce_lr_on_plateau": "plateau"}  # fmt: skip
OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "sgd": "sgd"}
VALIDATION = "val"
"""Split for a Trainer's `eval_` metrics."""


def config_of(arguments: Any, *, workers: int, defaults: Arguments) -> tuple[dict[str, Any], list[str]]:
    """Return equivalent values by dotted key, and a line for each argument that has no equivalent.

    arguments: `TrainingArguments`, as a mapping or the object itself. workers: number of training workers. defaults:
    values of arguments that are not stated. Raises ConfigError.
    """
    stated = arguments.to_dict() if hasattr(arguments, "to_dict") else arguments
    if not isinstance(stated, Mapping) or not stated.keys() & defaults.keys():
        raise ConfigError("--arguments", type(stated).__name__, "it must contain TrainingArguments as JSON",
                          "Path('arguments.json').write_text(args.to_json_string()) writes them")  # fmt: skip
    given = {name: getattr(value, "value", value) for name, value in {**defaults, **stated}.items()}
    values: dict[str, Any] = {"batch.micro_size": given["per_device_train_batch_size"]}
    values["batch.global_size"] = values["batch.micro_size"] * given["gradient_accumulation_steps"] * workers
    values |= {_key_of(name): given[name] for name in SAME if given.get(name) not in (None, False)}
    left: list[str] = []
    for convert in (_length, _schedule, _optimizer, _precision, _evaluation, _checkpoints, _memory):
        more, lines = convert(given)
        values.update(more)
        left += lines
    taken = {name for convert in TAKEN.values() for name in convert} | {*SAME, *IDLE}
    for name in sorted(stated.keys() - taken):
        value, default = given[name], getattr(defaults.get(name), "value", defaults.get(name))
        if value not in (default, None, False, "") and value not in ([], {}):
            left.append(f"{name}: {value}: {INSTEAD.get(name, 'scaleray has no equivalent')}")
    return values, left


def _length(given: Arguments) -> tuple[dict[str, Any], list[str]]:
    steps, epochs = given["max_steps"], given["num_train_epochs"]
    warmup = given.get("warmup_ratio") or given["warmup_steps"] or 0
    values = {"stop.after": f"{steps} steps" if steps > 0 else _epochs(epochs)}
    if warmup >= 1:
        values["schedule.warmup"] = f"{math.ceil(warmup)} steps"
    elif warmup:  # a share of the training
        values["schedule.warmup"] = f"{math.ceil(warmup * steps)} steps" if steps > 0 else _epochs(warmup * epochs)
    return values, []


def _epochs(number: float) -> str:
    return f"{number:g} epoch{'s' if number != 1 else ''}"


def _schedule(given: Arguments) -> tuple[dict[str, Any], list[str]]:
    name = given["lr_scheduler_type"]
    if name not in SCHEDULES:
        return {}, [f"lr_scheduler_type: {name}: a schedule(optimizer, recipe) of your own in the workload"]
    values: dict[str, Any] = {"schedule.name": SCHEDULES[name]}
    return (values if name != "constant" else {**values, "schedule.warmup": "0 steps"}), []


def _optimizer(given: Arguments) -> tuple[dict[str, Any], list[str]]:
    name, left = given["optim"], []
    values: dict[str, Any] = {"optimizer.clip_norm": given["max_grad_norm"] or None}
    if name in OPTIMIZERS:
        values["optimizer.name"] = OPTIMIZERS[name]
    else:
        left.append(f"optim: {name}: an optimizer(model, settings) of your own in the workload")
    if values.get("optimizer.name") == "sgd":
        values["optimizer.momentum"] = 0.0
    else:
        values["optimizer.betas"] = [given["adam_beta1"], given["adam_beta2"]]
    if given["weight_decay"]:
        left.append(
            f"weight_decay: {given['weight_decay']}: it applies to all parameters; the Trainer excludes biases and "
            f"norms, which needs an optimizer(model, settings) in the workload"
        )
    return values, left


def _precision(given: Arguments) -> tuple[dict[str, Any], list[str]]:
    return {"precision.dtype": "bf16" if given["bf16"] else "fp16" if given["fp16"] else "fp32"}, []


def _every(strategy: str, steps: Any, given: Arguments) -> str | None:
    """An interval as written in the config. steps: a number, or below 1 a share of the training."""
    if strategy == "epoch":
        return "1 epoch"
    if strategy != "steps":
        return None
    if steps >= 1:
        return f"{int(steps)} steps"
    if given["max_steps"] > 0:
        return f"{math.ceil(given['max_steps'] * steps)} steps"
    return _epochs(given["num_train_epochs"] * steps)


def _evaluation(given: Arguments) -> tuple[dict[str, Any], list[str]]:
    steps = given["eval_steps"] or given["logging_steps"]
    values: dict[str, Any] = {"evaluation.every": _every(given["eval_strategy"], steps, given)}
    if given["logging_strategy"] == "steps" and given["logging_steps"] >= 1:
        values["tracking.every_steps"] = int(given["logging_steps"])
    return values, []


def _checkpoints(given: Arguments) -> tuple[dict[str, Any], list[str]]:
    strategy, values = given["save_strategy"], dict[str, Any]()
    if strategy == "best":
        values["checkpoint.every"] = _evaluation(given)[0]["evaluation.every"]
    else:
        values["checkpoint.every"] = _every(strategy, given["save_steps"], given)
    if values["checkpoint.every"] and given["save_total_limit"]:
        values["checkpoint.keep_last"] = given["save_total_limit"]
    if given["load_best_model_at_end"] or strategy == "best":
        metric = (given["metric_for_best_model"] or "loss").removeprefix("eval_")
        is_greater = given["greater_is_better"]
        is_greater = not metric.endswith("loss") if is_greater is None else is_greater
        values["checkpoint.best"] = f"{VALIDATION}/{metric} {'max' if is_greater else 'min'}"
    return values, []


def _memory(given: Arguments) -> tuple[dict[str, Any], list[str]]:
    values: dict[str, Any] = {}
    if given["gradient_checkpointing"] or given.get("activation_checkpointing"):
        values["activations.checkpointing"] = "full"
    if given["torch_compile"]:
        values["compilation.what"] = "blocks"
    fsdp = given["fsdp"] or ""
    if fsdp:
        words = fsdp.split() if isinstance(fsdp, str) else list(fsdp) if isinstance(fsdp, (list, tuple)) else []
        values |= {"strategy.name": "fsdp", **({"fsdp.cpu_offload": True} if "offload" in words else {})}
    if given.get("group_by_length") or given.get("train_sampling_strategy") == "group_by_length":
        values["data.bucket_by_length"] = 50
    if given["use_cpu"]:
        values["scale.gpus_per_worker"] = 0
    return values, []


TAKEN: dict[str, tuple[str, ...]] = {
    "batch": ("per_device_train_batch_size", "gradient_accumulation_steps"),
    "stop.after, schedule.warmup": ("max_steps", "num_train_epochs", "warmup_steps", "warmup_ratio"),
    "schedule.name": ("lr_scheduler_type",),
    "optimizer": ("optim", "adam_beta1", "adam_beta2", "max_grad_norm"),
    "precision.dtype": ("bf16", "fp16"),
    "evaluation.every": ("eval_strategy", "eval_steps"),
    "tracking.every_steps": ("logging_strategy", "logging_steps"),
    "checkpoint": ("save_strategy", "save_steps", "save_total_limit", "load_best_model_at_end", "metric_for_best_model",
                   "greater_is_better"),
    "activations.checkpointing": ("gradient_checkpointing", "activation_checkpointing"),
    "compilation.what": ("torch_compile",),
    "strategy.name": ("fsdp",),
    "data.bucket_by_length": ("group_by_length", "train_sampling_strategy"),
    "scale.gpus_per_worker": ("use_cpu",),
}  # fmt: skip
"""Arguments whose values are converted, by the keys or sections that they determine."""


def _key_of(name: str) -> str:
    """Return the key for an argument of another library, or the key of the same name."""
    return KEYS.get(name) or next(key for key in known_keys() if key.rpartition(".")[2] == name)
