"""Layout of a model on the GPUs of a cluster: the degree of each type of parallelism, and related settings.

Ranks are numbered so that tensor parallel groups are neighbours, followed by context, data parallel, and the pipeline's
stages, so that the parallelism with most communication stays inside the node (Narayanan et al. 2021, arXiv:2104.04473,
section 3). Experts are spread over the first three, from the inside out."""

from dataclasses import dataclass
from typing import Literal

from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.errors import ConfigError

Sharding = Literal["none", "zero1", "zero2", "zero3"]
Checkpointing = Literal["none", "selective", "alternate", "full"]
Engine = Literal["torch", "deepspeed", "planned"]
Schedule = Literal["1f1b", "gpipe", "interleaved", "zero_bubble"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to distribute a training. `num_gpus` is the product of its degrees."""

    data: int = 1
    """Replicas of the model, sharded or not."""
    shard: int = 1
    """GPUs over which a replica's state is sharded: `data` for FSDP, fewer for HSDP, 1 for no sharding."""
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    """Ranks over which a layer's experts are spread. They are data, context and tensor parallel ranks, so they add no
    GPUs."""
    micro_batch: int = 1
    """Samples in one pass of one replica."""
    accumulation: int = 1
    """Micro-batches of a replica in an optimizer step."""
    sharding: Sharding = "none"
    checkpointing: Checkpointing = "none"
    """`selective` recomputes the attention scores, `alternate` every other operation or layer, `full` every layer."""
    sequence_parallel: bool = False
    """Whether norms and residuals are also divided by the tensor parallel degree."""
    keeps_gathered: bool = True
    """Whether tensors that sequence parallel gathers for a product are kept for the backward pass; Megatron gathers
    them again."""
    schedule: Schedule = "1f1b"
    even_stages: bool = False
    """Whether every stage has the same number of layers (Megatron); otherwise layers are divided so that the slowest
    stage is as fast as possible."""
    filled_stages: bool = False
    """Whether every stage takes layers until it exceeds its share of the compute (nanotron), so that the first stages
    hold most."""
    chunks: int = 1
    """Parts of the model that each pipeline stage holds; more than 1 only with the interleaved schedule."""
    precision: str = "bf16"
    is_mixed: bool = True
    """Whether compute is 16-bit with a 32-bit master copy; False trains only in `precision`."""
    gradient_bytes: float = 2
    """Bytes of one gradient element in the reduction; below 1 with compression."""
    optimizer_bytes: int = 8
    """Bytes of optimizer state per parameter, without the parameter itself: 8 for Adam, 4 for momentum, 0 for plain
    SGD."""
    compiled: bool = False
    overlaps_tensor: bool = False
    """Whether tensor parallel communication overlaps with the products (async TP)."""
    overlaps_data: bool = True
    """Whether gradients are reduced during the backward pass."""
    overlaps_gather: bool = False
    """Whether ZeRO-1 and 2 gather updated parameters during the next forward pass."""
    reduces_every_micro_batch: bool = False
    """Whether gradients are reduced after each micro-batch, not only after the last: FSDP without no_sync."""
    accumulates_whole: bool = False
    """Whether FSDP keeps whole gradients on every GPU until the last micro-batch, so that they are reduced once;
    otherwise it keeps a shard of them."""
    splits_logits: bool = True
    """Whether logits of tensor parallel stay sharded up to the loss; otherwise every GPU of the group gathers them
    all."""
    gather_bits: int = 16
    """Bits of a parameter in an all-gather; 8 with float8 or ZeRO++."""
    channels_last: bool = False
    """Whether images have the memory layout preferred by 16-bit convolutions, which is not PyTorch's default."""
    extra_s: float = 0.0
    """Seconds of the recipe's additional work in each step's backward pass, such as statistics of every gradient, if
    known from elsewhere."""
    engine: Engine = "torch"
    """Library that manages memory. `deepspeed` keeps gradients and the optimizer's inputs in long rows; `planned`
    allocates all tensors in advance (XLA, OneFlow), so that tensors that are not needed at the same time share memory,
    without fragmentation."""
    offloads: bool = False
    """Whether optimizer state is in the host's memory."""

    def __post_init__(self) -> None:
        for name in (
            "data",
            "shard",
            "tensor",
            "pipeline",
            "context",
            "expert",
            "micro_batch",
            "accumulation",
            "chunks",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"layout.{name}", getattr(self, name), "it must be at least 1")
        if self.data % self.shard:
            raise ConfigError("layout.shard", self.shard, f"it must divide the data parallel degree, {self.data}")
        if self.data * self.context * self.tensor % self.expert:
            raise ConfigError(
                "layout.expert",
                self.expert,
                f"it must divide the {self.data * self.context * self.tensor} ranks that hold the same layers",
            )
        if self.chunks > 1 and self.pipeline == 1:
            raise ConfigError("layout.chunks", self.chunks, "only a pipeline has chunks", "raise layout.pipeline")

    @property
    def num_gpus(self) -> int:
        """The product of the degrees."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def num_shards(self) -> int:
        """GPUs over which a replica's state is sharded, if at all; the ranks of a context parallel group hold the same
        state and share it."""
        return (self.shard if 1 < self.shard < self.data else self.data) * self.context

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step."""
        return self.data * self.micro_batch * self.accumulation

    @property
    def strategy(self) -> str:
        """The layout in terms of scaleray's strategies: `ddp`, `zero1`, `fsdp`, `hsdp`, with `tp` and `pp` if used."""
        state = {
            "none": "ddp",
            "zero1": "zero1",
            "zero2": "zero2",
            "zero3": "fsdp" if self.shard == self.data else "hsdp",
        }
        words = [state[self.sharding]] if self.data > 1 else []
        words += [f"tp{self.tensor}"] if self.tensor > 1 else []
        words += [f"pp{self.pipeline}"] if self.pipeline > 1 else []
        words += [f"cp{self.context}"] if self.context > 1 else []
        words += [f"ep{self.expert}"] if self.expert > 1 else []
        return " x ".join(words) or "single"

    def describe(self) -> str:
        """The strategy with the other settings that determine memory and time, as text."""
        # ZeRO-1 and 2 always shard over all replicas
        shard = f" shard {self.shard}" if self.sharding == "zero3" and self.shard != self.data else ""
        recompute = {
            "none": "",
            "selective": ", selective recompute",
            "alternate": ", alternate recompute",
            "full": ", full recompute",
        }[self.checkpointing]
        interleaved = ", interleaved" if self.chunks > 1 else ""
        return (
            f"{self.strategy}{shard}, data {self.data}, "
            f"micro-batch {self.micro_batch} x {self.accumulation}{recompute}{interleaved}"
        )


@dataclass(frozen=True)
class Group:
    """Ranks that take part in one collective, on `num_nodes` nodes. `num_rivals`: equal groups that share a node's
    network with this one."""

    num_ranks: int
    per_node: int
    num_nodes: int
    num_rivals: int = 1


def group_of(cluster: Cluster, num_ranks: int, stride: int, *, num_gpus: int) -> Group:
    """The group of `num_ranks` ranks, `stride` apart, on the `num_gpus` GPUs of `cluster` that a layout uses."""
    used = min(cluster.gpus_per_node, num_gpus)
    per_node = max(1, min(num_ranks, used // stride))
    num_nodes = -(-num_ranks // per_node)
    if num_ranks * stride >= num_gpus:
        # it spans all nodes, even if a scheduler gave some of them fewer GPUs than others
        num_nodes = max(num_nodes, min(cluster.num_nodes, num_ranks))
    rivals = max(1, used // per_node) if num_nodes > 1 else 1
    return Group(num_ranks, per_node, num_nodes, rivals)
