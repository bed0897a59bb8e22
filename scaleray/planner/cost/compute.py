"""Compute time of one GPU for one micro-batch of one block: matrix products at a rate that depends on their shape, all
else at memory speed.

A product of m x k with k x n reaches `peak * matmul_share * alignment * w / (w + half) * k / (k + half)`: the share is
the largest one measured on the GPU, alignment is how well the sides divide into tiles (Anthony et al. 2024,
arXiv:2401.14489), w is the number of waves of tiles that cover the result, and the last factor is the cost of the start
and end of each tile. Elementwise operations move bytes at a share of the memory's bandwidth. The host's time to launch
the kernels is a lower bound."""

import math
from dataclasses import dataclass

from scaleray.config.hardware.hardware_kinds import Gpu
from scaleray.planner.cost.constants import DEFAULT, Constants
from scaleray.planner.cost.layout import Layout
from scaleray.planner.cost.remembered import remembered
from scaleray.planner.models.block_counts import Block

# rate by the largest power of two that divides a side, in 16-bit elements. 64 elements fill a tensor core's tile and a
# cache line; the decrease below that is taken from figures 5 to 8 of arXiv:2401.14489 and agrees with BLOOM's tables
# (hidden 14400 over 8 GPUs leaves 1800 columns, only a multiple of 8: 94 TFLOP/s instead of 120 at 13824, whose 1728
# are a multiple of 64)
ALIGNMENT = {64: 1.0, 32: 0.97, 16: 0.90, 8: 0.76, 4: 0.55, 2: 0.40, 1: 0.33}

