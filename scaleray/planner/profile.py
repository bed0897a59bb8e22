"""What a model costs to train, before any GPU is named: parameters, FLOPs, memory traffic and activations of each block.

Everything is per sample (a sequence, an image) and in forward direction; the backward pass costs twice the matrix products.
`transformer` and `resnet` count from the shape; `training.model_profile` counts a user's own model by running it once.

Sources: activation bytes of a layer, Korthikanti et al. 2022, arXiv:2205.05198, section 4; FLOPs per token as in the appendix
of Narayanan et al. 2021, arXiv:2104.04473, but with attention counted once for causal masks where the kernel skips the other half.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from scaleray.errors import ConfigError

Split = Literal["columns", "rows", "none"]


@dataclass(frozen=True)
class Matmul:
    """`rows` x `inner` times `inner` x `columns`, for each sample. What tensor parallel divides stands in `split`."""

    rows: float
    columns: int
    inner: int
    split: Split = "none"
    num_weights: int = 1
    """Matrices that the rows are spread over evenly: the experts of a mixture, computed by one grouped kernel."""

    @property
    def flops(self) -> float:
        """Of one sample: a multiplication and an addition for each element of the product's inner dimension."""
        return 2.0 * self.rows * self.columns * self.inner


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of the model that repeats `count` times. Bytes are of 16-bit activations; wider ones double."""

    name: str
    count: int = 1
    num_params: float
    tied_params: float = 0.0
    """Shared with another block; a pipeline keeps a copy where the two are on different stages."""
    matmuls: tuple[Matmul, ...] = ()
    attention_flops: float = 0.0
    """Scores and their product with the values, which no weight takes part in."""
    head_dim: int = 0
    conv_flops: float = 0.0
    """Convolutions, which are not written as matrix products here."""
    winograd_flops: float = 0.0
    """The part of `conv_flops` whose filters are 3x3 or 5x5, ungrouped and of stride 1: in 32 bit they need fewer products."""
    traffic_bytes: float = 0.0
    """Read and written by what is no matrix product: norms, activations, dropout, residual sums."""
    split_traffic_bytes: float = 0.0
    """The part of it that tensor parallel divides; the rest only sequence parallel does."""
    score_traffic_bytes: float = 0.0
    """Of attention scores that a kernel writes out; tensor parallel divides it, selective recomputation repeats it."""
    kept_bytes: float = 0.0
    """Kept for the backward pass when nothing is recomputed."""
    split_kept_bytes: float = 0.0
    score_kept_bytes: float = 0.0
    """Attention scores kept by kernels that write them out; divided by tensor parallel, dropped by selective recomputation."""
    eager_kept_bytes: float = 0.0
    """The part of `kept_bytes` that a compiler computes again on the way rather than keeps; `eager_split_kept_bytes` of `split_kept_bytes`."""
    eager_split_kept_bytes: float = 0.0
    alternate_kept_bytes: float = 0.0
    """Kept, besides what enters the block, by recomputation that keeps every other product's output and attention's; 0 where that is not known."""
    boundary_bytes: float = 0.0
    """What enters the block: kept with full recomputation, sent between pipeline stages."""
    num_kernels: int = 0
    num_all_reduces: int = 0
    """Of `boundary_bytes` each, in forward direction, when the block is split by tensor parallel."""
    kv_bytes: float = 0.0
    """Keys and values of all tokens, which the ranks of a context parallel group show each other."""
    num_experts: int = 0
    """That a token is routed among; 0 in a dense block."""
    active_experts: int = 0
    """That each token visits."""
    expert_params: float = 0.0
    """The part of `num_params` that expert parallelism divides: all routed experts together."""
    routed_bytes: float = 0.0
    """Tokens on their way to their experts, every token as often as it has experts; the way back is as long."""

    @property
    def forward_flops(self) -> float:
        """Of one sample through one such block."""
        return sum(product.flops for product in self.matmuls) + self.attention_flops + self.conv_flops


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model as the planner sees it, in the order in which a sample passes through it."""

    name: str
    blocks: tuple[Block, ...]
    tokens_per_sample: int = 1
    kind: Literal["transformer", "cnn", "other"] = "transformer"
    vocab: int = 0
    has_flops: bool = True
    """False where only the number of parameters is known: such a model needs a measured step time."""
    num_heads: int = 0
    largest_tensor_params: float = 0.0
    """Of the parameter whose gradient comes last and cannot be cut, a word embedding as a rule."""
    notes: tuple[str, ...] = ()

    @property
    def num_params(self) -> float:
        """All of them; tied ones once."""
        return sum(block.num_params * block.count for block in self.blocks)

    @property
    def num_active_params(self) -> float:
        """Those that take part in one token: of the routed experts only as many as a token visits."""
        idle = sum(block.expert_params * (1 - block.active_experts / block.num_experts) * block.count for block in self.blocks if block.num_experts)  # fmt: skip
        return self.num_params - idle

    @property
    def num_experts(self) -> int:
        """Of a layer that has them; 0 in a dense model."""
        return max(block.num_experts for block in self.blocks)

    @property
    def num_tensors(self) -> float:
        """About how many tensors the parameters are: 16 in a layer with biases, three for a convolution with its norm."""
        if self.kind == "transformer":
            return 16.0 * self.num_layers + 6
        return float(sum(block.count * block.num_kernels for block in self.blocks)) or 3.0 * self.num_layers

    @property
    def forward_flops(self) -> float:
        """Of one sample."""
        return sum(block.forward_flops * block.count for block in self.blocks)

    @property
    def train_flops(self) -> float:
        """Of one sample, forward and backward, without recomputation: what MFU counts."""
        return 3.0 * self.forward_flops

    @property
    def num_layers(self) -> int:
        """Of the repeated blocks: what a pipeline cuts between."""
        return sum(block.count for block in self.blocks if block.count > 1)


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """The numbers a transformer's cost follows from."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    kv_heads: int | None = None
    ffn: int | None = None
    """Width inside the MLP; 4 x hidden where it is not given."""
    head_dim: int | None = None
    is_gated: bool = False
    """SwiGLU: three matrices instead of two."""
    is_causal: bool = True
    fused_attention: bool = True
    """Flash attention: no scores in memory, and the masked half is skipped."""
    has_dropout: bool = False
    tied_embeddings: bool = False
    learned_positions: bool = False
    has_lm_head: bool = True
    predicted_share: float = 1.0
    """Of the tokens that the head is computed for; 0.15 in BERT's pretraining."""
    experts: int = 0
    """Routed experts of a layer, each as wide as `expert_ffn`; 0 for a dense model."""
    active_experts: int = 0
    """That each token is sent to."""
    expert_ffn: int | None = None
    """`ffn` where it is not given."""
    shared_ffn: int = 0
    """Width of the experts that every token visits, all together."""
    dense_layers: int = 0
    """Of `layers`, those without experts."""
    query_rank: int = 0
    """Latent attention (DeepSeek-V2, arXiv:2405.04434): queries go through as many dimensions; 0: not compressed."""
    kv_rank: int = 0
    """The same for keys and values."""
    rotary_dim: int = 0
    """With `kv_rank`: dimensions of each head beside `head_dim` that only carry the position."""
    logit_bytes: int = 14
    """At the peak of the loss, for each logit: 2 for itself and 12 for its 32-bit softmax, the gradient of that and its own. 8 where all of
    them have 16 bits; 6 where the softmax takes the logit's place and the gradient the softmax's (Megatron, nanotron)."""

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
    """Embedding, `layers` blocks (dense ones, then those with experts) and the head."""
    hidden, sequence = shape.hidden, shape.sequence
    token_bytes = 2.0 * sequence
    num_mixed = shape.layers - shape.dense_layers if shape.experts else 0
    layers = [_layer(shape, "layer", shape.layers - num_mixed, is_mixed=False)] if num_mixed < shape.layers else []
    layers += [_layer(shape, "expert layer", num_mixed, is_mixed=True)] if num_mixed else []
    table = shape.vocab * hidden
    positions = sequence * hidden if shape.learned_positions else 0
    embedding = Block(
        name="embedding", num_params=table + positions, traffic_bytes=token_bytes * 3 * hidden,
        kept_bytes=8.0 * sequence, boundary_bytes=8.0 * sequence, num_kernels=4, num_all_reduces=1,
    )  # fmt: skip
    predicted = sequence * shape.predicted_share
    head = Block(
        name="head", tied_params=table if shape.tied_embeddings and shape.has_lm_head else 0, num_params=hidden + (0 if shape.tied_embeddings or not shape.has_lm_head else table),
        matmuls=(Matmul(predicted, shape.vocab, hidden, "columns"),) if shape.has_lm_head else (),
        # logits in 16 and 32 bit, their softmax and gradient
        split_traffic_bytes=(16.0 * predicted * shape.vocab) if shape.has_lm_head else 0.0,
        split_kept_bytes=float(predicted * shape.logit_bytes * shape.vocab) if shape.has_lm_head else 0.0,
        kept_bytes=token_bytes * 2 * hidden, boundary_bytes=token_bytes * hidden, num_kernels=10, num_all_reduces=0,
    )  # fmt: skip
    return ModelProfile(
        name=name, blocks=(embedding, *layers, head), tokens_per_sample=sequence, vocab=shape.vocab,
        num_heads=shape.heads, largest_tensor_params=float(table),
    )  # fmt: skip


