"""torch.compile."""

from __future__ import annotations

from typing import Literal

from scaleray.config.base import Settings


class CompilationSettings(Settings):
    """Whether and how the model is compiled. Compiling happens inside the strategy's wrapper."""

    what: Literal["nothing", "blocks", "model"] = "nothing"
    """blocks: each of the workload's `blocks` by itself, which compiles one of them and serves all."""
    dynamic: bool | None = None
    """Shapes that vary without compiling anew. None: torch decides after the first change."""
    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """torch.compile's mode."""
    cache_dir: str | None = None
    """Folder in which compiled code is kept between runs. None: torch's own."""
    must_succeed: bool = False
    """Fail rather than go on without compilation when it fails."""
