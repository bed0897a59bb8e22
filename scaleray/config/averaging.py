"""Averages of the weights, kept in addition to the trained ones."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from scaleray.config.base import Count, Settings


class AveragingSettings(Settings):
    """An exponential moving average of the trained weights: evaluations and the final weights are the average's."""

    decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the average that stays at each update, such as 0.999; the first update takes the weights as they are.
    None: no average."""
    every: Count = 1
    """Optimizer steps between two updates of the average."""