def _layer(shape: TransformerShape, name: str, count: int, *, is_mixed: bool) -> Block:
    """One of the repeated blocks: attention and an MLP, or attention and experts."""
    hidden, sequence = shape.hidden, shape.sequence
    token_bytes = 2.0 * sequence
    attention = _attention(shape)
    attention_width, kv_width = attention.width, attention.kv_width
    inputs = 2 if shape.is_gated else 1
    # widths of what every token passes, and of what it is routed through
    ffn = shape.shared_ffn if is_mixed else shape.ffn or 4 * hidden
    expert_ffn = (shape.expert_ffn or shape.ffn or 4 * hidden) if is_mixed else 0
    routed = shape.active_experts if is_mixed else 0
    matmuls = [*attention.matmuls]
    if ffn:
        matmuls += [Matmul(sequence, inputs * ffn, hidden, "columns"), Matmul(sequence, hidden, ffn, "rows")]
    if is_mixed:
        rows = sequence * routed
        matmuls += [Matmul(sequence, shape.experts, hidden),
                    Matmul(rows, inputs * expert_ffn, hidden, "columns", shape.experts), Matmul(rows, hidden, expert_ffn, "rows", shape.experts)]  # fmt: skip
    expert_params = float(shape.experts * (inputs + 1) * hidden * expert_ffn) if is_mixed else 0.0
    params = (
        attention.num_params + (inputs + 1) * hidden * ffn + expert_params + (shape.experts * hidden if is_mixed else 0)
    )
    # gated models have scales only; the others have biases and two vectors a norm
    params += 2 * hidden if shape.is_gated else 2 * (2 * hidden) + (attention_width + 2 * kv_width) + 2 * hidden + ffn
    # elements per token that stay for the backward pass, from arXiv:2205.05198: norms' inputs, residual branches
    unsplit_kept = 4 * hidden + (hidden if shape.has_dropout else 0)
    # gated models as they are written today compute norms in 32 bit: input and normalized values are kept besides the result
    unsplit_kept += 4 * hidden if shape.is_gated else 0
    inside = ffn + routed * expert_ffn
    split_kept = (
        attention_width
        + 2 * kv_width
        + attention_width
        + (inputs + 1) * inside
        + (inside if shape.is_gated else 0)
        + 2 * routed * hidden  # tokens in the order of their experts, and what these made of them
    )
    # of seven products the query's, the value's, the gate's and the last; of six the query's, the value's and the one before the activation
    alternate_kept = 2 * attention_width + kv_width + inside + routed * hidden + (hidden if shape.is_gated else 0)
    scores = (
        0.0 if shape.fused_attention else (2.5 if shape.has_dropout else 1.0) * shape.heads * sequence * token_bytes
    )
    # two norms, two residual sums and dropouts read and write about 10 hidden vectors a token; activation 2 to 3 MLP widths
    score_traffic = 0.0 if shape.fused_attention else 6.0 * shape.heads * sequence * token_bytes
    return Block(
        name=name, count=count, num_params=params, matmuls=tuple(matmuls), head_dim=attention.head_dim,
        attention_flops=attention.flops, kv_bytes=token_bytes * 2 * kv_width,
        # each routed copy is read and written once on its way out and once on its way back
        traffic_bytes=token_bytes * (10 + (4 if shape.has_dropout else 0) + 4 * routed) * hidden,
        split_traffic_bytes=token_bytes * ((inputs + 1) * inside + 2 * attention_width), score_traffic_bytes=score_traffic,
        kept_bytes=token_bytes * unsplit_kept, split_kept_bytes=token_bytes * split_kept, score_kept_bytes=scores,
        # a compiler fuses 32-bit norms and what stands before the gate's product into what needs them
        eager_kept_bytes=token_bytes * 4 * hidden if shape.is_gated else 0.0,
        eager_split_kept_bytes=token_bytes * inside if shape.is_gated else 0.0,
        alternate_kept_bytes=token_bytes * alternate_kept,
        boundary_bytes=token_bytes * hidden, num_kernels=(22 if shape.fused_attention else 30) + (20 if is_mixed else 0), num_all_reduces=2,
        num_experts=shape.experts if is_mixed else 0, active_experts=routed, expert_params=expert_params,
        routed_bytes=token_bytes * routed * hidden,
    )  # fmt: skip


