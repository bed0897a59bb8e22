"""The planner's few numbers without a data sheet, each shared by all models and machines, with its derivation.

`python -m jobs.planner_evidence fit DATA` fits those marked `fitted` again: the median absolute log error of step times
over a folder of published measurements, every source with the same weight. The reason for each of the others is next to
it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Constants of the cost model; every field has its meaning and source."""

    wave_half: float = 0.34
    """fitted. Waves of tiles that a product loses at its end: the last wave is half full on average."""
    inner_half: float = 400.0
    """fitted. Inner dimension, in elements, with which a product reaches half of its rate, on an A100 in 16 bit: each
    tile starts and ends."""
    matmul_practice: float = 0.92
    """fitted. Rate of large products in training over the largest one measured alone: clocks fall under a long load."""
    eight_bit_share: float = 0.95
    """Time of 8-bit products with their scaling and casts over plain ones; assumption: fused casts read and write what
    the products read."""
    unfused_attention_share: float = 0.65
    """fitted. Rate of attention without a fused kernel, as batched small products, over the largest
    matrix product's."""
    conv_share: float = 1.0
    """fitted. Rate of convolutions by the direct algorithm over the largest matrix product's, which the fit does not
    let them pass."""
    winograd: float = 2.0
    """Rate of small 32-bit filters over the direct algorithm's: 3x3 ones take 2.25 times fewer products
    (arXiv:1509.09308)."""
    channels_first_traffic: float = 1.57
    """Memory traffic of 16-bit convolutions with channels first over channels last, which they want: each is turned
    twice, 11 passes instead of 7."""
    handover_s: float = 0.0028
    """fitted. Seconds lost where a stage waits for a micro-batch or its gradient: the host notices, and launches."""
    traffic_share: float = 0.9
    """fitted. Share of the memory bandwidth that elementwise kernels reach; STREAM-like kernels report 0.85 to 0.92."""
    compiled_traffic: float = 0.75
    """Memory traffic of a compiled model over an eager one's: neighbouring elementwise kernels become one. torchtitan's
    16 % gain; a fit has too few compiled rows to move it."""
    backward_traffic: float = 2.0
    """Elementwise traffic of the backward pass over that of the forward pass: two reads, one or two writes for each."""
    kernel_us: float = 6.0
    """Host time to launch one kernel in eager PyTorch: 5 to 10 us; a step is never shorter than its launches."""
    compiled_kernels: float = 0.4
    """Kernels of a compiled model over an eager one's."""
    leak: float = 0.15
    """fitted. Share of hidden communication that still costs time: it takes SMs and memory bandwidth from the compute
    it hides behind."""
    hiding_share: float = 0.9
    """Share of the backward pass in which gradient buckets can travel: the first is full after the head and the
    last layers. Not fitted: what slow networks show in other frameworks (no overlap, large flat buckets) would be
    blamed on it."""
    prefetch_share: float = 0.6
    """fitted. Share of a pass in which FSDP's gathers can travel."""
    bucket_bytes: float = 25 * 2**20
    """Bytes of DDP's default bucket; the last bucket is always exposed."""
    straggler_share: float = 0.02
    """fitted. Standard deviation of a rank's step over its mean; the slowest of n ranks is sqrt(2 ln n)
    of them behind."""
    straggler_share_input: float = 0.016
    """fitted. Standard deviation of a rank's step over its mean for models that read images, whose input comes from the
    host's processors."""
    straggler_share_uneven: float = 0.06
    """fitted. Standard deviation of a rank's step over its mean for samples of uneven length (speech, translation,
    detection): ranks have different work."""
    step_overhead_s: float = 0.004
    """Seconds of an optimizer step outside its passes: clipping, logging, the loss scale's check, the
    loader's hand-over."""
    two_node_tcp_share: float = 0.62
    """fitted. Bandwidth of NCCL over sockets between exactly two nodes, over what it gets between more. Pollux's traces
    have 0.40 against 0.65 GB/s."""
    switch_sum_us: float = 75.0
    """Microseconds of an all-reduce that switches add up, before its bytes: 8 H200 with NVLS need 73 us for 16 MiB
    beyond what they need for each byte of 16 GiB (ml-engineering's plot)."""
    socket_jitter: float = 0.08
    """fitted. Loss of bandwidth over sockets with every doubling of the ranks in a ring: each step waits for the
    slowest host thread."""
    congestion: float = 0.015
    """fitted. Loss of network bandwidth with every doubling of the nodes beyond two: adaptive routing
    is not perfect."""


DEFAULT = Constants()
FITTED = (
    "matmul_practice", "traffic_share", "inner_half", "wave_half", "conv_share", "unfused_attention_share", "leak",
    "prefetch_share", "congestion", "straggler_share", "straggler_share_input", "straggler_share_uneven", "handover_s",
    "two_node_tcp_share", "socket_jitter",
)  # fmt: skip
"""Names of the constants that `python -m jobs.planner_evidence fit` moves."""
