"""Settings of averaging, pruning and fine-tuning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from scaleray.config.base import Count, Positive, Settings


class FineTuningSettings(Settings):
    """Frozen parts and low-rank adapters. The weights to start from are set by `workload.weights`."""

    lora_rank: Annotated[int, Field(ge=0)] = 0
    """Rank of the low-rank adapters (LoRA) added to the layers in `lora_layers`; all other parameters except the
    modules in `trained_whole` are frozen. 0: no adapters."""
    lora_alpha: Positive = 16.0
    """Numerator of the adapters' scale, which is alpha / rank."""
    lora_layers: tuple[str, ...] = ("query", "value")
    """Last name parts of the linear layers that get an adapter, such as `query`."""
    trained_whole: tuple[str, ...] = ("classifier", "score")
    """Last name parts of modules that are trained in full and stored with the adapters, such as a classifier's new
    head. The default names, which peft uses for classifiers, may be absent."""
    merge: bool = True
    """Merge the adapters into their layers in the final weights, which then fit a model without adapters. false: keep
    them separate, as in checkpoints."""
    freeze: tuple[str, ...] = ()
    """Prefixes of the names of parameters that are not trained."""


class PruningSettings(Settings):
    """Weights that are set to zero and stay zero. The masks are the same on all workers."""

    method: Literal["none", "magnitude", "structured", "2:4"] = "none"
    """Weights that are pruned. none: no weights; magnitude: the smallest weights of the whole model; structured: whole
    rows of each linear or convolution layer, that is its outputs, by norm; 2:4: the two smallest of every four
    neighbouring inputs of linear layers, once, at `start_step`."""
    sparsity: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the prunable weights that are zero at the end. 2:4 is always 0.5."""
    start_step: Annotated[int, Field(ge=0)] = 0
    """Number of steps before the first pruning; 0 prunes before the first step."""
    end_step: Count | None = None
    """Number of steps before the last pruning. From the first to the last, sparsity grows by the cubic schedule of Zhu
    and Gupta 2017. None: all weights are pruned at `start_step`."""
    every_steps: Count = 100
    """Steps between two prunings, from `start_step` to `end_step`."""
    exclude: tuple[str, ...] = ()
    """Substrings of the names of parameters that are not pruned; biases, norms, embeddings and frozen parameters never
    are."""

    @model_validator(mode="after")
    def _schedule_is_possible(self) -> PruningSettings:
        if self.end_step is not None and self.end_step <= self.start_step:
            raise ValueError(f"pruning.end_step: it must be larger than pruning.start_step, which is {self.start_step}")
        if self.method == "2:4" and (self.sparsity != 0.5 or self.end_step is not None):
            raise ValueError("pruning.method: 2:4 removes half of the weights at once; omit sparsity and end_step")
        return self


class AveragingSettings(Settings):
    """Exponential moving average of the trained weights, which evaluations and the final weights then use."""

    decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Weight of the previous average at each update, such as 0.999; the first update copies the weights. None: no
    average."""
    every: Count = 1
    """Optimizer steps between two updates of the average."""