@dataclass(frozen=True)
class _Attention:
    """`width` is of all heads' outputs, `kv_width` of keys, and of values, as they are exchanged between ranks."""

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
    # only fused kernels skip what a causal mask hides
    visible = 0.5 if shape.is_causal and shape.fused_attention else 1.0
    if not shape.kv_rank:
        kv_width = (shape.kv_heads or heads) * head_dim
        products = (
            Matmul(sequence, width + 2 * kv_width, hidden, "columns"), Matmul(sequence, hidden, width, "rows"),
        )  # fmt: skip
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
            *queries, Matmul(sequence, shape.kv_rank + shape.rotary_dim, hidden),
            Matmul(sequence, 2 * width, shape.kv_rank, "columns"), Matmul(sequence, hidden, width, "rows"),
        )  # fmt: skip
        score_width = width + heads * query_dim
    params = float(sum(product.columns * product.inner for product in products))
    return _Attention(products, params, width, kv_width, head_dim, 2.0 * visible * sequence * sequence * score_width)


RESNETS = {18: ((2, 2, 2, 2), False), 34: ((3, 4, 6, 3), False), 50: ((3, 4, 6, 3), True), 101: ((3, 4, 23, 3), True), 152: ((3, 8, 36, 3), True)}  # fmt: skip


