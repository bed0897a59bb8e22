"""The reference transformer at a few thousand parameters, as a workload: random tokens, a tied head unless asked otherwise."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent.parent / "jobs"))

from language_model import LanguageModel
from transformer import TransformerConfig

VOCABULARY, LENGTH = 32, 8


class SmallTransformer(LanguageModel):
    """Four blocks of width 16, with two heads; 26 sequences of 8 tokens to predict."""

    def __init__(self, num_rows: int = 26, num_val: int = 0, **shape: Any) -> None:
        super().__init__(sequence_length=LENGTH, num_experts=shape.get("num_experts"))
        self.num_rows, self.num_val = num_rows, num_val
        sizes = {"width": 16, "num_blocks": 4, "num_heads": 2, "ffn_width": 32, **shape}
        self.config = TransformerConfig(vocab_size=VOCABULARY, max_sequence_length=LENGTH, **sizes)

    def datasets(self) -> dict[str, Any]:
        def tokens(num: int, seed: int) -> dict[str, np.ndarray]:
            return {"tokens": np.random.default_rng(seed).integers(0, VOCABULARY, size=(num, LENGTH + 1))}

        return {"train": tokens(self.num_rows, 0), **({"val": tokens(self.num_val, 1)} if self.num_val else {})}
