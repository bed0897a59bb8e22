"""The byte-level language model as layouts.py trains it: its blocks also sleep."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from scaleray.emulation import BACKWARD, Timing, emulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class LateTiming(Timing):
    """Timing of layers that take no time until each has made some backward passes, as in steps that only fill caches."""

    free_passes: int = 0
    begun: dict[int, int] = field(default_factory=dict)
    """Backward passes by layer."""

    def duration_s(self, direction: str, *, layer: int, **of: Any) -> float:
        begun = self.begun.get(layer, 0)
        if direction == BACKWARD:
            self.begun[layer] = begun + 1
        return 0.0 if begun < self.free_passes else super().duration_s(direction, layer=layer, **of)


class SleepingModel(LanguageModel):
    """The byte-level model, whose blocks also sleep. block_s_per_row: of a forward pass; a backward pass takes twice as long.

    free_passes: backward passes of a block before it sleeps.
    """

    def __init__(self, block_s_per_row: float, free_passes: int = 0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.timing = LateTiming(forward_s_per_sample=block_s_per_row, free_passes=free_passes)

    def build_model(self) -> nn.Module:
        model = super().build_model()
        emulate(self.blocks(model), self.timing)
        return model
