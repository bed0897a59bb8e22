"""Lightning callbacks: some become config settings, hooks of user-defined callbacks are called, and others are refused
by name at the start."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scaleray.common.user_code import place_of
from scaleray.config import Duration, RunConfig
from scaleray.config.base import Target
from scaleray.config.brought import Brought
from scaleray.errors import WorkloadError
from scaleray.lightning.hooks_refused import PACKAGES, REFUSED_OF_MODULE, is_overridden, lightning_base
from scaleray.lightning.logs import SHORT_NAMES, evaluated_name

EVERY = "evaluation.every"
EACH_EPOCH = Duration(1, "epochs")
HOOKS = (
    "setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start",
    "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end",
    *(f"on_{kind}_{when}" for kind in ("validation", "test")
      for when in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")),
)  # fmt: skip
"""Hooks of a callback that are called."""
REFUSED_HOOKS = {
    **{
        name: REFUSED_OF_MODULE[name]
        for name in ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
    },
    "on_save_checkpoint": ("checkpoints are scaleray's own", "give its state in state_dict() and load_state_dict()"),
    "on_load_checkpoint": ("checkpoints are scaleray's own", "give its state in state_dict() and load_state_dict()"),
    "on_exception": ("an error ends the run and is in its record", "use --alerts.command to be notified"),
}
"""Unsupported hooks of a callback: reason and alternative."""
Settings = Mapping[str, Any]


def _early_stopping(callback: Any, config: RunConfig) -> Settings:
    metric = _metric(callback)
    found = {"stop.patience": max(1, callback.patience), "stop.watch": f"{metric} {callback.mode}", EVERY: EACH_EPOCH}
    if callback.stopping_threshold is not None:
        comparison = "<=" if callback.mode == "min" else ">="
        found["stop.at"] = Target(metric, comparison, float(callback.stopping_threshold))
    return found


def _model_checkpoint(callback: Any, config: RunConfig) -> Settings:
    steps, epochs, minutes = callback._every_n_train_steps, callback._every_n_epochs, callback._train_time_interval
    distance = Duration(steps, "steps") if steps else Duration(epochs, "epochs") if epochs else None
    found: dict[str, Any] = {}
    if callback.save_top_k == 0:
        return found
    if minutes is not None:
        found["checkpoint.every_minutes"] = minutes.total_seconds() / 60
    if callback.save_top_k < 0 and distance is None:
        allowed = "permanent checkpoints have an interval in steps or epochs"
        raise _refused_option(callback, "save_top_k", -1, allowed, "give every_n_epochs, or a number to keep")
    if callback.save_top_k < 0:
        found.update({"checkpoint.every": distance, "checkpoint.keep_every": distance})
    if callback.monitor is None:
        return {**({} if distance is None else {"checkpoint.every": distance}), **found}
    if callback.save_top_k > 0 and distance != EACH_EPOCH:
        option = "every_n_train_steps" if steps else "every_n_epochs" if epochs else "train_time_interval"
        allowed = "checkpoint.best uses each evaluation (evaluation.every)"
        raise _refused_option(callback, option, getattr(callback, f"_{option}"), allowed, "leave it out")
    best = {"checkpoint.best": f"{_metric(callback)} {callback.mode}", EVERY: EACH_EPOCH}
    return {**found, **best, **({"checkpoint.keep_best": callback.save_top_k} if callback.save_top_k > 0 else {})}


def _accumulation(callback: Any, config: RunConfig) -> Settings:
    numbers = set(callback.scheduling.values())
    if len(numbers) > 1:
        allowed = "a step has batch.global_size rows in the whole training"
        hint = "use a constant number of batches, or train twice, the second time from the first run: "
        "--workload.weights RUN"
        raise _refused_option(callback, "scheduling", callback.scheduling, allowed, hint)
    (number,) = numbers
    replicas = config.degrees().data
    return {} if number == 1 else {"batch.micro_size": math.ceil(config.batch.global_size / (number * replicas))}


def _nothing(callback: Any, config: RunConfig) -> Settings:
    return {}


@dataclass(frozen=True)
class Translation:
    """A Lightning callback that becomes settings. becomes: the settings, as text. refused: options without an
    equivalent, with allowed value, reason and remedy. idle: options without an effect."""

    settings: Callable[[Any, RunConfig], Settings]
    becomes: str
    refused: Mapping[str, tuple[Any, str, str]] = field(default_factory=dict)
    idle: str = ""


TRANSLATED = {
    "EarlyStopping": Translation(
        _early_stopping,
        "`stop.patience`, `stop.watch`; `stopping_threshold`: `stop.at`",
        {
            "min_delta": (0.0, "every improvement counts", "leave it out"),
            "divergence_threshold": (None, "scaleray has no such limit", "set self.trainer.should_stop in a hook"),
        },
        "`strict`, `check_finite` (a NaN is no improvement, and `on_nonfinite` looks at the training loss)",
    ),
    "ModelCheckpoint": Translation(
        _model_checkpoint,
        "`checkpoint.best`, `checkpoint.keep_best`; without a monitor `checkpoint.every`; `train_time_interval`: "
        "`checkpoint.every_minutes`; `save_top_k=-1`: `checkpoint.keep_every`",
        idle="`dirpath`, `filename`, `save_last`, `save_weights_only`: the run's folder has whole states, the newest "
        "among them",
    ),
    "LearningRateMonitor": Translation(
        _nothing,
        "nothing: `train/learning_rate`, of the first group, is recorded anyway",
        {
            "log_momentum": (False, "the learning rate alone is recorded", "log it with self.log in training_step"),
            "log_weight_decay": (False, "the learning rate alone is recorded", "log it with self.log in training_step"),
        },
        "`logging_interval` (`tracking.every_steps`)",
    ),
    "GradientAccumulationScheduler": Translation(
        _accumulation,
        "`batch.micro_size`: `batch.global_size` through the workers and the number, which must be the same in all "
        "epochs",
    ),
}
"""Lightning callbacks that are translated, by class."""
LEFT_OUT = ("TQDMProgressBar", "RichProgressBar", "ModelSummary", "RichModelSummary")
"""Lightning callbacks that only show what scaleray also shows, by class."""
REFUSED = {
    "StochasticWeightAveraging": "use averaging.decay: evaluations and the final weights then use an average",
    "WeightAveraging": "use averaging.decay",
    "EMAWeightAveraging": "use averaging.decay and averaging.every",
    "BackboneFinetuning": "use fine_tuning.freeze, and a second run from the weights of the first",
    "BaseFinetuning": "use fine_tuning.freeze, and a second run from the weights of the first",
    "BasePredictionWriter": "use scaleray predict",
    "BatchSizeFinder": "use memory.find_micro_size",
    "DeviceStatsMonitor": "omit it: tracking.system_metrics records the devices",
    "LearningRateFinder": "use scaleray sweep",
    "ModelPruning": "use the section pruning",
    "OnExceptionCheckpoint": "use checkpoint.every or checkpoint.every_minutes",
    "SpikeDetection": "use on_nonfinite, and the rules of alerts",
    "ThroughputMonitor": "omit it: train/samples_per_s is recorded",
    "Timer": "use stop.after",
}
"""Refused Lightning callbacks by class, and the remedy."""


def check_callbacks(callbacks: Any) -> None:
    """Raise WorkloadError for callbacks that cannot be called, by name."""
    if not isinstance(callbacks, Sequence):
        found = type(callbacks).__name__
        raise WorkloadError("callbacks of as_workload()", found, "it must be a list of Lightning callbacks")
    for callback in callbacks:
        _check(callback)


def _check(callback: Any) -> None:
    cls = type(callback)
    if lightning_base(cls, "Callback") is None:
        found = callback.__name__ if isinstance(callback, type) else cls.__name__
        hint = "return scaleray's callbacks from the workload's callbacks()"
        raise WorkloadError("a callback of as_workload()", found, "it must be a Lightning Callback", hint)
    known = next((name for name in (*TRANSLATED, *LEFT_OUT, *REFUSED) if lightning_base(cls, name) is not None), None)
    if known in REFUSED:
        raise WorkloadError.problem(
            f"the callback {cls.__name__}", "is not supported in scaleray's loop", REFUSED[known]
        )
    if known in LEFT_OUT:
        return
    if known is not None:
        if cls.__module__.partition(".")[0] not in PACKAGES:
            hint = f"use {known} itself, or derive from Callback"
            raise WorkloadError.problem(
                place_of(cls), f"derives from {known}, which settings replace, so its own code would not run", hint
            )
        for option, (allowed_value, why, hint) in TRANSLATED[known].refused.items():
            if (value := getattr(callback, option)) != allowed_value:
                raise _refused_option(callback, option, value, why, hint)
        return
    for name, (why, hint) in REFUSED_HOOKS.items():
        if is_overridden(name, callback, "Callback"):
            raise WorkloadError.problem(place_of(cls, name), f"defines {name}(), which is not supported: {why}", hint)


def _refused_option(callback: Any, option: str, value: Any, allowed: str, hint: str) -> WorkloadError:
    return WorkloadError(f"{option} of {type(callback).__name__}", value, allowed, hint)


def together(configured: Any, given: Sequence[Any]) -> list[Any]:
    """Callbacks from a list and from `configure_callbacks`, which replace those of the same class in the list, as in
    Lightning."""
    own = [] if configured is None else list(configured) if isinstance(configured, Sequence) else [configured]
    check_callbacks(own)
    return [*(each for each in given if type(each) not in {type(o) for o in own}), *own]


def called(callbacks: Iterable[Any]) -> list[Any]:
    """The callbacks whose hooks are called."""
    kinds = (*TRANSLATED, *LEFT_OUT)
    return [each for each in callbacks if all(lightning_base(type(each), kind) is None for kind in kinds)]


def settings_of(callbacks: Iterable[Any], config: RunConfig) -> dict[str, Brought]:
    """Settings that callbacks become, by key. Raises WorkloadError if they contradict each other."""
    found: dict[str, Brought] = {}
    for callback in callbacks:
        name = type(callback).__name__
        if name not in TRANSLATED:
            continue
        for key, value in TRANSLATED[name].settings(callback, config).items():
            is_default = key == EVERY or (key == "checkpoint.every" and value == EACH_EPOCH)
            before = found.get(key)
            if before is not None and before.value != value and not (before.is_default or is_default):
                hint = f"give a single value to {key}"
                raise WorkloadError(f"{key} of {name}", value, f"{before.by} sets {before.value}", hint)
            if before is None or before.is_default:
                found[key] = Brought(value, name, is_default)
    return found


def monitors(callbacks: Iterable[Any]) -> dict[str, tuple[str, str]]:
    """Names of callbacks that follow an evaluation's value, and the value's name in `self.log`, by name in the
    record."""
    following = [c for c in callbacks if type(c).__name__ in TRANSLATED and getattr(c, "monitor", None) is not None]
    return {_metric(each): (type(each).__name__, each.monitor) for each in following}


def _metric(callback: Any) -> str:
    """Name in the record of the value that a callback monitors."""
    if callback.monitor.startswith(SHORT_NAMES["train"]):
        allowed = "it must be logged in validation_step"
        raise _refused_option(callback, "monitor", callback.monitor, allowed, "log a value there, such as 'val_loss'")
    return evaluated_name(callback.monitor)
