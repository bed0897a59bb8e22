"""The global batch. It is the input; everything a worker does with its share is derived."""

from __future__ import annotations

from typing import Literal

from scaleray.config.base import Count, Settings


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
