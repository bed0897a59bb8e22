"""Changes of the weights next to the optimizer's: averages, pruning, fine-tuning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from scaleray.config.base import Count, Positive, Settings


class FineTuningSettings(Settings):
    """Frozen parts and low-rank adapters. `workload.weights` says where the weights come from."""

    lora_rank: Annotated[int, Field(ge=0)] = 0
    """Rank of low-rank adapters (LoRA) added to the layers of `lora_layers`, with everything else but the modules of
    `trained_whole` frozen. 0: none."""
    lora_alpha: Positive = 16.0
    """Numerator of the adapters' scale, which is alpha / rank."""
    lora_layers: tuple[str, ...] = ("query", "value")
    """Last parts of the names of linear layers that get an adapter."""
    trained_whole: tuple[str, ...] = ("classifier", "score")
    """Last parts of the names of modules that are trained whole next to the adapters and stored with them, such as the
    new head of a classifier. Those of the default, which peft has for classifiers, may be absent."""
    merge: bool = True
    """Add the adapters to their layers in the final weights, which are then those of a model without adapters. false:
    keep them apart, as in checkpoints."""
    freeze: tuple[str, ...] = ()
    """Beginnings of names of parameters that are not trained."""


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
            raise ValueError("pruning.method: 2:4 removes half of the weights at once; leave out sparsity and end_step")
        return self


class AveragingSettings(Settings):
    """An exponential moving average of the trained weights: evaluations and the final weights are the average's."""

    decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the average that stays at each update, such as 0.999; the first update takes the weights as they are.
    None: no average."""
    every: Count = 1
    """Optimizer steps between two updates of the average."""
