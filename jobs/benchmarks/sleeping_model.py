"""The byte-level language model as layouts.py trains it: its blocks also sleep."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import nn

from scaleray.emulation import Timing, emulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from language_model import LanguageModel


class SleepingModel(LanguageModel):
    """The byte-level model, whose blocks also sleep. block_s_per_row: of a forward pass; a backward pass takes twice as long."""

    def __init__(self, block_s_per_row: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.block_s_per_row = block_s_per_row

    def build_model(self) -> nn.Module:
        model = super().build_model()
        emulate(self.blocks(model), Timing(forward_s_per_sample=self.block_s_per_row))
        return model
