"""Options of `scaleray train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How a training starts, and where it runs."""

    resume: str | None = None
    """Continue an interrupted run after its newest checkpoint: its folder, its name, or `auto` for the newest
    unfinished run of the same training, if there is one. Without -c, that run's own config is used."""
    allow_change: Sequence[str] = ()
    """A key that may differ from the interrupted run, although this changes the training."""
    local: bool = False
    """Run in this process without Ray, for a debugger."""
