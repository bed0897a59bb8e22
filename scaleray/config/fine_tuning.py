"""What of a model is trained when it starts from existing weights."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from scaleray.config.base import Positive, Settings


class FineTuningSettings(Settings):
    """Frozen parts and low-rank adapters. Where the weights come from says `workload.weights`."""

    lora_rank: Annotated[int, Field(ge=0)] = 0
    """Rank of low-rank adapters (LoRA) beside the layers of `lora_layers`, with everything else frozen. 0: none."""
    lora_alpha: Positive = 16.0
    """Adapters are scaled by alpha / rank."""
    lora_layers: tuple[str, ...] = ("query", "value")
    """Last parts of the names of linear layers that get an adapter."""
    merge: bool = True
    """The final weights are those of a model without adapters, which are added to the layers beside them. false: apart, as in
    checkpoints."""
    freeze: tuple[str, ...] = ()
    """Beginnings of names of parameters that are not trained."""
