"""The optimizer, and the learning rate as it was tuned at a reference batch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from scaleray.config.base import Count, NonNegative, Positive, Probability, Settings
from scaleray.errors import ConfigError


class OptimizerSettings(Settings):
    """Values as tuned at `reference_batch_size`; the rule carries them to `batch.global_size`."""

    name: Literal["adamw", "sgd", "lars", "lamb"] = "adamw"
    """Name of the optimizer: adamw (decoupled weight decay), sgd (with momentum), or their layer-wise relatives for
    large batches: lars and lamb."""
    learning_rate: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Peak learning rate, tuned at the reference batch. None: that of the workload's own optimizer, where it brings
    one."""
    reference_batch_size: Count | None = None
    """Batch at which the learning rate was tuned, in `batch.unit`. None: the global batch itself, so rules change
    nothing."""
    rule: Literal["none", "linear", "sqrt", "adam", "legw"] = "none"
    """Rule by which the learning rate follows the batch: see `scaleray.scaling.recipe.lr_rules`."""
    betas: tuple[Probability, Probability] = (0.9, 0.999)
    """Averaging factors of adamw and lamb at the reference batch."""
    epsilon: Positive = 1e-8
    """Epsilon of adamw and lamb at the reference batch. LAMB's paper has 1e-6."""
    weight_decay: NonNegative = 0.0
    """Weight decay: decoupled for adamw, L2 for sgd, part of the layer's step for lars and lamb. Not scaled with the
    batch."""
    momentum: Probability = 0.9
    """sgd and lars: momentum."""
    nesterov: bool = False
    """sgd: use Nesterov momentum."""
    trust_coefficient: Positive = 0.001
    """lars: trust coefficient. The step in a layer is about this share of the layer's weights, times the learning
    rate."""
    adapt_vectors: bool = False
    """lars and lamb: adapt and decay parameters of one dimension too, which are biases and the scales of norms."""
    clip_norm: Positive | None = None
    """Largest global norm of the gradient. None: no clipping."""


def missing_rate(why: str) -> ConfigError:
    """The error of a config without a learning rate, if one is needed."""
    return ConfigError("optimizer.learning_rate", None, why, "such as 1e-3")