def resnet(depth: int, *, image: int = 224, num_classes: int = 1000, is_small_stem: bool = False) -> ModelProfile:
    """A residual network of `depth` layers, version 1.5. `is_small_stem`: one 3x3 convolution, as for CIFAR.

    Raises ConfigError for a depth that He et al. 2015, arXiv:1512.03385, do not list.
    """
    if depth not in RESNETS:
        raise ConfigError("ResNet depth", depth, f"it must be one of {', '.join(map(str, RESNETS))}")
    counts, has_bottleneck = RESNETS[depth]
    expansion = 4 if has_bottleneck else 1
    size = image if is_small_stem else image // 2
    parts = [_conv("stem", 3, 64, 3 if is_small_stem else 7, size)]
    size, width_in = (size if is_small_stem else size // 2), 64
    for stage, count in enumerate(counts):
        width = 64 * 2**stage
        for index in range(count):
            stride = 2 if stage and not index else 1
            inside, size = size, size // stride
            name = f"stage{stage + 1}.{index}"
            if has_bottleneck:
                convs = [_conv(name, width_in, width, 1, inside), _conv(name, width, width, 3, size, stride=stride),
                         _conv(name, width, 4 * width, 1, size)]  # fmt: skip
            else:
                convs = [_conv(name, width_in, width, 3, size, stride=stride), _conv(name, width, width, 3, size)]
            if stride > 1 or width_in != expansion * width:
                convs.append(_conv(name, width_in, expansion * width, 1, size, copies=1))
            parts.append(_sum_of(name, convs))
            width_in = expansion * width
    classes = Block(name="classifier", num_params=width_in * num_classes + num_classes, conv_flops=2.0 * width_in * num_classes,
                    traffic_bytes=2.0 * width_in, kept_bytes=2.0 * width_in, num_kernels=3)  # fmt: skip
    return ModelProfile(name=f"ResNet-{depth}", blocks=(*parts, classes), kind="cnn")


def _conv(
    name: str, channels_in: int, channels: int, kernel: int, size: int, *, stride: int = 1, copies: int = 2
) -> Block:
    """`copies` of the output stay: norm's input and, where an activation follows, its output."""
    outputs = channels * size * size
    return Block(
        name=name, num_params=channels_in * channels * kernel * kernel + 2 * channels,
        conv_flops=2.0 * outputs * channels_in * kernel * kernel,
        winograd_flops=2.0 * outputs * channels_in * kernel * kernel if kernel == 3 and stride == 1 else 0.0,
        # the convolution writes it, batch norm reads it twice and writes it, the activation reads and writes it, the next reads it
        traffic_bytes=2.0 * 7 * outputs, kept_bytes=2.0 * copies * outputs, boundary_bytes=2.0 * outputs, num_kernels=3,
    )  # fmt: skip


def _sum_of(name: str, parts: list[Block]) -> Block:
    return Block(
        name=name, num_params=sum(part.num_params for part in parts), conv_flops=sum(part.conv_flops for part in parts),
        winograd_flops=sum(part.winograd_flops for part in parts),
        traffic_bytes=sum(part.traffic_bytes for part in parts), kept_bytes=sum(part.kept_bytes for part in parts),
        boundary_bytes=parts[-1].boundary_bytes, num_kernels=1 + sum(part.num_kernels for part in parts),
    )  # fmt: skip


def convolutional(
    name: str, *, num_params: float, forward_macs: float, outputs: float, num_layers: int, largest_params: float = 0.0,
    winograd_share: float = 0.0, has_norms: bool = True,
) -> ModelProfile:  # fmt: skip
    """A convolutional network by the figures of its paper: `outputs` are the elements that its convolutions write,
    `winograd_share` the part of the products in 3x3 or 5x5 filters of stride 1."""
    # without a norm: written, read and written by the activation, read by the next layer; what the activation wrote in its place stays
    passes, copies = (7, 2) if has_norms else (4, 1)
    block = Block(
        name="layer", count=num_layers, num_params=num_params / num_layers, conv_flops=2.0 * forward_macs / num_layers,
        winograd_flops=2.0 * forward_macs * winograd_share / num_layers,
        traffic_bytes=2.0 * passes * outputs / num_layers, kept_bytes=2.0 * copies * outputs / num_layers,
        boundary_bytes=2.0 * outputs / num_layers, num_kernels=3,
    )  # fmt: skip
    return ModelProfile(name=name, blocks=(block,), kind="cnn", largest_tensor_params=largest_params)


def of_size(name: str, num_params: float, *, tokens_per_sample: int = 1, num_layers: int = 1, largest_params: float = 0.0) -> ModelProfile:  # fmt: skip
    """A model of which only the number of parameters is known: its gradients have a size, its compute must be measured."""
    block = Block(name="layer", count=num_layers, num_params=num_params / num_layers)
    return ModelProfile(name=name, blocks=(block,), kind="other", tokens_per_sample=tokens_per_sample, has_flops=False,
                        largest_tensor_params=largest_params)  # fmt: skip
