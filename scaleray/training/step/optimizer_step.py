"""Interface of the object that takes a training's optimizer steps, for the loop and for checkpoints. `TrainStep` takes
those of one loss, `SeveralLosses` those of a workload that has several.
"""

from __future__ import annotations

from typing import Any, Protocol

from scaleray.config.recipe.values import Recipe
from scaleray.data import RankBatch
from scaleray.training.noise.meter import NoiseMeter
from scaleray.training.step.launched import Launched


class OptimizerStep(Protocol):
    """Takes optimizer steps for one worker. count_per_row, nonfinite_in_a_row: numbers, of several losses by name."""

    recipe: Recipe
    noise: NoiseMeter | None
    num_updates: int
    """Number of steps taken, with those before an interruption."""
    count_per_row: Any
    """Samples or tokens that count in a row of the last step."""
    nonfinite_in_a_row: Any
    """How many of the last steps were not finite."""

    def launch(self, batch: RankBatch, *, num_rows: int, want_norm: bool, meets: bool = True) -> Launched:
        """Train on one global batch of `num_rows` rows, of which `batch` is this rank's part. Collective.

        meets: whether ranks sum losses and signals; without, loss and count are this rank's and there are no signals.
        """
