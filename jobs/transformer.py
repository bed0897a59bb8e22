"""A decoder-only transformer of the Llama family, from one million parameters on a laptop to the shape of Llama 3 8B.

Used by jobs/language_model.py. Parts: RMSNorm before each sublayer (arXiv:1910.07467), rotary positions
(arXiv:2104.09864), SwiGLU (arXiv:2002.05202), grouped-query attention (arXiv:2305.13245), no biases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from scaleray.errors import ConfigError
from scaleray.parallel import MixtureOfExperts, MixtureParallel, positions

NORM_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The shape of the model; everything else follows from it."""

    vocab_size: int
    width: int
    """Length of a token's vector between the blocks."""
    num_blocks: int
    num_heads: int
    num_kv_heads: int | None = None
    """Heads of keys and values, each shared by num_heads / num_kv_heads query heads. None: one for each query head."""
    ffn_width: int | None = None
    """Inner width of the feed-forward layer. None: 8/3 of the width, rounded up to a multiple of 64."""
    rope_base: float = 10_000.0
    """The slowest rotation has a wavelength near 2 pi rope_base tokens."""
    max_sequence_length: int = 1024
    """Rows of the table of rotations, so the longest input."""
    tie_head: bool = True
    """The output layer is the embedding table itself."""
    num_experts: int | None = None
    """Experts in place of each feed-forward layer, each of `ffn_width`. None: no experts."""
    experts_per_token: int = 2
    expert_capacity: float | None = None
    """Tokens of a sequence for each expert, relative to an even share. None: no token is dropped."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "width",
            "num_blocks",
            "num_heads",
            "kv_heads",
            "inner_width",
            "max_sequence_length",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "it must be at least 1")
        if self.width % (2 * self.num_heads):
            raise ConfigError(
                "num_heads",
                self.num_heads,
                f"width {self.width} must be a multiple of twice that: rotary positions turn pairs within a head",
            )
        if self.num_heads % self.kv_heads:
            raise ConfigError("num_kv_heads", self.kv_heads, f"it must divide num_heads, which is {self.num_heads}")
        if self.rope_base <= 1:
            raise ConfigError("rope_base", self.rope_base, "it must be more than 1", "10000 is common")

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def inner_width(self) -> int:
        return math.ceil(8 * self.width / 3 / 64) * 64 if self.ffn_width is None else self.ffn_width


SIZES = {
    "1m": TransformerConfig(vocab_size=256, width=128, num_blocks=5, num_heads=2),
    "3m": TransformerConfig(vocab_size=256, width=256, num_blocks=4, num_heads=4),
    "10m": TransformerConfig(vocab_size=256, width=384, num_blocks=6, num_heads=6),
    # with the vocabulary of GPT-2 small, whose parameter count this is
    "124m": TransformerConfig(vocab_size=50257, width=768, num_blocks=12, num_heads=12, ffn_width=2048),
    # https://huggingface.co/meta-llama/Llama-3.2-1B (without its stretched rotations)
    "1b": TransformerConfig(
        vocab_size=128_256,
        width=2048,
        num_blocks=16,
        num_heads=32,
        num_kv_heads=8,
        ffn_width=8192,
        rope_base=500_000.0,
        max_sequence_length=8192,
    ),
    # https://huggingface.co/meta-llama/Meta-Llama-3-8B
    "8b": TransformerConfig(
        vocab_size=128_256,
        width=4096,
        num_blocks=32,
        num_heads=32,
        num_kv_heads=8,
        ffn_width=14_336,
        rope_base=500_000.0,
        max_sequence_length=8192,
        tie_head=False,
    ),
}
"""Shapes by name. A size's own vocabulary counts in its name."""


