"""Costs of a transformer, derived from its shape: dense models, grouped and latent attention, mixtures of experts.

Sources: activation bytes of a layer, Korthikanti et al. 2022, arXiv:2205.05198, section 4; FLOPs per token as in the
appendix of Narayanan et al. 2021, arXiv:2104.04473, but with attention counted once for causal masks if the kernel
skips the other half.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from scaleray.errors import ConfigError
from scaleray.planner.models.block_counts import Block, Matmul, ModelProfile


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """Shape of a transformer, which determines its costs."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    kv_heads: int | None = None
    ffn: int | None = None
    """Width inside the MLP; 4 x hidden if not given."""
    head_dim: int | None = None
    is_gated: bool = False
    """Whether the MLP is a SwiGLU, with three matrices instead of two."""
    is_causal: bool = True
    fused_attention: bool = True
    """Whether attention is Flash attention, which keeps no scores in memory and skips the masked half."""
    has_dropout: bool = False
    tied_embeddings: bool = False
    learned_positions: bool = False
    has_lm_head: bool = True
    predicted_share: float = 1.0
    """Share of the tokens for which the head is computed; 0.15 in BERT's pretraining."""
    experts: int = 0
    """Routed experts of a layer, each as wide as `expert_ffn`; 0 for a dense model."""
    active_experts: int = 0
    """Experts to which each token is sent."""
    expert_ffn: int | None = None
    """Width of a routed expert; `ffn` if not given."""
    shared_ffn: int = 0
    """Total width of the experts used by every token."""
    dense_layers: int = 0
    """Number of the `layers` without experts."""
    query_rank: int = 0
    """Latent attention (DeepSeek-V2, arXiv:2405.04434): rank of the compressed queries; 0: not compressed."""
    kv_rank: int = 0
    """Latent attention: rank of the compressed keys and values; 0: not compressed."""
    rotary_dim: int = 0
    """With `kv_rank`: additional dimensions of each head, besides `head_dim`, that only carry the position."""
    logit_bytes: int = 14
    """Bytes per logit at the peak of the loss: 2 for the logit and 12 for the 32-bit softmax, the softmax's gradient
    and the logit's gradient. 8 if all have 16 bits; 6 if the softmax replaces the logit in place, and the gradient the
    softmax (Megatron, nanotron)."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.default == 0 else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise ConfigError(f"model.{field.name}", value, f"it must be at least {least}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ConfigError("model.kv_heads", self.kv_heads, f"it must divide the number of heads, {self.heads}")
        if self.experts and not 1 <= self.active_experts <= self.experts:
            raise ConfigError(
                "model.active_experts", self.active_experts, f"it must be 1 to {self.experts}, the number of experts"
            )
        if self.dense_layers > self.layers:
            raise ConfigError(
                "model.dense_layers", self.dense_layers, f"it must be at most the number of layers, {self.layers}"
            )


def transformer(shape: TransformerShape, name: str = "transformer") -> ModelProfile:
    """Return the embedding, `layers` blocks (dense ones, then those with experts) and the head."""
    hidden, sequence = shape.hidden, shape.sequence
    token_bytes = 2.0 * sequence
    num_mixed = shape.layers - shape.dense_layers if shape.experts else 0
    layers = [_layer(shape, "layer", shape.layers - num_mixed, is_mixed=False)] if num_mixed < shape.layers else []
    layers += [_layer(shape, "expert layer", num_mixed, is_mixed=True)] if num_mixed else []
    table = shape.vocab * hidden
    positions = sequence * hidden if shape.learned_positions else 0
    embedding = Block(
        name="embedding",
        num_params=table + positions,
        traffic_bytes=token_bytes * 3 * hidden,
        kept_bytes=8.0 * sequence,
        boundary_bytes=8.0 * sequence,
        num_kernels=4,
        num_all_reduces=1,
    )
    predicted = sequence * shape.predicted_share
    head = Block(
        name="head",
        tied_params=table if shape.tied_embeddings and shape.has_lm_head else 0,
        num_params=hidden + (0 if shape.tied_embeddings or not shape.has_lm_head else table),
        matmuls=(Matmul(predicted, shape.vocab, hidden, "columns"),) if shape.has_lm_head else (),
        # logits in 16 and 32 bit, their softmax and gradient
        split_traffic_bytes=(16.0 * predicted * shape.vocab) if shape.has_lm_head else 0.0,
        split_kept_bytes=float(predicted * shape.logit_bytes * shape.vocab) if shape.has_lm_head else 0.0,
        kept_bytes=token_bytes * 2 * hidden,
        boundary_bytes=token_bytes * hidden,
        num_kernels=10,
        num_all_reduces=0,
    )
    return ModelProfile(
        name=name,
        blocks=(embedding, *layers, head),
        tokens_per_sample=sequence,
        vocab=shape.vocab,
        num_heads=shape.heads,
        largest_tensor_params=float(table),
    )


def _layer(shape: TransformerShape, name: str, count: int, *, is_mixed: bool) -> Block:
    """One of the repeated blocks: attention with an MLP or with experts."""
    hidden, token_bytes = shape.hidden, 2.0 * shape.sequence
    attention, mlp = _attention(shape), _mlp(shape, is_mixed=is_mixed)
    kept = _kept_elements(shape, attention, mlp)
    score_bytes = 0.0 if shape.fused_attention else shape.heads * shape.sequence * token_bytes
    return Block(
        name=name,
        count=count,
        num_params=attention.num_params + mlp.num_params + _vector_params(shape, attention, mlp),
        matmuls=attention.matmuls + mlp.matmuls,
        head_dim=attention.head_dim,
        attention_flops=attention.flops,
        kv_bytes=token_bytes * 2 * attention.kv_width,
        # two norms, two residual sums and dropouts read and write about 10 hidden vectors per token;
        # each routed copy is read and written once on each way
        traffic_bytes=token_bytes * (10 + (4 if shape.has_dropout else 0) + 4 * mlp.routed) * hidden,
        # the activation reads and writes 2 to 3 MLP widths
        split_traffic_bytes=token_bytes * ((mlp.inputs + 1) * mlp.inside + 2 * attention.width),
        score_traffic_bytes=6.0 * score_bytes,
        kept_bytes=token_bytes * kept.unsplit,
        split_kept_bytes=token_bytes * kept.split,
        score_kept_bytes=(2.5 if shape.has_dropout else 1.0) * score_bytes,
        # a compiler fuses 32-bit norms and the operations before the gate's product into their consumers
        eager_kept_bytes=token_bytes * 4 * hidden if shape.is_gated else 0.0,
        eager_split_kept_bytes=token_bytes * mlp.inside if shape.is_gated else 0.0,
        alternate_kept_bytes=token_bytes * kept.alternate,
        boundary_bytes=token_bytes * hidden,
        num_kernels=(22 if shape.fused_attention else 30) + (20 if is_mixed else 0),
        num_all_reduces=2,
        num_experts=shape.experts if is_mixed else 0,
        active_experts=mlp.routed,
        expert_params=mlp.expert_params,
        routed_bytes=token_bytes * mlp.routed * hidden,
    )


def _vector_params(shape: TransformerShape, attention: _Attention, mlp: _Mlp) -> int:
    """Parameters of norms and biases: gated models have only scales; the others have biases and two vectors per
    norm."""
    if shape.is_gated:
        return 2 * shape.hidden
    return 2 * (2 * shape.hidden) + (attention.width + 2 * attention.kv_width) + 2 * shape.hidden + mlp.width


@dataclass(frozen=True)
class _Kept:
    """Elements per token that are kept for the backward pass, by whether tensor parallelism splits them; `alternate`:
    those that alternate recomputation keeps."""

    unsplit: int
    split: int
    alternate: int


def _kept_elements(shape: TransformerShape, attention: _Attention, mlp: _Mlp) -> _Kept:
    """Activations that a layer keeps (arXiv:2205.05198)."""
    hidden, inside, routed = shape.hidden, mlp.inside, mlp.routed
    # inputs of norms, residual branches
    unsplit = 4 * hidden + (hidden if shape.has_dropout else 0)
    # recent gated models compute norms in 32 bit: input and normalised values are kept in addition to the
    # result
    unsplit += 4 * hidden if shape.is_gated else 0
    split = (
        2 * attention.width
        + 2 * attention.kv_width
        + (mlp.inputs + 1) * inside
        + (inside if shape.is_gated else 0)
        + 2 * routed * hidden  # tokens in the order of their experts, and the experts' outputs
    )
    # of seven products those of query, value, gate and output; of six those of query, value and the one
    # before the activation
    alternate = 2 * attention.width + attention.kv_width + inside + routed * hidden + (hidden if shape.is_gated else 0)
    return _Kept(unsplit, split, alternate)


@dataclass(frozen=True)
class _Mlp:
    """An MLP, or routed experts together with shared ones.

    inputs: number of matrices before the activation. width: the MLP's own, or that of shared experts. routed: number of
    experts per token. inside: total width used by a token.
    """

    matmuls: tuple[Matmul, ...]
    num_params: float
    expert_params: float
    inputs: int
    width: int
    routed: int
    inside: int


def _mlp(shape: TransformerShape, *, is_mixed: bool) -> _Mlp:
    hidden, sequence = shape.hidden, shape.sequence
    inputs = 2 if shape.is_gated else 1
    width = shape.shared_ffn if is_mixed else shape.ffn or 4 * hidden
    expert_width = (shape.expert_ffn or shape.ffn or 4 * hidden) if is_mixed else 0
    routed = shape.active_experts if is_mixed else 0
    matmuls: tuple[Matmul, ...] = ()
    if width:
        matmuls += (Matmul(sequence, inputs * width, hidden, "columns"), Matmul(sequence, hidden, width, "rows"))
    if is_mixed:
        rows = sequence * routed
        matmuls += (
            Matmul(sequence, shape.experts, hidden),
            Matmul(rows, inputs * expert_width, hidden, "columns", shape.experts),
            Matmul(rows, hidden, expert_width, "rows", shape.experts),
        )
    expert_params = float(shape.experts * (inputs + 1) * hidden * expert_width) if is_mixed else 0.0
    router_params = shape.experts * hidden if is_mixed else 0
    return _Mlp(
        matmuls,
        num_params=(inputs + 1) * hidden * width + expert_params + router_params,
        expert_params=expert_params,
        inputs=inputs,
        width=width,
        routed=routed,
        inside=width + routed * expert_width,
    )


@dataclass(frozen=True)
class _Attention:
    """Attention's products and widths. `width`: of all heads' outputs; `kv_width`: of keys, and of values, as exchanged
    between ranks."""

    matmuls: tuple[Matmul, ...]
    num_params: float
    width: int
    kv_width: int
    head_dim: int
    flops: float


def _attention(shape: TransformerShape) -> _Attention:
    hidden, sequence, heads = shape.hidden, shape.sequence, shape.heads
    head_dim = shape.head_dim or hidden // heads
    width = heads * head_dim
    # only fused kernels skip the part hidden by a causal mask
    visible = 0.5 if shape.is_causal and shape.fused_attention else 1.0
    if not shape.kv_rank:
        kv_width = (shape.kv_heads or heads) * head_dim
        products = (Matmul(sequence, width + 2 * kv_width, hidden, "columns"), Matmul(sequence, hidden, width, "rows"))
        score_width = 2 * width
    else:
        kv_width = width
        query_dim = head_dim + shape.rotary_dim
        queries = (
            (
                Matmul(sequence, shape.query_rank, hidden),
                Matmul(sequence, heads * query_dim, shape.query_rank, "columns"),
            )
            if shape.query_rank
            else (Matmul(sequence, heads * query_dim, hidden, "columns"),)
        )
        products = (
            *queries,
            Matmul(sequence, shape.kv_rank + shape.rotary_dim, hidden),
            Matmul(sequence, 2 * width, shape.kv_rank, "columns"),
            Matmul(sequence, hidden, width, "rows"),
        )
        score_width = width + heads * query_dim
    params = float(sum(product.columns * product.inner for product in products))
    return _Attention(products, params, width, kv_width, head_dim, 2.0 * visible * sequence * sequence * score_width)
