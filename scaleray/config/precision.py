"""The model and its passes: precision, activations, compilation, memory, averages, pruning, fine-tuning."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from scaleray.config.base import Positive, Settings


class PrecisionSettings(Settings):
    """Arithmetic of the forward and backward pass. Parameters and optimizer state stay in the model's own dtype.

    Gradients are reduced in that dtype too, so in fp32 with bf16 and fp16. `fsdp.reduce_dtype` reduces them in a
    narrower one, and for DDP `compression.name` does.
    """

    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """dtype of the arithmetic. bf16 and fp16 run under autocast, fp16 with dynamic loss scaling; fp64 converts
    the model, for checks."""
    initial_loss_scale: Positive = 65536.0
    """fp16: first value of the dynamic loss scale."""
    tf32: bool = False
    """Use TF32 in fp32 on NVIDIA GPUs from Ampere on: matrix products and convolutions round their inputs to 10
    bits of mantissa, and are several times faster. false computes them in full fp32, convolutions too, where
    torch's own default is TF32."""
    float8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "none"
    """Products of linear layers in float8, with bf16, on NVIDIA GPUs from Ada or Hopper on, and torchao (extra
    `float8`): one scale for a tensor (fastest), for each row, or for each row with the gradients of weights in bf16
    (most accurate). Converted are the linear layers in the workload's `blocks`; where it names none, all but the last.
    Worth it for large layers, compiled."""
    float8_leave_out: tuple[str, ...] = ()
    """Names of linear layers that stay in bf16, such as `blocks.0.*`."""
    emulate_float8: bool = False
    """Round as float8 does and multiply in float32, on any device: it shows what float8 does to a training, slowly."""

    @model_validator(mode="after")
    def _float8_is_possible(self) -> PrecisionSettings:
        if self.float8 != "none" and self.dtype != "bf16":
            raise ValueError(f"float8: its products give bf16, and precision.dtype is {self.dtype}; use dtype bf16")
        if self.emulate_float8 and self.float8 == "rowwise_with_gw_hp":
            raise ValueError(
                "emulate_float8: torchao 0.18 cannot emulate rowwise_with_gw_hp; use rowwise or tensorwise"
            )
        return self
