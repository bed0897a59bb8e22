"""Cost of training a model, independent of the GPU: parameters, FLOPs, memory traffic and activations of each block.

All values are per sample (a sequence, an image) and for the forward pass; the backward pass needs twice as many matrix
products. `transformers` and `convolutions` derive them from the shape; `training.flop_counter` counts a user's own
model by running it once.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Matmul:
    """A product of `rows` x `inner` with `inner` x `columns`, for each sample. `split`: the dimension that tensor
    parallelism divides.
    """

    rows: float
    columns: int
    inner: int
    split: Literal["columns", "rows", "none"] = "none"
    num_weights: int = 1
    """Number of matrices over which the rows are evenly spread, such as experts of a mixture that one grouped kernel
    computes."""

    @property
    def flops(self) -> float:
        """FLOPs of one sample: a multiplication and an addition for each element of the product's inner dimension."""
        return 2.0 * self.rows * self.columns * self.inner


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of the model that repeats `count` times. Bytes are for 16-bit activations, and double for 32-bit ones."""

    name: str
    count: int = 1
    num_params: float
    tied_params: float = 0.0
    """Parameters shared with another block, of which a pipeline keeps a copy if the two are on different stages."""
    matmuls: tuple[Matmul, ...] = ()
    attention_flops: float = 0.0
    """FLOPs of attention scores and their product with the values, without weights."""
    head_dim: int = 0
    conv_flops: float = 0.0
    """FLOPs of convolutions, which are not expressed as matrix products here."""
    winograd_flops: float = 0.0
    """Part of `conv_flops` with ungrouped filters of 3x3 or 5x5 and stride 1, which need fewer products in 32 bit."""
    traffic_bytes: float = 0.0
    """Bytes read and written by operations other than matrix products, divided only by sequence parallel: norms,
    activations, dropout, residual sums."""
    split_traffic_bytes: float = 0.0
    """Bytes read and written by operations other than matrix products, divided by tensor parallel."""
    score_traffic_bytes: float = 0.0
    """Bytes read and written for attention scores by a kernel that materialises them; tensor parallel divides them,
    selective recomputation repeats them."""
    kept_bytes: float = 0.0
    """Bytes kept for the backward pass without recomputation, divided only by sequence parallel."""
    split_kept_bytes: float = 0.0
    score_kept_bytes: float = 0.0
    """Bytes of attention scores kept by kernels that materialise them; divided by tensor parallel, dropped by selective
    recomputation."""
    eager_kept_bytes: float = 0.0
    """Part of `kept_bytes` that a compiler recomputes instead of keeping; `eager_split_kept_bytes`: the same for
    `split_kept_bytes`."""
    eager_split_kept_bytes: float = 0.0
    alternate_kept_bytes: float = 0.0
    """Bytes kept, in addition to the block's input, by recomputation that keeps the outputs of every other product and
    of attention; 0 if unknown."""
    boundary_bytes: float = 0.0
    """Bytes of the block's input: kept with full recomputation, sent between pipeline stages."""
    num_kernels: int = 0
    num_all_reduces: int = 0
    """Number of all-reduces of `boundary_bytes` in the forward pass, if tensor parallelism splits the block."""
    kv_bytes: float = 0.0
    """Bytes of the keys and values of all tokens, exchanged by the ranks of a context parallel group."""
    num_experts: int = 0
    """Experts among which a token is routed; 0 in a dense block."""
    active_experts: int = 0
    """Experts of each token."""
    expert_params: float = 0.0
    """Part of `num_params` that expert parallelism divides: all routed experts together."""
    routed_bytes: float = 0.0
    """Bytes of tokens sent to their experts, each token once per expert; as many return."""

    @property
    def forward_flops(self) -> float:
        """FLOPs of one sample through one such block."""
        return sum(product.flops for product in self.matmuls) + self.attention_flops + self.conv_flops


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model in the planner's form, in the order in which a sample passes through it."""

    name: str
    blocks: tuple[Block, ...]
    tokens_per_sample: int = 1
    kind: Literal["transformer", "cnn", "other"] = "transformer"
    vocab: int = 0
    has_flops: bool = True
    """Whether FLOPs are known; if only the number of parameters is known, a measured step time is needed."""
    num_heads: int = 0
    largest_tensor_params: float = 0.0
    """Elements of the parameter whose gradient is ready last and cannot be split, usually a word embedding."""
    notes: tuple[str, ...] = ()
    is_guessed: bool = False
    """Whether only the model's size is known, so that its shape is a typical one."""

    @property
    def num_params(self) -> float:
        """Number of all parameters; tied ones count once."""
        return sum(block.num_params * block.count for block in self.blocks)

    @property
    def num_active_params(self) -> float:
        """Number of parameters used for one token, counting only those routed experts that a token visits."""
        idle = sum(
            block.expert_params * (1 - block.active_experts / block.num_experts) * block.count
            for block in self.blocks
            if block.num_experts
        )
        return self.num_params - idle

    @property
    def num_experts(self) -> int:
        """Experts of a layer that has them; 0 in a dense model."""
        return max(block.num_experts for block in self.blocks)

    @property
    def num_tensors(self) -> float:
        """Approximate number of parameter tensors: 16 in a layer with biases, three for a convolution with its norm."""
        if self.kind == "transformer":
            return 16.0 * self.num_layers + 6
        return float(sum(block.count * block.num_kernels for block in self.blocks)) or 3.0 * self.num_layers

    @property
    def forward_flops(self) -> float:
        """FLOPs of the forward pass of one sample."""
        return sum(block.forward_flops * block.count for block in self.blocks)

    @property
    def train_flops(self) -> float:
        """FLOPs of one sample, forward and backward, without recomputation, as counted for MFU."""
        return 3.0 * self.forward_flops

    @property
    def num_layers(self) -> int:
        """Number of repeated blocks, between which a pipeline can be cut."""
        return sum(block.count for block in self.blocks if block.count > 1)


def of_size(
    name: str, num_params: float, *, tokens_per_sample: int = 1, num_layers: int = 1, largest_params: float = 0.0
) -> ModelProfile:
    """Return a model of which only the number of parameters is known, so that its compute must be measured."""
    block = Block(name="layer", count=num_layers, num_params=num_params / num_layers)
    return ModelProfile(
        name=name,
        blocks=(block,),
        kind="other",
        tokens_per_sample=tokens_per_sample,
        has_flops=False,
        largest_tensor_params=largest_params,
    )
