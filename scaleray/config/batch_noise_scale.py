"""Settings of the global batch and its micro-batches, and of the noise scale that bounds the useful batch size."""

from typing import Annotated, Literal

from pydantic import Field

from scaleray.config.base import Count, Settings


class NoiseScaleSettings(Settings):
    """Gradient noise scale: the batch size, in samples, at which noise equals signal. Measuring it does not change the
    training."""

    measure: Literal["auto"] | bool = False
    """Whether to measure it. true: measure it, or fail with the reason. auto: measure it only if this is exact and
    needs no memory, from the gradients of several workers before averaging, or from a step's first micro-batch. As a
    last resort, true compares consecutive steps, which is biased and keeps a second gradient in memory."""
    every_steps: Count = 20
    """Steps between two measurements. Each costs up to a fifth of a step if steps last a few milliseconds, and a few
    per cent of a step if they last longer."""
    averaging: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Decay of earlier measurements for each step of `optimizer.reference_batch_size` samples: 0.999 averages over
    about a thousand such steps."""
    preconditioned: bool = False
    """Measure gradients as they enter Adam's update, divided by the square root of its second moment. For adamw and
    lamb. Needs memory for three copies of the model's small tensors, up to 65,536 numbers each."""


class BatchSettings(Settings):
    """Size of one optimizer step over all workers."""

    global_size: Count
    """Samples (or tokens) in one optimizer step, over all workers."""
    unit: Literal["samples", "tokens"] = "samples"
    """Unit of `global_size`, `micro_size` and `optimizer.reference_batch_size`. If rows differ in length, a step in
    tokens has whole rows with at most `global_size` tokens on average, so its number of rows varies."""
    micro_size: Count | None = None
    """Largest number of samples (or tokens, without padding) in one forward pass of one worker. None: the worker's
    whole share. Smaller values save memory by accumulation."""
    drop_last: bool = False
    """Omit the last, partial batch of an epoch. False: use it, weighted by its size."""
