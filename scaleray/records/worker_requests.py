"""Requests to the workers of a training: traces of certain ranks and steps, and actions in reply to heartbeats."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum

from scaleray.errors import ConfigError

SLOWEST, ONE_A_NODE = "slowest", "one-a-node"
USUAL_RANKS = f"0,{SLOWEST},{ONE_A_NODE}"
FOLDER = "traces"
"""Folder of a run that contains its traces."""


@dataclass(frozen=True)
class TraceRequest:
    """Request to trace a training's last steps, except the very last, which ends the trace."""

    ranks: tuple[int, ...] = (0,)
    slowest: bool = True
    """Whether to trace the rank with the shortest waits too, since the others wait for it."""
    one_a_node: bool = True
    operators: bool = True
    """Whether operators and kernels are traced."""
    memory: bool = False
    """Whether memory events on each chosen rank's device are recorded and a snapshot is taken."""
    warmup: int = 3
    """Steps in which the profiler runs without recording, so that its own start is not visible."""
    steps: int = 2
    path: str = ""
    """Folder or URI for the files."""

    def into(self, run_path: str) -> TraceRequest:
        """The same request, with files in a run's folder."""
        return dataclasses.replace(self, path=f"{run_path}/{FOLDER}")

    @property
    def num_steps(self) -> int:
        """Number of steps needed for a trace, including the one that ends it."""
        return self.warmup + self.steps + 1

    def first_step(self, total_steps: int) -> int:
        """Number of the step, from 1, in which the profiler starts its warm-up. Raises ConfigError if the training is
        too short."""
        first = total_steps - self.num_steps + 1
        if first < 1:
            needs = f"tracing needs {self.num_steps} steps, {self.warmup} of them to warm up"
            raise ConfigError("--steps", total_steps, needs, "a typical number is --steps 50")
        return first

    def check_ranks(self, world_size: int) -> None:
        """Raise ConfigError for a rank that does not exist in the training."""
        for rank in self.ranks:
            if rank >= world_size:
                there = f"are 0 to {world_size - 1}" if world_size > 1 else "are only 0"
                raise ConfigError(
                    "--ranks", rank, f"the ranks of {world_size} workers {there}", f"for example --ranks {USUAL_RANKS}"
                )

    def is_fixed(self, rank: int, local_rank: int) -> bool:
        """Whether a rank is traced whatever the other ranks measure."""
        return rank in self.ranks or (self.one_a_node and local_rank == 0)


def trace_request(ranks: str = USUAL_RANKS, *, operators: bool = True, memory: bool = False) -> TraceRequest:
    """Return the request for a list such as `0,slowest,one-a-node`. Raises ConfigError for an unknown word."""
    numbers: set[int] = set()
    words: set[str] = set()
    for word in (each.strip() for each in ranks.split(",")):
        if word in (SLOWEST, ONE_A_NODE):
            words.add(word)
        elif word.isascii() and word.isdigit():
            numbers.add(int(word))
        else:
            raise ConfigError(
                "--ranks",
                ranks,
                f"it must be a comma-separated list of rank numbers, {SLOWEST} and {ONE_A_NODE}",
                f"for example --ranks {USUAL_RANKS}",
            )
    return TraceRequest(
        tuple(sorted(numbers)), SLOWEST in words, ONE_A_NODE in words, operators=operators, memory=memory
    )


class ControlRequest(StrEnum):
    """Action requested from a worker after its step. The empty string, which is false, requests none."""

    NOTHING = ""
    SAVE = "save"
    """Write a checkpoint, and continue."""
    LINKS = "links"
    """Measure the links between the workers, and continue."""
    LEAVE = "leave"
    """Save, and end the training normally."""
