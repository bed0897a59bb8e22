"""Workloads whose model is made of blocks: a transformer of a few hundred parameters, and others that blocks can go wrong with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from small_runs import Classify, Tokens
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "jobs"))

from transformer import Transformer, TransformerConfig


class TinyTransformer(Tokens):
    """The reference transformer on padded token sequences."""

    num_blocks = 3

    def build_model(self) -> nn.Module:
        shape = TransformerConfig(
            vocab_size=self.vocabulary,
            width=8,
            num_blocks=self.num_blocks,
            num_heads=2,
            ffn_width=8,
            max_sequence_length=8,
        )
        model = Transformer(shape)
        model.init_weights()
        return model

    def blocks(self, model: nn.Module) -> Any:
        return model.blocks


class Residual(nn.Module):
    """A block with dropout and a normalisation that keeps statistics."""

    def __init__(self, *, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.inner, self.drop, self.outer = nn.Linear(6, 32), nn.Dropout(dropout), nn.Linear(32, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.drop(torch.tanh(self.inner(self.norm(x)))))


class Blocks(Classify):
    """Four residual blocks and a head."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(*(self.block() for _ in range(4)), nn.Linear(6, 3))

    def block(self) -> nn.Module:
        return Residual()

    def blocks(self, model: Any) -> Any:
        return model[:4]


class BlocksWithDropout(Blocks):
    def block(self) -> nn.Module:
        return Residual(dropout=0.5)


class BlocksWithBatchNorm(Blocks):
    def block(self) -> nn.Module:
        return Residual(norm=True)


class BlocksWithSpectralNorm(Blocks):
    """Each forward pass changes a buffer on which the next one depends."""

    def block(self) -> nn.Module:
        block = Residual()
        nn.utils.parametrizations.spectral_norm(block.inner)
        return block


class Prints(Residual):
    """Breaks the graph where it prints."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        print("a block")
        return x * 2


class BlocksThatPrint(Blocks):
    def block(self) -> nn.Module:
        return Prints()
