"""Part of a step plan that one rank reads."""

from dataclasses import dataclass

import numpy as np

from scaleray.data.rank_batch import TokenCuts
from scaleray.data.sample_order import StepPlan


@dataclass(frozen=True)
class Part:
    """Steps of a plan that one rank reads: [first_step, last_step). shares: samples of a full batch by rank, or
    None."""

    plan: StepPlan
    rank: int
    world_size: int
    first_step: int
    last_step: int
    shares: tuple[int, ...] | None = None

    @property
    def rows_per_step(self) -> int:
        """Number of rows of this rank in a full batch, at least 1."""
        size = self.plan.global_batch_size
        return max(1, size // self.world_size if self.shares is None else self.shares[self.rank])

    def positions(self, steps: range) -> np.ndarray:
        """Positions in the plan's order of the rows to read for these steps, with a placeholder row for steps in which
        the rank has none."""
        positions = (self.plan.positions(step, self.rank, self.world_size, self.shares) for step in steps)
        own = [p if len(p) else self.plan.positions(step)[:1] for step, p in zip(steps, positions, strict=True)]
        return np.concatenate(own)

    def num_rows(self, step: int) -> int:
        """Number of this rank's rows in this step, without placeholders."""
        part = self.plan.rank_slice(step, self.rank, self.world_size, self.shares)
        return part.stop - part.start

    def token_cuts(self, step: int) -> TokenCuts | None:
        """This rank's micro-batches of this step, if counted in tokens."""
        return self.plan.token_cuts(step, self.rank, self.world_size)
