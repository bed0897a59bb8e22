"""Settings of compilation, of recomputed activations, and of the search for a micro-batch that fits in memory."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from scaleray.config.base import Count, Positive, Probability, Settings, absolute_path


class CompilationSettings(Settings):
    """Whether and how the model is compiled. It is compiled inside the strategy's wrapper."""

    what: Literal["nothing", "blocks", "model"] = "nothing"
    """Part of the model that is compiled. nothing: no part; blocks: each of the workload's `blocks` separately, so that
    one compiled block serves all; model: the whole model."""
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """Backend of torch.compile. inductor generates code, and needs g++ on a CPU; the others only trace the graph, to
    find graph breaks."""
    dynamic: bool | None = None
    """Compile for variable shapes, to avoid recompiling. None: torch decides after the first change."""
    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """Mode of the inductor backend."""
    cache_dir: str | None = None
    """Folder on the workers for inductor's compiled code between runs. None: torch's default."""
    must_succeed: bool = False
    """Fail if compilation fails, instead of continuing uncompiled."""

    @field_validator("cache_dir", mode="after")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return None if value is None else absolute_path(value)

    @model_validator(mode="after")
    def _mode_is_inductors(self) -> CompilationSettings:
        if self.mode != "default" and self.backend != "inductor":
            raise ValueError(f"mode: it applies only to inductor; compilation.backend is {self.backend}")
        return self


class ActivationSettings(Settings):
    """Recomputation of the activations of the workload's `blocks` in the backward pass, to save memory."""

    checkpointing: Literal["none", "full", "every", "selective", "budget"] = "none"
    """Activations to recompute. none: no activations; full: those of every block; every: those of each `every`-th
    block; selective: those of cheap operations, but not of matrix products; budget: the compiler chooses within
    `memory_budget`, so `compilation.what` is needed."""
    every: Count = 2
    """With `every`: interval between two recomputed blocks."""
    memory_budget: Annotated[float, Field(ge=0, le=1)] = 0.5
    """With `budget`: share of the activation memory that may be used, from 0 (only the inputs of the compiled parts) to
    1 (the compiler's default)."""


class MemorySettings(Settings):
    """Search for a micro-batch before training, and recovery from a memory error during training."""

    find_micro_size: bool = False
    """Try micro-batches under the real strategy before the first step and use the largest that fits: at most
    `batch.micro_size`, or a worker's whole share."""
    limit_gib: Positive | None = None
    """Memory that a worker may use, in GiB. None: all of its device. CPU workers share memory, so a search there needs
    a limit, which applies to the tensors in use."""
    reserve: Probability = 0.05
    """Share of the limit that a micro-batch must leave free, for longer rows and fragmentation."""
    on_out_of_memory: Literal["raise", "halve"] = "raise"
    """Action after a memory error. raise: the run fails; halve: repeat the step with half the micro-batch on all
    workers and an unchanged global batch. With several workers, halve adds a small collective to each step, for which
    they wait before the backward pass that synchronises gradients.
    """
