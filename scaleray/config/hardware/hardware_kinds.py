"""Types for a GPU, a link between GPUs, and a network between nodes.

Used throughout the planner, and wherever the peak of a device is needed (MFU). The values are in `hardware.catalogue`,
each entry with its source; `lookup` finds one by a common name, and users add or replace entries with a YAML file
(`hardware_file`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from scaleray.config.hardware.measured_collectives import MeasuredTable
from scaleray.errors import ConfigError

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
WIDER = {
    "fp4": ("fp4", "fp8", "bf16", "fp16", "fp32"),
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "bf16": ("bf16", "fp32"),
    "fp16": ("fp16", "fp32"),
    "tf32": ("tf32", "fp32"),
    "fp32": ("fp32",),
}
"""Precisions with their own compute units, in order of preference."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Link between the GPUs of one node. Bandwidths are per GPU and direction, in 10^9 bytes per second."""

    name: str
    nominal_gb_per_s: float
    """Total of all links of one GPU, from the data sheet."""
    bus_gb_per_s: float
    """All-reduce bus bandwidth measured with large messages inside a node (nccl-tests' definition)."""
    latency_us: float
    """Latency of one hop of a collective, including the kernel's part."""
    source: str
    switch_sum_gb_per_s: float | None = None
    """Rate at which reducing switches (NVLS) sum the bytes of a GPU: bytes of a large all-reduce over its time. None:
    the switches do not reduce."""
    is_shared: bool = False
    """Whether all workers of a node share this bandwidth, as with copies through host memory."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator. `peak_tflops` is dense, by precision; the doubled values for sparsity are not used."""

    name: str
    aliases: tuple[str, ...] = ()
    peak_tflops: Mapping[str, float]
    matmul_share: float
    """Largest measured matrix product over the peak: the limit for an ideal layer."""
    narrow_matmul_share: float | None = None
    """Largest measured 8-bit matrix product over the peak, also used for 4-bit products; None if not measured."""
    overlaps_tiles: bool = False
    """Whether the result of a tile is written while the next tile is computed, as on Blackwell, whose sums have their
    own memory. It reaches its largest products with inner dimensions of 1,024 to 3,072, whereas Hopper needs 13,312
    (MLE, best shapes of MAMF)."""
    num_cores: int = 108
    """Streaming multiprocessors (compute units): a matrix product is cut into tiles, one per unit at a time."""
    attention_share: float = 0.55
    """Rate of the usual fused attention, forward and backward, relative to the largest matrix product."""
    best_attention_share: float | None = None
    """Rate of attention kernels written for this GPU (FlashAttention-3, cuDNN), relative to the largest matrix product,
    if it differs."""
    memory_gib: float
    """Memory available to a program, slightly below the advertised size."""
    memory_gb_per_s: float
    link: str
    gpus_per_node: int = 8
    network: str = ""
    """Usual network of machines with this GPU; empty if there is none."""
    source: str = ""

    def peak_flops(self, precision: str) -> float:
        """Dense peak in FLOP/s. A precision without an entry runs at the rate of the next wider one.

        Raises ConfigError for a precision that no GPU has.
        """
        return self.peak_tflops[self.executed_precision(precision)] * 1e12

    def executed_precision(self, precision: str) -> str:
        """Precision of the units that do the work: bf16 products run as fp32 on a GPU without bf16 units."""
        if precision not in WIDER:
            raise ConfigError("precision", precision, f"it must be one of {', '.join(PRECISIONS)}")
        return next((name for name in WIDER[precision] if name in self.peak_tflops), next(iter(self.peak_tflops)))


@dataclass(frozen=True, kw_only=True)
class Network:
    """Network between nodes. Bandwidths are per node and direction, in 10^9 bytes per second."""

    name: str
    gb_per_s: float
    """Nominal bandwidth of all adapters of the node together."""
    transport: str = "rdma"
    """`rdma` (InfiniBand, RoCE), `efa`, `tcp`, `tuned-tcp` or `measured`: these differ in latency and in the share of
    the nominal bandwidth that they reach."""
    num_adapters: int = 1
    source: str = ""
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.gb_per_s <= 0:
            raise ConfigError("net", self.gb_per_s, "the bandwidth must be positive")
        if self.transport not in TRANSPORTS:
            raise ConfigError("net", self.transport, f"the transport must be one of {', '.join(TRANSPORTS)}")


@dataclass(frozen=True, kw_only=True)
class Transport:
    """Rates that NCCL reaches on one type of adapter."""

    bandwidth_share: float
    """Bus bandwidth of large all-reduces over the nominal bandwidth."""
    most_gb_per_s: float
    """Bandwidth at which the CPU becomes the limit (sockets), for any adapter; infinite if the CPU is not involved."""
    latency_us: float
    """Latency of one hop of a collective between nodes."""
    source: str
    tree_hop_us: float | None = None
    """Latency of a hop of a tree; `latency_us` if not given."""
    flow_gb_per_s: float = float("inf")
    """Bandwidth of one GPU that sends to another, whatever the total of the node's adapters."""


