"""Activation checkpointing: computing again instead of keeping."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from scaleray.config.base import Count, Settings


class ActivationSettings(Settings):
    """Which activations of the workload's `blocks` are kept for the backward pass."""

    checkpointing: Literal["none", "full", "every", "selective", "budget"] = "none"
    """full: every block is computed again; every: each `every`-th block; selective: cheap operations are computed again,
    matrix products kept; budget: the compiler chooses what to keep within `memory_budget`, so that it needs `compilation.what`."""
    every: Count = 2
    """With `every`: distance between two blocks that are computed again."""
    memory_budget: Annotated[float, Field(ge=0, le=1)] = 0.5
    """With `budget`: share of the activation memory that may be used, of what the compiler keeps by itself at 1 to the
    inputs of what is compiled at 0."""
