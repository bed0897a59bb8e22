"""Activation checkpointing: computing activations again instead of keeping them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from scaleray.config.base import Count, Settings


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
