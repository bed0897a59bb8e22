"""Measurement of the gradient noise scale."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from scaleray.config.base import Count, Settings


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
