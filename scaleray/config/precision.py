"""Settings of numerical precision."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from scaleray.config.base import Positive, Settings


class PrecisionSettings(Settings):
    """Arithmetic of the forward and backward pass. Parameters and optimizer state stay in the model's own dtype.

    Gradients are also reduced in that dtype: in fp32 for an fp32 model with bf16 or fp16 arithmetic. For a narrower
    dtype, use `fsdp.reduce_dtype`, or `compression.name` under DDP.
    """

    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """dtype of the arithmetic. bf16 and fp16 use autocast, fp16 with dynamic loss scaling; fp64 converts the model, for
    checks."""
    initial_loss_scale: Positive = 65536.0
    """fp16: initial dynamic loss scale."""
    tf32: bool = False
    """Use TF32 for fp32 on NVIDIA GPUs from Ampere on: matrix products and convolutions round their inputs to 10 bits
    of mantissa, and are several times faster. false computes in full fp32, also for convolutions, where torch's default
    is TF32."""
    float8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "none"
    """Use float8 for the products of linear layers, with bf16, on NVIDIA GPUs from Ada or Hopper on, and torchao (extra
    `float8`): one scale per tensor (fastest), per row, or per row with the gradients of weights in bf16 (most
    accurate). It converts the linear layers in the workload's `blocks`, or all but the last layer without blocks.
    Worthwhile for large, compiled layers."""
    float8_leave_out: tuple[str, ...] = ()
    """Names of linear layers that stay in bf16, such as `blocks.0.*`."""
    emulate_float8: bool = False
    """Round as float8 does but multiply in float32, on any device: slow, to study the effect of float8 on a
    training."""

    @model_validator(mode="after")
    def _float8_is_possible(self) -> PrecisionSettings:
        if self.float8 != "none" and self.dtype != "bf16":
            raise ValueError(f"float8: its products are bf16, and precision.dtype is {self.dtype}; use dtype bf16")
        if self.emulate_float8 and self.float8 == "rowwise_with_gw_hp":
            raise ValueError(
                "emulate_float8: torchao 0.18 cannot emulate rowwise_with_gw_hp; use rowwise or tensorwise"
            )
        return self
