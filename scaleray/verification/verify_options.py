"""Options of `scaleray verify`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scaleray.common.options import Numbers, Words, whole_numbers, words_of
from scaleray.errors import ConfigError
from scaleray.verification.bounds import BOUNDS


@dataclass(frozen=True)
class VerifyOptions:
    """Variants to compare, and options of the comparison."""

    strategies: Words = "own"
    """Names, separated by commas; own: the config's own; all: every strategy, listing those that cannot run this
    workload."""
    world_sizes: Numbers | None = None
    """Numbers of workers, separated by commas. By default 1 and 2, or 1 and the number that a split model needs."""
    accumulation: Numbers = "1,3"
    """Micro-batches in each worker's step, separated by commas."""
    steps: int | None = None
    """Number of first optimizer steps to compare. By default 20, or 8 of each layout with --layouts all."""
    bound: float | None = None
    """Largest relative difference of a step's loss, its gradient norm and the final parameters. The default depends on
    the precision: 1e-9 in fp64, 1e-4 in fp32, 0.05 in bf16 and fp16."""
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp64"
    """Arithmetic of the check. Correct runs differ by far less than 1e-9 in fp64; a workload whose own code leaves
    float64 can be checked in fp32, less strictly."""
    resume: bool = False
    """Interrupt each variant at a random step instead, resume it, and name the part of the state that differs."""
    seed: int | None = None
    """Seed of the random steps of --resume, to repeat a result."""
    local: bool = False
    """Run in plain gloo processes on this machine, without Ray."""
    layouts: Literal["own", "all"] = "own"
    """all: instead of strategies, every way to divide the workers into degrees of `parallel`."""

    def __post_init__(self) -> None:
        for option, values in (("--world-sizes", self.sizes), ("--accumulation", self.pieces)):
            if not values or min(values) < 1:
                raise ConfigError(option, values, "it must be a list of positive integers, such as 1,2,4")
        if self.compared_steps < 1:
            raise ConfigError("--steps", self.steps, "it must be at least 1")
        if self.bound is not None and not 0 <= self.bound < 1:
            raise ConfigError("--bound", self.bound, "it must be at least 0 and less than 1", "1e-9 suits float64")

    @property
    def names(self) -> list[str]:
        """Names of strategies, possibly including `own` and `all`."""
        return words_of(self.strategies)

    @property
    def sizes(self) -> list[int]:
        """The numbers of workers, each once, in order."""
        return sorted(set(whole_numbers("--world-sizes", "1,2" if self.world_sizes is None else self.world_sizes)))

    @property
    def pieces(self) -> list[int]:
        """The numbers of micro-batches, each once, in order."""
        return sorted(set(whole_numbers("--accumulation", self.accumulation)))

    @property
    def compared_steps(self) -> int:
        """Number of first optimizer steps to compare."""
        return self.steps if self.steps is not None else 8 if self.layouts == "all" else 20

    @property
    def allowed(self) -> float:
        """Largest relative difference between numbers that count as equal."""
        return BOUNDS[self.precision] if self.bound is None else self.bound
