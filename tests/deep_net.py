"""A model with what sharding can go wrong with: tied and frozen parameters, equal blocks, a buffer that is not saved."""

from __future__ import annotations

from typing import Any

import torch
from small_runs import Tokens
from torch import nn

BLOCK_SHAPES = [(5,), (5,), (10, 5), (10,), (5, 10), (5,)]
"""Of one block's parameters; there are four."""
FROZEN_SHAPES = [(10, 5), (10,)]
ROOT_SHAPES = [(11, 5), (5,), (5,)]
"""Of the parameters outside of the blocks."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * scale


class Net(nn.Module):
    """Embedding and head tied, four blocks; the second block's first layer is frozen."""

    def __init__(self, vocabulary: int, width: int = 5, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.0, width), persistent=False)
        self.blocks[1].up.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.scale)
        return self.head(self.norm(x))


class Deep(Tokens):
    """It on padded token sequences."""

    def build_model(self) -> nn.Module:
        return Net(self.vocabulary)

    def blocks(self, model: Any) -> Any:
        return model.blocks
