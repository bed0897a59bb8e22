"""How far rounding grows in a training: one process once more, whose parameters begin with another last digit.

A normalisation over two values, or a division by a gradient near zero, makes of 1e-16 what no bound in float64 expects.
What grows so in one process grows so from another order of sums, too, and is no mistake of a strategy.
"""

from __future__ import annotations

import torch

from scaleray.reproducibility.compare_traces import Divergence, largest_difference
from scaleray.training.setup.model_setup import Setup
from scaleray.training.verify.compared_runs import Key, Runs
from scaleray.training.verify.step_trace import TraceProbe

TIMES = 2.0
"""Factor of tolerance: one change of all parameters' last digits is a sample of what rounding does, and a large one."""
LARGEST = 1e-6
"""Largest difference that is ever put down to rounding in float64: beyond it a mistake might hide."""
GROWS = ("loss", "gradient", "parameters", "final values", "restored parameters", "restored state", "evaluation")
"""Quantities that rounding moves; rows, counts and learning rates it does not."""


class GrownRounding:
    """Bounds of comparisons, wider where rounding grows; measured once for each reference. On rank 0."""

    def __init__(self, runs: Runs, bound: float) -> None:
        self.runs, self.bound = runs, bound
        self._largest: dict[Key, float] = {}

    def bound_for(self, divergence: Divergence, key: Key) -> float:
        """The bound within which a run that shows this divergence equals the reference of `key`."""
        if divergence.quantity not in GROWS or not divergence.difference <= LARGEST:
            return self.bound
        if key not in self._largest:
            shaken = self.runs.again(key, watched_by=ShakenProbe)
            self._largest[key] = largest_difference(self.runs.reference(key), shaken)
        return max(self.bound, min(TIMES * self._largest[key], LARGEST))


class ShakenProbe(TraceProbe):
    """A probe that changes every parameter by one unit in its last place, up or down, before anything is done with
    it."""

    def on_setup(self, setup: Setup) -> None:
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in setup.parallel.module.parameters():
                signs = torch.randint(0, 2, parameter.shape, generator=draw).mul_(2).sub_(1)
                parameter.mul_(1 + signs.to(parameter) * torch.finfo(parameter.dtype).eps)
        super().on_setup(setup)


def in_words(bound: float) -> str:
    """What a wider bound comes from."""
    return (
        f"rounding grows in this training: by what a change in the last digit of the parameters does to one process, "
        f"{bound:.1e} counts as equal"
    )
