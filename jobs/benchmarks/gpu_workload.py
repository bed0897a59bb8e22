"""What the GPU benchmark trains: the reference transformer on random tokens, which cost what real ones do."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformer import SIZES, Transformer, TransformerConfig

from scaleray import Workload
from scaleray.data import TokenSource
from scaleray.errors import ConfigError

BENCHMARK_SIZES = {
    # GPT-2's vocabulary, filled up to a multiple of 64: matrix products with an odd number of columns are slow
    "124m": dataclasses.replace(SIZES["124m"], vocab_size=50_304),
    "1b": SIZES["1b"],
    "smoke": TransformerConfig(vocab_size=256, width=64, num_blocks=2, num_heads=2),
}


class RandomTokens(Workload):
    """Predict uniformly random tokens: nothing can be learned, and nothing depends on what is. size: a benchmark's size."""

    def __init__(self, size: str = "124m", sequence_length: int = 1024, num_rows: int = 1024) -> None:
        if size not in BENCHMARK_SIZES:
            raise ConfigError("workload.args.size", size, f"it must be one of {', '.join(BENCHMARK_SIZES)}")
        self.config = dataclasses.replace(BENCHMARK_SIZES[size], max_sequence_length=sequence_length)
        self.num_rows = num_rows

    def build_model(self) -> nn.Module:
        device = torch.get_default_device()
        with torch.device("meta"):
            model = Transformer(self.config)
        model.to_empty(device=device)
        model.init_weights()
        return model

    def datasets(self) -> dict[str, TokenSource]:
        length = self.config.max_sequence_length
        tokens = np.random.default_rng(0).integers(
            0, self.config.vocab_size, self.num_rows * length + 1, dtype=np.int32
        )
        return {"train": TokenSource(tokens, sequence_length=length)}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        """Cross entropy in nats summed over the predicted tokens, and their number."""
        tokens = batch["tokens"].long()
        targets = tokens[:, 1:].flatten()
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets, reduction="sum"), targets.numel()

    def blocks(self, model: nn.Module) -> nn.ModuleList:
        return model.blocks
