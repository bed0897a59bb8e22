"""The planner's constants that no data sheet gives, shared by all models and machines, with their derivations.

`python -m jobs.planner_evidence fit DATA` refits those marked `fitted`: it minimises the median absolute log error of
step times over a folder of published measurements, with equal weight for each source. The others are explained next to
their values.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Constants of the cost model, each with its meaning and source."""

    wave_half: float = 0.34
    """fitted. Waves of tiles that a product loses at its end: the last wave is half full on average."""
    inner_half: float = 400.0
    """fitted. Inner dimension, in elements, at which a product reaches half of its rate, on an A100 in 16 bit: each
    tile has a start and an end."""
    matmul_practice: float = 0.92
    """fitted. Rate of large products in training over the largest one measured alone: clocks fall under sustained
    load."""
    eight_bit_share: float = 0.95
    """Time of 8-bit products with scaling and casts over that of plain ones; assumes fused casts, which read and write
    the inputs of the products."""
    unfused_attention_share: float = 0.65
    """fitted. Rate of attention without a fused kernel, which is small batched products, over that of the largest
    matrix product."""
    conv_share: float = 1.0
    """fitted. Rate of convolutions by the direct algorithm over that of the largest matrix product; the fit limits it
    to 1."""
    winograd: float = 2.0
    """Rate of small 32-bit filters over that of the direct algorithm: 3x3 filters need 2.25 times fewer products
    (arXiv:1509.09308)."""
    channels_first_traffic: float = 1.57
    """Memory traffic of 16-bit convolutions with channels first over that with channels last, which they prefer: each
    is transposed twice, with 11 passes instead of 7."""
    handover_s: float = 0.0028
    """fitted. Seconds lost when a stage waits for a micro-batch or its gradient: the host must notice, and launch."""
    traffic_share: float = 0.9
    """fitted. Share of the memory bandwidth that elementwise kernels reach; STREAM-like kernels report 0.85 to 0.92."""
    compiled_traffic: float = 0.75
    """Memory traffic of a compiled model over that of an eager one: neighbouring elementwise kernels are fused. From
    torchtitan's gain of 16 %; there are too few compiled measurements to fit it."""
    backward_traffic: float = 2.0
    """Elementwise traffic of the backward pass over that of the forward pass: two reads, one or two writes for each."""
    kernel_us: float = 6.0
    """Host time to launch one kernel in eager PyTorch: 5 to 10 us; a step is never shorter than its launches."""
    compiled_kernels: float = 0.4
    """Number of kernels of a compiled model, relative to an eager one."""
    leak: float = 0.15
    """fitted. Share of hidden communication that still costs time, since it takes SMs and memory bandwidth from
    compute."""
    hiding_share: float = 0.9
    """Share of the backward pass during which gradient buckets can be sent: the first is full after the head and the
    last layers. Not fitted: it would absorb the behaviour of other frameworks on slow networks (no overlap, large flat
    buckets)."""
    prefetch_share: float = 0.6
    """fitted. Share of a pass during which FSDP's gathers can run."""
    bucket_bytes: float = 25 * 2**20
    """Bytes of DDP's default bucket; the last bucket is always exposed."""
    straggler_share: float = 0.02
    """fitted. Standard deviation of a rank's step over its mean; the slowest of n ranks is sqrt(2 ln n) such deviations
    behind."""
    straggler_share_input: float = 0.016
    """fitted. Standard deviation of a rank's step over its mean for models of images, whose input the host's CPUs
    prepare."""
    straggler_share_uneven: float = 0.06
    """fitted. Standard deviation of a rank's step over its mean for samples of uneven length (speech, translation,
    detection): ranks have different amounts of work."""
    step_overhead_s: float = 0.004
    """Seconds of an optimizer step outside its passes: clipping, logging, the loss scale's check, the loader."""
    two_node_tcp_share: float = 0.62
    """fitted. Bandwidth of NCCL over sockets between exactly two nodes, over that between more nodes. Pollux's traces
    have 0.40 and 0.65 GB/s."""
    switch_sum_us: float = 75.0
    """Microseconds of an all-reduce by summing switches besides the time for its bytes: 8 H200 with NVLS take 73 us
    longer for 16 MiB than the rate at 16 GiB implies (ml-engineering's plot)."""
    socket_jitter: float = 0.08
    """fitted. Loss of bandwidth over sockets with every doubling of the ranks in a ring, whose steps wait for the
    slowest host thread."""
    congestion: float = 0.015
    """fitted. Loss of network bandwidth with every doubling of the nodes beyond two: adaptive routing is imperfect."""


DEFAULT = Constants()
FITTED = (
    "matmul_practice", "traffic_share", "inner_half", "wave_half", "conv_share", "unfused_attention_share", "leak",
    "prefetch_share", "congestion", "straggler_share", "straggler_share_input", "straggler_share_uneven", "handover_s",
    "two_node_tcp_share", "socket_jitter",
)  # fmt: skip
"""Names of the constants that `python -m jobs.planner_evidence fit` adjusts."""
