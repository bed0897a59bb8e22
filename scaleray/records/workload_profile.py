"""Costs of one sample for a model, block by block: arithmetic, parameters and memory; and the utilisation of devices.

`training.flop_counter` counts them from the user's own workload; the planner and studies read them. Pure arithmetic.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from scaleray.errors import ScaleRayError


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matrix product of `rows` x `inner` with `inner` x `columns`. rows: of one sample, such as its tokens."""

    rows: float
    inner: int
    columns: int

    @property
    def flops(self) -> float:
        """Number of multiplications and additions."""
        return 2.0 * self.rows * self.inner * self.columns


@dataclass(frozen=True, kw_only=True)
class PartProfile:
    """One of the model's repeated blocks, or the part before or after them. Values are per sample, for the forward
    pass, in the run's precision."""

    name: str
    num_parameters: int
    """Number of parameters; shared ones count in the first part that uses them."""
    products: list[Product] = field(default_factory=list)
    attention_flops: float = 0.0
    """FLOPs of fused attention, counted in full even if a causal mask skips half."""
    convolution_flops: float = 0.0
    winograd_flops: float = 0.0
    """FLOPs of convolutions with ungrouped 3x3 and 5x5 filters of stride 1, which have a faster algorithm in float32;
    included in `convolution_flops`."""
    activation_bytes: float = 0.0
    """Bytes kept from the forward pass for the backward pass."""
    output_bytes: float = 0.0
    """Bytes of the output, which a checkpointed next block keeps and a pipeline sends."""
    traffic_bytes: float = 0.0
    """Bytes read and written by all other operations, uncompiled."""
    num_operations: int = 0
    """Number of kernels launched by an uncompiled forward pass, for a micro-batch of any size."""

    @property
    def forward_flops(self) -> float:
        """FLOPs of products, attention and convolutions."""
        return sum(product.flops for product in self.products) + self.attention_flops + self.convolution_flops


@dataclass(frozen=True, kw_only=True)
class WorkloadProfile:
    """Costs of a workload's model and loss, counted on a micro-batch. Values are per sample; blocks are included in the
    totals."""

    num_parameters: int
    num_trained_parameters: int
    parameter_bytes: int
    precision: str
    backward_flops: float
    """FLOPs of the backward pass, excluding recomputation, such as of attention scores."""
    activation_bytes: float
    """Bytes kept from the forward pass for the backward pass, for each sample of a micro-batch, excluding parameters
    and inputs."""
    fixed_activation_bytes: float
    """Bytes kept likewise, whatever the size of the micro-batch, such as copies of weights in a narrower dtype."""
    count_per_sample: float | None
    """Tokens of a sample, or other units that the loss counts; None if only computing the loss shows the number."""
    parts: list[PartProfile] = field(default_factory=list)
    """Costs of the part before the blocks, of each block of the workload's `blocks()`, and of the part after them,
    including the loss. Without blocks all costs are in the last part."""
    is_computed: bool = False
    """Whether the loss was actually computed, on the CPU, because it depends on values, which counting alone does not
    provide."""

    @property
    def blocks(self) -> list[PartProfile]:
        """The parts of the repeated blocks, in the workload's order."""
        return self.parts[1:-1]

    @property
    def forward_flops(self) -> float:
        """FLOPs of matrix products, convolutions and attention in the forward pass: multiplications and additions.
        Attention counts in full, the convention of published MFU values (Chowdhery et al. 2022, arXiv:2204.02311,
        appendix B)."""
        return sum(part.forward_flops for part in self.parts)

    @property
    def flops(self) -> float:
        """Model FLOPs of training on one sample: forward and backward."""
        return self.forward_flops + self.backward_flops

    def to_json(self) -> str:
        """The profile as indented JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> WorkloadProfile:
        """Parse the output of `to_json`. Raises pydantic's ValidationError for anything else."""
        return TypeAdapter(cls).validate_json(text)

    def to_dict(self) -> dict[str, Any]:
        """The profile as plain values, for a record."""
        return dataclasses.asdict(self)


class ImpossibleUtilisation(ScaleRayError):
    """The utilisation exceeds the devices' capability, so a count, a time or a peak is wrong."""


def mfu(flops: float, *, time_s: float, peak_flops_per_s: float, num_devices: int = 1) -> float:
    """Model FLOPs utilisation: model FLOPs per second over the peak of the devices, in (0, 1].

    flops: model FLOPs of the samples trained in `time_s`, for example `profile.flops * global_batch_size` for one step.
    peak_flops_per_s: dense peak of one device in the precision used. Raises ImpossibleUtilisation above 1.
    Source: Chowdhery et al. 2022, arXiv:2204.02311, section 4.1.
    """
    share = flops / time_s / (num_devices * peak_flops_per_s)
    if share > 1.0:
        raise ImpossibleUtilisation(
            f"MFU of {100 * share:.1f} %: {flops:.3g} FLOPs in {time_s:.3g} s on {num_devices} devices of "
            f"{peak_flops_per_s:.3g} FLOP/s. The peak must be the dense peak in the precision used"
        )
    return share