TRANSPORTS: dict[str, Transport] = {
    "rdma": Transport(
        bandwidth_share=0.92, most_gb_per_s=float("inf"), latency_us=15.0,
        source="NVIDIA, GTC 2024: 24 GB/s of 200 Gb/s, 48 of 400 (0.96), DGX A100 192 of 200, DGX H100 380 of"
        " 400 (0.95); NCCL's tuning.cc puts a hop at 5 to 8 us before kernels; a flow uses one adapter, of 400 Gb/s"
        " at most",
        flow_gb_per_s=48.0,
    ),
    "efa": Transport(
        bandwidth_share=0.80, most_gb_per_s=float("inf"), latency_us=20.0, tree_hop_us=50.0,
        source="9.75 us per rank and direction in ml-engineering's EFA all-reduce of 8 bytes (V100, 16 to 64 ranks);"
        " NCCL's tuning.cc puts a tree's hop at 50 us in the Simple protocol, which buckets use if LL128 is "
        "unavailable; EC2 gives a flow 10 Gb/s, and nanotron's pipelines between p5 nodes lose the corresponding time. "
        "Doubtful if EFA itself carries the flow",
        flow_gb_per_s=1.25,
    ),
    "tcp": Transport(
        bandwidth_share=0.80, most_gb_per_s=0.75, latency_us=60.0,
        source="NCCL's defaults open one socket per channel, and a flow in a cloud gets 5 to 10 Gb/s: 0.75 GB/s on"
        " 50 GbE (Pollux's traces), 0.5 on 40 GbE (1-bit Adam post)",
    ),
    "tuned-tcp": Transport(
        bandwidth_share=0.80, most_gb_per_s=10.0, latency_us=60.0,
        source="NVIDIA, GTC 2024: 10 GB/s of bus bandwidth on 100 GbE with TCP, with many sockets"
        " (NCCL_NSOCKS_PERTHREAD)",
    ),
    "measured": Transport(
        bandwidth_share=1.0, most_gb_per_s=float("inf"), latency_us=30.0,
        source="the given figure is what a collective reached, so nothing is subtracted",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`num_nodes` identical machines."""

    gpu: Gpu
    gpus_per_node: int
    num_nodes: int
    link: Link
    network: Network | None
    """Network between the nodes; None for one node."""
    board_gpus: int = 0
    """GPUs on one board, if fewer of them are used; 0: the number of the node."""
    price_per_gpu_hour: float | None = None
    algorithms: tuple[str, ...] = ("ring", "tree")
    """All-reduce algorithms, of which the fastest is used: `ring`, `tree`, `hierarchical`. The last one is off by
    default, as in NCCL: with it, the errors of `jobs/planner_evidence` rise from 5.7 to 6.7 % on the calibration folder
    and from 5.2 to 7.2 % on Pollux's T4 traces."""
    in_network: Literal["none", "node", "all"] = "none"
    """Where switches sum all-reduces: in the node (NVLS), or also between nodes (SHARP, which needs InfiniBand). Off
    unless set: predictions for published runs on H100 do not improve with it (nanotron's error rises from 18 to 22
    %)."""
    measured: tuple[MeasuredTable, ...] = ()
    """All-reduce times measured on this cluster."""
    storage_gb_per_s: float | None = None
    """Rate at which all nodes together write a checkpoint; None: assumed by `planner.cost.checkpoint_stalls`."""
    gpu_mtbf_hours: float | None = None
    """Mean hours between interruptions of a training, times its GPUs; None: interruptions are ignored."""
    restart_s: float | None = None
    """Seconds from an interruption until the checkpoint is read; None: assumed by `planner.cost.checkpoint_stalls`."""
    notes: tuple[str, ...] = ()
    """Assumptions in place of values that were not given."""

    def __post_init__(self) -> None:
        for name, value in (("GPUs per node", self.gpus_per_node), ("nodes", self.num_nodes)):
            if value < 1:
                raise ConfigError(f"cluster: {name}", value, "there must be at least one")
        for name, quantity in (
            ("storage_gb_per_s", self.storage_gb_per_s),
            ("gpu_mtbf_hours", self.gpu_mtbf_hours),
            ("restart_s", self.restart_s),
        ):
            if quantity is not None and not 0 < quantity < float("inf"):
                raise ConfigError(f"cluster: {name}", quantity, "it must be positive")
        if not {"ring", "tree"} & set(self.algorithms) or not set(self.algorithms) <= {"ring", "tree", "hierarchical"}:
            raise ConfigError(
                "cluster: algorithms",
                ", ".join(self.algorithms),
                "it must contain ring, tree or both, and optionally hierarchical",
            )
        if self.num_nodes > 1 and self.network is None:
            raise ConfigError(
                "cluster: network", None, "several nodes need a network", "for example net=100G, or net=8x400G"
            )

    @property
    def is_meshed(self) -> bool:
        """Whether GPUs are connected in pairs instead of by a switch: boards of four, and of eight V100 or MI300X.

        In a mesh, a group of k of the board's g GPUs has (k - 1) / (g - 1) of a GPU's links.
        """
        board = self.board_gpus or self.gpus_per_node
        return (
            self.link.name.startswith("nvlink") and board <= (8 if self.link.name < "nvlink3" else 4)
        ) or self.link.name.startswith("xgmi")

    @property
    def num_gpus(self) -> int:
        """Total number of GPUs."""
        return self.gpus_per_node * self.num_nodes