class Transformer(nn.Module):
    """Logits of the next token at every position.

    Build it on `torch.device("meta")`, shard it where it is large, then `to_empty` and `init_weights`. Built on another
    device it holds torch's own initial values until `init_weights`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_blocks))
        self.norm = nn.RMSNorm(config.width, eps=NORM_EPSILON)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        # not persistent: it follows from the config, and a checkpoint must not fix the sequence length
        self.register_buffer("rotations", rotation_table(config, device=self.embedding.weight.device), persistent=False)
        self._tie_head()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: integers (batch, sequence). Returns logits (batch, sequence, vocab_size)."""
        if tokens.shape[1] > self.config.max_sequence_length:
            raise ValueError(f"{tokens.shape[1]} tokens, but max_sequence_length is {self.config.max_sequence_length}")
        rotations = self.rotations[:, positions(tokens.shape[1], tokens.device)]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotations)
        return self.head(self.norm(x))

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fill all weights, and the table of rotations, on the device where they are now.

        Normal with std sqrt(2 / (5 width)), "small init" of Nguyen and Salazar 2019 (arXiv:1910.05895): GPT-2's 0.02
        near its widths, more in narrower models. At width 128 it is 0.056: 300 steps of jobs/language_model.yaml then
        reach 2.27 bits per byte, not 2.57 (warm-up 30, bf16, a part of the validation data). The two projections of
        each block that add to the residual stream get 1/sqrt(2 num_blocks) of it, so that the stream's variance does
        not grow with depth (Radford et al. 2019, GPT-2, section 2.3).
        """
        self._tie_head()  # again, since to_empty gives each use of a shared tensor memory of its own
        self.rotations.copy_(rotation_table(self.config, device=self.rotations.device))
        std = math.sqrt(2 / (5 * self.config.width))
        nn.init.normal_(self.embedding.weight, std=std)
        for block in self.blocks:
            block.init_weights(std=std, residual_std=std / math.sqrt(2 * self.config.num_blocks))
        nn.init.ones_(self.norm.weight)
        if not self.config.tie_head:
            nn.init.normal_(self.head.weight, std=std)

    def _tie_head(self) -> None:
        if self.config.tie_head:
            self.head.weight = self.embedding.weight


class Block(nn.Module):
    """Attention, then the feed-forward layer, each added to what came in."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=NORM_EPSILON)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=NORM_EPSILON)
        self.feed_forward = FeedForward(config) if config.num_experts is None else mixture(config, config.num_experts)

    def forward(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotations)
        return x + self.feed_forward(self.feed_forward_norm(x))

    def init_weights(self, *, std: float, residual_std: float) -> None:
        nn.init.ones_(self.attention_norm.weight)
        nn.init.ones_(self.feed_forward_norm.weight)
        for layer in (self.attention.query, self.attention.key, self.attention.value):
            nn.init.normal_(layer.weight, std=std)
        nn.init.normal_(self.attention.output.weight, std=residual_std)
        inner, down = self.feed_forward_weights()
        for weights in inner:
            nn.init.normal_(weights, std=std)
        nn.init.normal_(down, std=residual_std)

    def feed_forward_weights(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Weights into the feed-forward layer, with those of a router, and out of it."""
        layer = self.feed_forward
        if isinstance(layer, MixtureOfExperts):
            return [layer.router.weight, layer.experts.gate, layer.experts.up], layer.experts.down
        return [layer.gate.weight, layer.up.weight], layer.down.weight


class Attention(nn.Module):
    """Causal attention with rotary positions and, where num_kv_heads is smaller, shared keys and values.

    Query, key and value are layers of their own rather than one: tensor parallelism cuts each by heads, and on CPU
    the three products take as long as one (12.8 and 12.7 ms for 4096 x 128, forward and backward, one core).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.shares_keys = config.kv_heads < config.num_heads
        self.query = nn.Linear(config.width, config.num_heads * config.head_width, bias=False)
        self.key = nn.Linear(config.width, config.kv_heads * config.head_width, bias=False)
        self.value = nn.Linear(config.width, config.kv_heads * config.head_width, bias=False)
        self.output = nn.Linear(config.num_heads * config.head_width, config.width, bias=False)

    def forward(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        # -1 and not the number of heads: under tensor parallelism a worker holds only some of them
        heads = (*x.shape[:2], -1, self.head_width)
        query = rotate(self.query(x).view(heads), rotations)
        key = rotate(self.key(x).view(heads), rotations)
        value = self.value(x).view(heads)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.shares_keys,
        )
        return self.output(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.inner_width, bias=False)
        self.up = nn.Linear(config.width, config.inner_width, bias=False)
        self.down = nn.Linear(config.inner_width, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def mixture(config: TransformerConfig, num_experts: int) -> MixtureOfExperts:
    """The mixture of experts of a block."""
    return MixtureOfExperts(
        config.width, config.inner_width, num_experts, top_k=config.experts_per_token, capacity=config.expert_capacity
    )


def tensor_plan(config: TransformerConfig, *, size: int, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """How the layers of a Transformer are split over `size` workers, by module name. Raises ConfigError.

    Attention by heads and the feed-forward layer by its inner width, each by columns and then by rows; embedding and head by
    the vocabulary, also where they are one table. sequence_parallel: norms and the residual stream by tokens, for inputs of
    max_sequence_length tokens or any other multiple of `size`. Sources: arXiv:1909.08053, arXiv:2205.05198.
    """
    for name, count in (
        ("num_heads", config.num_heads),
        ("num_kv_heads", config.kv_heads),
        ("ffn_width", config.inner_width),
    ):
        if count % size:
            raise ConfigError("parallel.tensor", size, f"it must divide {name}, which is {count}")
    if sequence_parallel and config.max_sequence_length % size:
        raise ConfigError(
            "parallel.tensor",
            size,
            f"sequence parallelism cuts sequences of {config.max_sequence_length} tokens, which it does not divide",
            "use --tensor.sequence-parallel false, or another sequence_length",
        )
    stream = Shard(1) if sequence_parallel else Replicate()  # (batch, sequence, width)
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }
    for name in ("query", "key", "value"):
        plan[f"blocks.*.attention.{name}"] = ColwiseParallel()
    plan["blocks.*.attention.output"] = RowwiseParallel(output_layouts=stream)
    if config.num_experts is not None:
        plan["blocks.*.feed_forward"] = MixtureParallel(input_layouts=stream, output_layouts=stream)
    else:
        plan |= {f"blocks.*.feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")}
        plan["blocks.*.feed_forward.down"] = RowwiseParallel(output_layouts=stream)
    if sequence_parallel:
        whole = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),), use_local_output=True)
        with_rotations = PrepareModuleInput(
            input_layouts=(stream, None), desired_input_layouts=(Replicate(), None), use_local_output=True
        )
        plan = {"blocks.*.attention": with_rotations, "blocks.*.feed_forward": whole, **plan}  # a mixture has its own
        for name in ("blocks.*.attention_norm", "blocks.*.feed_forward_norm", "norm"):
            plan[name] = SequenceParallel(use_local_output=True)
    return plan


def rotation_table(config: TransformerConfig, *, device: torch.device | None = None) -> torch.Tensor:
    """Cosine and sine of every position's angles, float32 (2, max_sequence_length, 1, head_width / 2)."""
    exponents = torch.arange(0, config.head_width, 2, device=device, dtype=torch.float32) / config.head_width
    positions = torch.arange(config.max_sequence_length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, config.rope_base**-exponents)[:, None, :]
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + head_width / 2) of the heads `x` (batch, sequence, heads, head_width) by its position.

    rotations: the rows of the table for these positions. Computed in the wider of both types, returned in that of `x`.
    """
    cos, sin = rotations
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)
