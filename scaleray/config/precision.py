"""The model and its passes: precision, activations, compilation, memory, averages, pruning, fine-tuning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from scaleray.config.base import Count, Positive, Probability, Settings, absolute_path


class FineTuningSettings(Settings):
    """Frozen parts and low-rank adapters. `workload.weights` says where the weights come from."""

    lora_rank: Annotated[int, Field(ge=0)] = 0
    """Rank of low-rank adapters (LoRA) added to the layers of `lora_layers`, with everything else frozen. 0: none."""
    lora_alpha: Positive = 16.0
    """Numerator of the adapters' scale, which is alpha / rank."""
    lora_layers: tuple[str, ...] = ("query", "value")
    """Last parts of the names of linear layers that get an adapter."""
    merge: bool = True
    """Add the adapters to their layers in the final weights, which are then those of a model without adapters. false:
    keep them apart, as in checkpoints."""
    freeze: tuple[str, ...] = ()
    """Beginnings of names of parameters that are not trained."""


class PruningSettings(Settings):
    """Which weights become zero and stay so. The masks are the same on all workers."""

    method: Literal["none", "magnitude", "structured", "2:4"] = "none"
    """Weights that are pruned. none: no weights; magnitude: the smallest weights of the whole model; structured: whole
    rows of each linear or convolution layer, which are its outputs, by norm; 2:4: the two smallest of each four
    neighbouring inputs of linear layers, once, at `start_step`."""
    sparsity: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the prunable weights that are zero at the end. 2:4 is always 0.5."""
    start_step: Annotated[int, Field(ge=0)] = 0
    """Number of steps before the first pruning; 0 is before the first step."""
    end_step: Count | None = None
    """Number of steps before the last pruning. From the first to the last, sparsity grows by the cubic schedule of Zhu
    and Gupta 2017. None: everything is pruned at `start_step`."""
    every_steps: Count = 100
    """Steps between two prunings, from `start_step` to `end_step`."""
    exclude: tuple[str, ...] = ()
    """Parts of names of parameters that are left alone; biases, norms, embeddings and frozen parameters always are."""

    @model_validator(mode="after")
    def _schedule_is_possible(self) -> PruningSettings:
        if self.end_step is not None and self.end_step <= self.start_step:
            raise ValueError(f"pruning.end_step: it must come after pruning.start_step, which is {self.start_step}")
        if self.method == "2:4" and (self.sparsity != 0.5 or self.end_step is not None):
            raise ValueError(
                "pruning.method: 2:4 takes out half of the weights at once; leave out sparsity and end_step"
            )
        return self


class AveragingSettings(Settings):
    """An exponential moving average of the trained weights: evaluations and the final weights are the average's."""

    decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the average that stays at each update, such as 0.999; the first update takes the weights as they are.
    None: no average."""
    every: Count = 1
    """Optimizer steps between two updates of the average."""


class CompilationSettings(Settings):
    """Whether and how the model is compiled. Compiling happens inside the strategy's wrapper."""

    what: Literal["nothing", "blocks", "model"] = "nothing"
    """Part of the model that is compiled. nothing: no part; blocks: each of the workload's `blocks` by itself, so that
    one block is compiled for all; model: the whole model."""
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """Backend of torch.compile. inductor generates code, for which a CPU needs g++; the others only trace the graph, to
    look for what breaks it."""
    dynamic: bool | None = None
    """Compile for shapes that vary, without compiling again. None: torch decides after the first change."""
    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """Mode of the inductor backend."""
    cache_dir: str | None = None
    """Folder on the workers in which inductor keeps compiled code between runs. None: torch's own."""
    must_succeed: bool = False
    """Fail if compilation fails, instead of continuing without it."""

    @field_validator("cache_dir", mode="after")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return None if value is None else absolute_path(value)

    @model_validator(mode="after")
    def _mode_is_inductors(self) -> CompilationSettings:
        if self.mode != "default" and self.backend != "inductor":
            raise ValueError(f"mode: it is inductor's, and compilation.backend is {self.backend}")
        return self


class ActivationSettings(Settings):
    """Activations of the workload's `blocks` that are kept for the backward pass."""

    checkpointing: Literal["none", "full", "every", "selective", "budget"] = "none"
    """Activations that are computed again. none: no activations; full: those of every block; every: those of each
    `every`-th block; selective: those of cheap operations, with matrix products kept; budget: the compiler chooses what
    to keep within `memory_budget`, so that it needs `compilation.what`."""
    every: Count = 2
    """With `every`: distance between two blocks that are computed again."""
    memory_budget: Annotated[float, Field(ge=0, le=1)] = 0.5
    """With `budget`: share of the activation memory that may be used, from only the inputs of what is compiled at 0 to
    what the compiler keeps by itself at 1."""


class MemorySettings(Settings):
    """The search for a micro-batch before training, and the way out of a memory error during it."""

    find_micro_size: bool = False
    """Try micro-batches under the real strategy before the first step and train with the largest that fits:
    `batch.micro_size`, or a worker's whole share, is the largest that is tried."""
    limit_gib: Positive | None = None
    """Memory that a worker may use, in GiB. None: all of its device. A CPU's memory is not the worker's own, so that a
    search there needs a limit; what counts there is the tensors that are alive."""
    reserve: Probability = 0.05
    """Share of the limit that a micro-batch must leave free, for longer rows and fragments."""
    on_out_of_memory: Literal["raise", "halve"] = "raise"
    """Action after a memory error. raise: the run fails; halve: repeat the step with half the micro-batch on all
    workers, the global batch unchanged. With several workers halve costs one small collective a step, for which they
    wait before the backward pass that synchronises gradients.
    """


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
