"""The learning rate of every step, relative to its peak."""

from __future__ import annotations

import math


def learning_rate_factor(step: int, *, name: str, warmup_steps: int, schedule_steps: int, final_ratio: float) -> float:
    """Factor for the step with index `step` (from 0): linear warm-up, then constant, cosine or linear decay.

    The first step already moves: its factor is 1 / warmup_steps, and step `warmup_steps - 1` has the full rate.
    The decay would reach `final_ratio` at step `schedule_steps`, so that the last step of training still moves.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if name == "constant":
        return 1.0
    decay_steps = max(1, schedule_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / decay_steps)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if name == "cosine" else 1 - progress
    return final_ratio + (1 - final_ratio) * shape