REFERENCE_FLOPS = 271e12
"""FLOP/s of the GPU to which `Constants.inner_half` refers, an A100 in 16 bit."""
NARROW = ("fp8", "fp4")
"""Precisions that apply only to products: activations and attention stay in 16 bit."""
TILE_ELEMENTS = 128 * 256
"""Elements of a tile of a product's result, which one core computes at a time."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of one block and one micro-batch. `launch_s` is the host's time for forward and backward together."""

    forward_s: float
    backward_s: float
    attention_s: float
    """Part of `forward_s` that selective recomputation repeats."""
    launch_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the forward and the backward pass, but at least the time of the launches."""
        return max(self.forward_s + self.backward_s, self.launch_s)


def alignment(side: int) -> float:
    """Rate of a product with this side relative to one whose sides are multiples of 64."""
    return ALIGNMENT[min(64, side & -side)]


def element_bytes(layout: Layout) -> float:
    """Bytes of an element of an activation: 2 in 16-bit compute (8-bit products keep 16-bit activations), otherwise
    4."""
    return 4.0 if layout.precision in ("fp32", "tf32") else 2.0


def product_rate(
    rows: float, columns: int, inner: int, gpu: Gpu, precision: str, constants: Constants = DEFAULT
) -> float:
    """FLOP/s of a matrix product on `gpu`."""
    waves = rows * columns / (TILE_ELEMENTS * gpu.num_cores)
    is_narrow = precision in NARROW
    ceiling = gpu.peak_flops(precision) * ((is_narrow and gpu.narrow_matmul_share) or gpu.matmul_share)
    # a tile starts and ends in about the same time on every GPU: a faster one needs longer tiles, unless it overlaps
    # this with other tiles. 8-bit products reach their largest rate with inner dimensions no longer than in 16 bit
    # (MLE, best shapes of MAMF)
    wide = gpu.peak_flops("bf16") * gpu.matmul_share if is_narrow else ceiling
    inner_half = constants.inner_half * (1.0 if gpu.overlaps_tiles else wide / REFERENCE_FLOPS)
    filled = waves / (waves + constants.wave_half) * inner / (inner + inner_half)
    worst = min(alignment(columns), alignment(inner)) if gpu.peak_tflops.keys() & {"bf16", "fp16"} else 1.0
    share = constants.matmul_practice * (constants.eight_bit_share if is_narrow else 1.0)
    return ceiling * share * worst * filled


def block_times(
    block: Block, layout: Layout, gpu: Gpu, *, fused_attention: bool = True, constants: Constants = DEFAULT
) -> PassTimes:
    """Times of one micro-batch through one block on one GPU of a tensor parallel group."""
    return _block_times(layout, block, gpu, fused_attention, constants)


@remembered(
    "micro_batch", "context", "tensor", "expert", "precision", "compiled", "sequence_parallel", "channels_last"
)  # fmt: skip
def _block_times(layout: Layout, block: Block, gpu: Gpu, fused_attention: bool, constants: Constants) -> PassTimes:
    samples = layout.micro_batch / layout.context
    tensor = layout.tensor
    width = element_bytes(layout) / 2.0
    products = 0.0
    for product in block.matmuls:
        columns = max(1, product.columns // tensor) if product.split == "columns" else product.columns
        inner = max(1, product.inner // tensor) if product.split == "rows" else product.inner
        rows = product.rows * samples
        # a side that does not divide evenly is split unevenly, and its alignment stays poor
        aligned = columns if product.split != "columns" or product.columns % tensor == 0 else product.columns
        rate = (
            product_rate(rows, columns, inner, gpu, layout.precision, constants)
            * alignment(aligned)
            / alignment(columns)
            * filled_share(rows, product.num_weights, layout)
        )
        products += 2 * rows * columns * inner / rate
    attention = _attention_s(block, samples / tensor, gpu, layout, fused_attention, constants)
    ceiling = gpu.peak_flops(layout.precision) * gpu.matmul_share * constants.matmul_practice
    # tf32 and 16 bit run on tensor cores, by the direct algorithm
    saved = (
        block.winograd_flops * (1 - 1 / constants.winograd)
        if gpu.executed_precision(layout.precision) == "fp32"
        else 0.0
    )
    conv = (block.conv_flops - saved) * samples / tensor / (ceiling * constants.conv_share)
    whole = block.traffic_bytes / (tensor if layout.sequence_parallel else 1)
    speed = (
        gpu.memory_gb_per_s * 1e9 * constants.traffic_share / (constants.compiled_traffic if layout.compiled else 1.0)
    )
    traffic = samples * width * (whole + block.split_traffic_bytes / tensor) / speed
    if block.conv_flops and width == 1.0 and not layout.channels_last:
        traffic *= constants.channels_first_traffic
    scores = samples * width * block.score_traffic_bytes / tensor / speed
    traffic += scores
    launches = (
        3 * block.num_kernels * constants.kernel_us * 1e-6 * (constants.compiled_kernels if layout.compiled else 1.0)
    )
    forward = products + attention + conv + traffic
    # the gradients of inputs and of weights need one product each; fused attention recomputes its scores:
    # 2.5 times in total
    backward = (
        2 * (products + conv) + (2.5 if fused_attention else 2.0) * attention + constants.backward_traffic * traffic
    )
    return PassTimes(forward, backward, attention + scores, launches)


def filled_share(rows: float, num_weights: int, layout: Layout) -> float:
    """Share of a grouped kernel's tiles that is filled. The rows of each expert are divided into tiles of 128, of which
    the last is partly empty.

    `rows`: rows of this rank's own micro-batch; its experts process as many from each rank of their group.
    """
    if num_weights < 2:
        return 1.0
    each = max(1.0, rows * layout.expert / num_weights)
    return each / (math.ceil(each / 128) * 128)


def optimizer_s(num_params: float, layout: Layout, gpu: Gpu, constants: Constants = DEFAULT) -> float:
    """Seconds of one update of `num_params` parameters: gradient, master copy and state are read, and all except the
    gradient are written.

    With offloading, gradients go to the host over PCIe at 12 GB/s, and the host updates at 20 GB/s per GPU.
    """
    moved = num_params * (4 + 2 * 4 + 2 * layout.optimizer_bytes + (2 if layout.is_mixed else 0))
    if layout.offloads:
        return num_params * 4 / 12e9 + moved / 20e9
    return moved / (gpu.memory_gb_per_s * 1e9 * constants.traffic_share)


def _attention_s(block: Block, samples: float, gpu: Gpu, layout: Layout, is_fused: bool, constants: Constants) -> float:
    if not block.attention_flops:
        return 0.0
    share = gpu.attention_share if is_fused else constants.unfused_attention_share
    # scores stay in 16 bit if products run in 8
    precision = "bf16" if layout.precision in NARROW else layout.precision
    rate = gpu.peak_flops(precision) * gpu.matmul_share * share * (alignment(block.head_dim) if block.head_dim else 1.0)
    return block.attention_flops * samples / rate
