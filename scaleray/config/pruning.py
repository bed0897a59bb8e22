"""Pruning: weights that are set to zero while fine-tuning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from scaleray.config.base import Count, Settings


class PruningSettings(Settings):
    """Which weights become zero and stay so. The masks are the same on all workers."""

    method: Literal["none", "magnitude", "structured", "2:4"] = "none"
    """Weights that are pruned. none: no weights; magnitude: the smallest weights of the whole model; structured: whole
    rows of each linear or convolution layer, which are its outputs, by norm; 2:4: the two smallest of each four
    neighbouring inputs of linear layers, once, at `start_step`."""
    sparsity: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the prunable weights that are zero at the end. 2:4 is always 0.5."""
    start_step: Annotated[int, Field(ge=0)] = 0
    """Number of steps before the first pruning; 0 is before the first step."""
    end_step: Count | None = None
    """Number of steps before the last pruning. From the first to the last, sparsity grows by the cubic schedule of Zhu
    and Gupta 2017. None: everything is pruned at `start_step`."""
    every_steps: Count = 100
    """Steps between two prunings, from `start_step` to `end_step`."""
    exclude: tuple[str, ...] = ()
    """Parts of names of parameters that are left alone; biases, norms, embeddings and frozen parameters always are."""

    @model_validator(mode="after")
    def _schedule_is_possible(self) -> PruningSettings:
        if self.end_step is not None and self.end_step <= self.start_step:
            raise ValueError(f"pruning.end_step: it must come after pruning.start_step, which is {self.start_step}")
        if self.method == "2:4" and (self.sparsity != 0.5 or self.end_step is not None):
            raise ValueError(
                "pruning.method: 2:4 takes out half of the weights at once; leave out sparsity and end_step"
            )
        return self
