"""The optimizer, and the learning rate as it was tuned at a reference batch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from scaleray.config.base import Count, NonNegative, Positive, Probability, Settings


class OptimizerSettings(Settings):
    """Values as tuned at `reference_batch_size`; the rule carries them to `batch.global_size`."""

    name: Literal["adamw", "sgd"] = "adamw"
    """adamw (decoupled weight decay) or sgd (with momentum)."""
    learning_rate: Annotated[float, Field(gt=0, le=1e6)]
    """Peak learning rate, tuned at the reference batch."""
    reference_batch_size: Count | None = None
    """Batch at which the learning rate was tuned, in `batch.unit`. None: the global batch itself, so rules change nothing."""
    rule: Literal["none", "linear", "sqrt", "adam", "legw"] = "none"
    """How the learning rate follows the batch: see `scaleray.scaling.lr_rules`."""
    betas: tuple[Probability, Probability] = (0.9, 0.999)
    """AdamW's averaging factors at the reference batch."""
    epsilon: Positive = 1e-8
    """AdamW's epsilon at the reference batch."""
    weight_decay: NonNegative = 0.0
    """Decoupled for adamw, L2 for sgd. Not scaled with the batch."""
    momentum: Probability = 0.9
    """SGD only."""
    nesterov: bool = False
    """SGD only."""
    clip_norm: Positive | None = None
    """Largest global norm of the gradient. None: no clipping."""
