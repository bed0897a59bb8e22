"""Settings of torch.compile."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator

from scaleray.config.base import Settings, absolute_path


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
