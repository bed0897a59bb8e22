"""Options of `scaleray sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scaleray.errors import ConfigError

Scheduler = Literal["fifo", "asha", "hyperband", "median", "pbt"]
Search = Literal["random", "grid", "optuna"]


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Trials of a sweep, and the search for the best ones."""

    batch_sizes: str | None = None
    """Global batch sizes: 32..2048 is 32 and every doubling up to 2048; or 32,64,256."""
    rules: str | None = None
    """Rules by which the learning rate follows the batch size, with commas: linear, sqrt, adam, legw, none."""
    learning_rates: str | None = None
    """Learning rates at the reference batch: 1e-4..1e-2 for any value in the range (log-uniform), or 1e-3,2e-3."""
    optimizers: str | None = None
    """Optimizers, with commas: sgd, adamw, lars, lamb."""
    warmups: str | None = None
    """Warm-up lengths, with commas, such as "0 epochs,1 epoch"."""
    vary: Sequence[str] = ()
    """Any other config key with its values: --vary optimizer.weight_decay=0,0.01. May be repeated."""
    seeds: int = 1
    """Number of runs of each combination, each with a different seed."""
    trials: int | None = None
    """Number of combinations to run. A random search draws them without repeats; a grid runs all."""
    workers_per_trial: int | None = None
    """Workers of each trial; scale.workers by default."""
    search: Search = "random"
    """Search: random, grid, or optuna (needs the extra `search`)."""
    scheduler: Scheduler = "fifo"
    """Scheduler: fifo runs every trial to its end; asha, hyperband and median stop worse trials early; pbt copies
    better weights."""
    metric: str | None = None
    """Metric that ranks the trials, such as "val/loss min". Default: that of stop.at, else the first split's loss."""
    guided: bool = False
    """Run only the promising part of the grid, by measured gradient noise and throughput. Needs a target
    (--stop.at)."""
    guided_share: float = 0.2
    """Most samples that a guided sweep may use, as a share of the whole grid's."""
    against_grid: str | None = None
    """Folder of a sweep of the whole grid, to report how far the guided choice is from its best."""
    continue_: str | None = None
    """Folder of an interrupted sweep: run the trials that have no record yet."""

    def __post_init__(self) -> None:
        for option, number in (
            ("--trials", self.trials),
            ("--seeds", self.seeds),
            ("--workers-per-trial", self.workers_per_trial),
        ):
            if number is not None and number < 1:
                raise ConfigError(option, number, "it must be at least 1")
        if self.against_grid is not None and not self.guided and self.continue_ is None:
            allowed = "only a guided sweep can be compared with a grid"
            raise ConfigError("--against-grid", self.against_grid, allowed, "add --guided")
