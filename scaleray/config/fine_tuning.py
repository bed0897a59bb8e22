"""Fine-tuning: which parts of a model are trained when it starts from existing weights."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from scaleray.config.base import Positive, Settings


class FineTuningSettings(Settings):
    """Frozen parts and low-rank adapters. `workload.weights` says where the weights come from."""

    lora_rank: Annotated[int, Field(ge=0)] = 0
    """Rank of low-rank adapters (LoRA) added to the layers of `lora_layers`, with everything else frozen. 0: none."""
    lora_alpha: Positive = 16.0
    """Numerator of the adapters' scale, which is alpha / rank."""
    lora_layers: tuple[str, ...] = ("query", "value")
    """Last parts of the names of linear layers that get an adapter."""
    merge: bool = True
    """Add the adapters to their layers in the final weights, which are then those of a model without adapters. false:
    keep them apart, as in checkpoints."""
    freeze: tuple[str, ...] = ()
    """Beginnings of names of parameters that are not trained."""
