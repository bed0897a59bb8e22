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
    """Trials, and how they are searched."""

    batch_sizes: str | None = None
    """Global batch sizes: 32..2048 is 32 and every doubling up to 2048; or 32,64,256."""
    rules: str | None = None
    """How the learning rate follows the batch: linear, sqrt, adam, legw, none, with commas."""
    learning_rates: str | None = None
    """At the reference batch: 1e-4..1e-2 is any value between (log-uniform), or 1e-3,2e-3."""
    optimizers: str | None = None
    """sgd, adamw, lars, lamb, with commas."""
    warmups: str | None = None
    """Lengths of the warm-up with commas, such as "0 epochs,1 epoch"."""
    vary: Sequence[str] = ()
    """Any other key of the config with its values: --vary optimizer.weight_decay=0,0.01. May be repeated."""
    seeds: int = 1
    """How often each combination runs, each time with another seed."""
    trials: int | None = None
    """How many combinations run. A random search draws them without repeats; a grid runs all."""
    workers_per_trial: int | None = None
    """Workers of each trial; by default as scale.workers says."""
    search: Search = "random"
    """random, grid, or optuna (needs the extra `search`)."""
    scheduler: Scheduler = "fifo"
    """fifo runs every trial to its end; asha, hyperband, median stop worse ones early; pbt hands on better weights."""
    metric: str | None = None
    """Metric that trials are judged by, such as "val/loss min". By default that of stop.at, else the first split's
    loss."""
    guided: bool = False
    """Run only what is worth it of the grid, by measured gradient noise and throughput. Needs a target (--stop.at)."""
    guided_share: float = 0.2
    """Samples that a guided sweep may take, as a share of the whole grid's."""
    against_grid: str | None = None
    """The folder of a sweep of the whole grid, to say how far the guided choice lies from its best."""
    continue_: str | None = None
    """The folder of an interrupted sweep: run the trials that have no record yet."""

    def __post_init__(self) -> None:
        for option, number in (
            ("--trials", self.trials),
            ("--seeds", self.seeds),
            ("--workers-per-trial", self.workers_per_trial),
        ):
            if number is not None and number < 1:
                raise ConfigError(option, number, "it must be at least 1")
        if self.against_grid is not None and not self.guided and self.continue_ is None:
            allowed = "only a guided sweep makes a choice to compare"
            raise ConfigError("--against-grid", self.against_grid, allowed, "add --guided")
