"""Compilation, activations that are computed again, and the search for a micro-batch that fits in memory."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from scaleray.config.base import Count, Positive, Probability, Settings, absolute_path


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
            raise ValueError(f"mode: it applies to inductor, but compilation.backend is {self.backend}")
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
