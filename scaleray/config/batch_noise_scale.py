"""The global batch and its micro-batches, and the noise scale that says how large it may be."""

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
