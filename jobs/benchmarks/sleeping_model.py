"""The byte-level language model as layouts.py trains it: its blocks also sleep."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from scaleray.emulation import Timing, emulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class LateTiming(Timing):
    """Timing of a layer whose first passes take no time, as those that only fill caches."""

    first_pass: int = 0
    """Number of the first pass that sleeps."""

    def duration_s(self, direction: str, *, number: int, **of: Any) -> float:
        return 0.0 if number < self.first_pass else super().duration_s(direction, number=number, **of)


class SleepingModel(LanguageModel):
    """The byte-level model, whose blocks also sleep. block_s_per_row: of a forward pass; a backward pass takes twice as long.

    first_pass: number of the first pass that sleeps.
    """

    def __init__(self, block_s_per_row: float, first_pass: int = 0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.timing = LateTiming(forward_s_per_sample=block_s_per_row, first_pass=first_pass)

    def build_model(self) -> nn.Module:
        model = super().build_model()
        emulate(self.blocks(model), self.timing)
        return model
