"""Memory that a worker may use, and what happens where a micro-batch does not fit."""

from __future__ import annotations

from typing import Literal

from scaleray.config.base import Positive, Probability, Settings


class MemorySettings(Settings):
    """The search for a micro-batch before training, and the way out of a memory error during it."""

    find_micro_size: bool = False
    """Try micro-batches under the real strategy before the first step and train with the largest that fits:
    `batch.micro_size`, or a worker's whole share, is the largest that is tried."""
    limit_gib: Positive | None = None
    """Memory that a worker may use, in GiB. None: all of its device. A CPU's memory is not the worker's own, so that a
    search there needs a limit; what counts there is the tensors that are alive."""
    reserve: Probability = 0.05
    """Share of the limit that a micro-batch must leave free, for longer rows and fragments."""
    on_out_of_memory: Literal["raise", "halve"] = "raise"
    """Action after a memory error. raise: the run fails; halve: repeat the step with half the micro-batch on all
    workers, the global batch unchanged. With several workers halve costs one small collective a step, for which they
    wait before the backward pass that synchronises gradients.
    """
