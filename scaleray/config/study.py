"""Prices and peaks that a scaling study needs in addition to the training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from scaleray.config.base import NonNegative, Positive, Settings


class StudySettings(Settings):
    """Figures that turn measurements into costs and shares of the peak. They change nothing about a training."""

    price_per_worker_hour: NonNegative | None = None
    """Price of one worker for an hour, in `currency`. None: costs are left out."""
    currency: Annotated[str, Field(max_length=12)] = ""
    """Name of the price's unit, such as USD; only shown."""
    peak_tflops: Positive | None = None
    """Dense peak of one worker's device in the run's precision, in 10^12 FLOP/s, for MFU. None: the peak in the
    planner's catalogue for the GPU's name, where it is known."""
