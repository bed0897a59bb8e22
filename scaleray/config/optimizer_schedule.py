"""Settings of the optimizer and of the learning-rate schedule."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from scaleray.config.base import (
    LARGEST_COUNT,
    WATCHED,
    Count,
    Duration,
    NonNegative,
    Positive,
    Probability,
    Settings,
    above_zero,
)
from scaleray.errors import ConfigError


class ScheduleSettings(Settings):
    """Linear warm-up from zero, then constant, cosine or linear decay to `final_ratio` of the peak, or reductions when
    evaluations stop improving."""

    name: Literal["constant", "cosine", "linear", "plateau"] = "constant"
    """Shape of the schedule after the warm-up. plateau: multiply the rate by `factor` after more than `patience`
    evaluations without improvement, like torch's ReduceLROnPlateau. Needs `evaluation.every`."""
    warmup: Duration = Duration(0, "steps")
    """Length of the warm-up at the reference batch; legw stretches it with the batch, unless it is given in steps."""
    length: Duration | None = None
    """Length of the schedule up to the end of the decay. None: to the end of training."""
    final_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at the end of the decay, relative to the peak; plateau: the smallest rate."""
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """plateau: factor for the learning rate, such as 0.25 to divide it by 4."""
    patience: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] = 10
    """plateau: number of consecutive evaluations without improvement that are tolerated; the next one reduces the
    rate."""
    threshold: NonNegative = 1e-4
    """plateau: smallest relative change that counts as an improvement."""
    cooldown: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] = 0
    """plateau: number of evaluations ignored after a reduction."""
    watch: Annotated[str, Field(pattern=WATCHED)] | None = None
    """Metric that a plateau follows, also in the workload's own `schedule()`, and its direction, such as `val/loss
    min`. None: the metric of `stop.patience` or `checkpoint.best`, otherwise the loss of the first evaluated split."""

    _check_length = field_validator("length")(above_zero)


class OptimizerSettings(Settings):
    """Values tuned at `reference_batch_size`; the rule adapts them to `batch.global_size`."""

    name: Literal["adamw", "adam", "sgd", "lars", "lamb"] = "adamw"
    """Optimizer: adamw (decoupled weight decay), sgd (with momentum), or their layer-wise variants for large batches,
    lamb and lars. adam is adamw without weight decay."""
    learning_rate: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Peak learning rate, tuned at the reference batch. None: that of the workload's own optimizer, if it has one."""
    reference_batch_size: Count | None = None
    """Batch size for which the learning rate was tuned, in `batch.unit`. None: the global batch, so rules have no
    effect."""
    rule: Literal["none", "linear", "sqrt", "adam", "legw"] = "none"
    """Rule for scaling the learning rate with the batch: see `scaleray.config.recipe.lr_rules`."""
    betas: tuple[Probability, Probability] = (0.9, 0.999)
    """Decay rates of the moments in adamw and lamb, at the reference batch."""
    epsilon: Positive = 1e-8
    """Epsilon of adamw and lamb at the reference batch. The LAMB paper uses 1e-6."""
    weight_decay: NonNegative = 0.0
    """Weight decay: decoupled for adamw, L2 for sgd, part of the layer's step for lars and lamb. Not scaled with the
    batch. torch's AdamW uses 0.01 by default."""
    momentum: Probability = 0.9
    """sgd and lars: momentum. torch's SGD uses 0 by default."""
    nesterov: bool = False
    """sgd: use Nesterov momentum."""
    trust_coefficient: Positive = 0.001
    """lars: trust coefficient. The step of a layer is about this share of the layer's weights, times the learning
    rate."""
    adapt_vectors: bool = False
    """lars and lamb: also adapt and decay one-dimensional parameters, that is biases and the scales of norms."""
    clip_norm: Positive | None = None
    """Largest global norm of the gradient. None: no clipping."""

    @model_validator(mode="before")
    @classmethod
    def _adam_without_decay(cls, values: Any) -> Any:
        """Read adam as adamw, which is identical without weight decay."""
        if not isinstance(values, dict) or values.get("name") != "adam":
            return values
        if values.get("weight_decay"):
            raise ValueError("name: adam has no decoupled weight decay; write adamw, or omit weight_decay")
        return {**values, "name": "adamw"}


def missing_rate(why: str) -> ConfigError:
    """Return the error for a config that lacks a required learning rate."""
    return ConfigError("optimizer.learning_rate", None, why, "for example 1e-3")
