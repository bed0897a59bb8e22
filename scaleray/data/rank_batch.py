"""One rank's rows of one step, as passed from reading to training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from scaleray.data.source_interface import Columns


@dataclass(frozen=True)
class TokenCuts:
    """Micro-batches of a step counted in tokens. edges: their bounds in this rank's rows. most: largest number of any
    rank."""

    edges: tuple[int, ...]
    most: int


@dataclass(frozen=True)
class RankBatch:
    """One rank's rows of one step. `num_rows` is 0 if a partial batch has no row for this rank.

    The arrays then contain one placeholder row, whose loss must not count, as every rank must run the step. cuts:
    micro-batches of this rank, if counted in tokens."""

    step: int
    columns: Columns
    num_rows: int
    cuts: TokenCuts | None = None
    made: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    """Micro-batches already made by `collate`, by their first row and end; one for each loss."""

    def take(self, start: int, stop: int) -> Made | None:
        """Take the micro-batch of these rows if it has already been made; it then belongs to the caller."""
        there = self.made.get((start, stop))
        return Made(there.pop()) if there else None


@dataclass(frozen=True)
class Made:
    """A micro-batch made by `collate`."""

    batch: Any
