"""Weights taken out while fine-tuning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from scaleray.config.base import Count, Settings


class PruningSettings(Settings):
    """Which weights become zero and stay so. The masks are the same on all workers."""

    method: Literal["none", "magnitude", "structured", "2:4"] = "none"
    """magnitude: the smallest weights of the whole model; structured: whole output rows of a layer, by norm; 2:4: the two
    smallest of each four neighbours."""
    sparsity: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the prunable weights that are zero at the end. 2:4 is always 0.5."""
    start_step: Annotated[int, Field(ge=0)] = 0
    """The first pruning comes after so many steps."""
    end_step: Count | None = None
    """The last one: between both sparsity grows by the cubic schedule of Zhu and Gupta 2017. None: all at the start."""
    every_steps: Count = 100
    """Steps between two prunings."""
    exclude: tuple[str, ...] = ()
    """Parts of names of parameters that are left alone; biases, norms and embeddings always are."""
