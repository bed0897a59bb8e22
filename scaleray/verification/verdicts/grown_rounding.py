"""Growth of rounding in a training, measured by repeating one process with other last digits in its parameters.

A normalisation over two values, or a division by a gradient near zero, makes 1e-16 exceed any bound in float64. If it
grows in one process, it also grows from another order of sums, without any mistake in a strategy. A model that computes
a part in float32 rounds to float32, so then the last digit of float32 is changed."""

from collections.abc import Mapping

import numpy as np
import torch

from scaleray.data import TRAIN
from scaleray.records.certificate import Divergence
from scaleray.training.setup.model_setup import Setup
from scaleray.verification.bounds import LARGEST_ROUNDING, LARGEST_ROUNDING_IN_FLOAT32, ROUNDING_TIMES
from scaleray.verification.repeatable.narrow_casts import narrow_casts
from scaleray.verification.runs.compared_runs import Key, Runs
from scaleray.verification.runs.trace_probe import TraceProbe
from scaleray.verification.traces.compare_traces import largest_difference

FEW_ROWS = 4
"""Rows of the training data used to find a cast to fewer digits."""
GROWS = (
    "loss", "gradient", "parameters", "final values", "restored parameters", "restored state", "evaluation",
    "parameters before", "state before", "buffers before",
)  # fmt: skip
"""Quantities that rounding affects; it does not affect rows, counts and learning rates."""


class GrownRounding:
    """Bounds of comparisons, which are wider if rounding grows; measured once for each reference. On rank 0."""

    def __init__(self, runs: Runs, bound: float) -> None:
        self.runs, self.bound = runs, bound
        self._largest: dict[Key, float] = {}
        self._casts: list[str] | None = None

    def bound_for(self, divergence: Divergence, key: Key) -> float:
        """Bound within which a run with this divergence counts as equal to the reference of `key`."""
        if divergence.quantity not in GROWS or not divergence.difference <= LARGEST_ROUNDING_IN_FLOAT32:
            return self.bound
        if self._casts is None:
            self._casts = self._narrow_casts()
        most = LARGEST_ROUNDING_IN_FLOAT32 if self._casts else LARGEST_ROUNDING
        if not divergence.difference <= most:
            return self.bound
        if key not in self._largest:
            shaken = self.runs.again(key, watched_by=ShakenInFloat32 if self._casts else ShakenProbe)
            self._largest[key] = largest_difference(self.runs.reference(key), shaken)
        return max(self.bound, min(ROUNDING_TIMES * self._largest[key], most))

    def to_text(self, bound: float) -> str:
        """Reason for a bound; "" for the requested one."""
        if bound <= self.bound:
            return ""
        if self._casts:
            return (
                f"the model computes a part in fewer digits than float64 ({self._casts[0]}): a change in the last "
                f"digit of float32 moves one process so far that {bound:.1e} counts as equal"
            )
        return (
            "rounding grows in this training: a change in the last digit of the parameters moves one process so far "
            f"that {bound:.1e} counts as equal"
        )

    def _narrow_casts(self) -> list[str]:
        job, sources = self.runs.variant.job, self.runs.sources
        if job.config.precision.dtype != "fp64" or not isinstance(sources, Mapping):
            return []
        split = job.splits[TRAIN]
        rows = sources[TRAIN].read(np.arange(min(FEW_ROWS, split.num_rows)))
        return narrow_casts(job.workload, rows, gives_tuples=split.gives_tuples)


class ShakenProbe(TraceProbe):
    """Probe that changes every parameter by one unit in its last place, up or down, before the run."""

    digits_of: torch.dtype | None = None
    """Type whose last place is changed; None: the parameter's own."""

    def on_setup(self, setup: Setup) -> None:
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in setup.parallel.module.parameters():
                signs = torch.randint(0, 2, parameter.shape, generator=draw).mul_(2).sub_(1)
                parameter.mul_(1 + signs.to(parameter) * torch.finfo(self.digits_of or parameter.dtype).eps)
        super().on_setup(setup)


class ShakenInFloat32(ShakenProbe):
    """Probe that changes the last place of float32, for a model that computes a part in float32."""

    digits_of = torch.float32
