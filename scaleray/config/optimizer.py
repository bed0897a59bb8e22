"""The optimizer and its learning rate, the global batch, the schedule with its end, and the noise scale."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from scaleray.config.base import Count, Duration, NonNegative, Positive, Probability, Settings, Target, above_zero
from scaleray.errors import ConfigError


class NoiseScaleSettings(Settings):
    """The gradient noise scale: the batch size, in samples, at which noise equals signal. Measuring changes no
    training."""

    measure: Literal["auto"] | bool = False
    """Whether to measure. true measures, or refuses with the reason. auto measures where that is exact and costs no
    memory: from the gradients of several workers before they meet, or from a step's first micro-batch; true takes
    consecutive steps as a last resort, which is biased and keeps a second gradient in memory."""
    every_steps: Count = 20
    """Steps between two measurements, each of which costs up to a fifth of a step where steps last a few milliseconds,
    and a few hundredths where they last longer."""
    averaging: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Factor of the weight of earlier measurements for each step of `optimizer.reference_batch_size` samples: 0.999
    looks back over about a thousand such steps."""
    preconditioned: bool = False
    """Measure gradients as Adam's update sees them, divided by the root of its second moment. For adamw and lamb. It
    keeps room for three copies of the model's small tensors, up to 65,536 numbers each."""


class ScheduleSettings(Settings):
    """Linear warm-up from zero, then constant, cosine or linear decay to `final_ratio` of the peak."""

    name: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the schedule after the warm-up."""
    warmup: Duration = Duration(0, "steps")
    """Length of the warm-up at the reference batch; legw stretches it with the batch, unless it is in steps."""
    length: Duration | None = None
    """Length of the schedule up to the end of the decay. None: to the end of training."""
    final_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at the end of the decay, relative to the peak."""

    _check_length = field_validator("length")(above_zero)


class StopSettings(Settings):
    """When training ends."""

    after: Duration
    """The full length of training, such as `30 epochs` or `2000 steps`."""
    at: Target | None = None
    """Target: training stops early when an evaluation reaches it, such as `val/accuracy >= 0.97`. Needs
    `evaluation.every`."""

    patience: Count | None = None
    """Number of evaluations in a row without a better one after which training stops. Needs `evaluation.every`. None:
    it continues.
    """
    watch: Annotated[str, Field(pattern=r"^[\w./-]+ (min|max)$")] | None = None
    """Metric that `patience` watches, and its direction, such as `val/loss min`. None: that of `checkpoint.best`."""

    _check_after = field_validator("after")(above_zero)


class EvaluationSettings(Settings):
    """When the splits other than `train` are evaluated; they always are at the end."""

    test: Literal["with_others", "at_end"] = "with_others"
    """When the split `test` is evaluated: with the others, or at the end only, so that no decision depends on it."""
    every: Duration | None = None
    """Distance between evaluations. None: at the end only."""
    micro_size: Annotated[int, Field(ge=1, le=2**40)] | None = None
    """Samples in one forward pass of one worker during evaluation. None: that of training."""

    _check_every = field_validator("every")(above_zero)

    @property
    def only_at_end(self) -> str | None:
        """Name of the split that is evaluated at the end only."""
        return "test" if self.test == "at_end" else None


class BatchSettings(Settings):
    """Size of one optimizer step over all workers."""

    global_size: Count
    """Samples (or tokens) in one optimizer step, over all workers."""
    unit: Literal["samples", "tokens"] = "samples"
    """Unit in which `global_size`, `micro_size` and `optimizer.reference_batch_size` are counted. Rows of unequal
    length fill steps of at most so many tokens on average, in whole rows: the number of rows varies from step to
    step."""
    micro_size: Count | None = None
    """Samples (or tokens, without padding) in one forward pass of one worker, at most. None: the worker's whole share.
    Smaller saves memory, by accumulation."""
    drop_last: bool = False
    """Leave out the last, partial batch of an epoch. False: it is used, weighted by its count."""


class OptimizerSettings(Settings):
    """Values as tuned at `reference_batch_size`; the rule carries them to `batch.global_size`."""

    name: Literal["adamw", "adam", "sgd", "lars", "lamb"] = "adamw"
    """Name of the optimizer: adamw (decoupled weight decay), sgd (with momentum), or their layer-wise relatives for
    large batches: lars and lamb. adam is adamw without weight decay."""
    learning_rate: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Peak learning rate, tuned at the reference batch. None: that of the workload's own optimizer, where it brings
    one."""
    reference_batch_size: Count | None = None
    """Batch at which the learning rate was tuned, in `batch.unit`. None: the global batch itself, so rules change
    nothing."""
    rule: Literal["none", "linear", "sqrt", "adam", "legw"] = "none"
    """Rule by which the learning rate follows the batch: see `scaleray.config.recipe.lr_rules`."""
    betas: tuple[Probability, Probability] = (0.9, 0.999)
    """Averaging factors of adamw and lamb at the reference batch."""
    epsilon: Positive = 1e-8
    """Epsilon of adamw and lamb at the reference batch. LAMB's paper has 1e-6."""
    weight_decay: NonNegative = 0.0
    """Weight decay: decoupled for adamw, L2 for sgd, part of the layer's step for lars and lamb. Not scaled with the
    batch. torch's AdamW has 0.01 by default."""
    momentum: Probability = 0.9
    """sgd and lars: momentum. torch's SGD has 0 by default."""
    nesterov: bool = False
    """sgd: use Nesterov momentum."""
    trust_coefficient: Positive = 0.001
    """lars: trust coefficient. The step in a layer is about this share of the layer's weights, times the learning
    rate."""
    adapt_vectors: bool = False
    """lars and lamb: adapt and decay parameters of one dimension too, which are biases and the scales of norms."""
    clip_norm: Positive | None = None
    """Largest global norm of the gradient. None: no clipping."""

    @model_validator(mode="before")
    @classmethod
    def _adam_without_decay(cls, values: Any) -> Any:
        """Read adam as adamw, which is the same without weight decay."""
        if not isinstance(values, dict) or values.get("name") != "adam":
            return values
        if values.get("weight_decay"):
            raise ValueError("name: adam has no decoupled weight decay; write adamw, or leave weight_decay out")
        return {**values, "name": "adamw"}


def missing_rate(why: str) -> ConfigError:
    """The error of a config without a learning rate, if one is needed."""
    return ConfigError("optimizer.learning_rate", None, why, "such as 1e-3")
