"""A Ray Dataset as the data of a split: streamed by Ray Data, in an order of its own."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np

from scaleray.data.preprocessing import Preprocess
from scaleray.data.ragged import Ragged
from scaleray.data.row_random import RowRandom
from scaleray.data.source import Columns, as_column
from scaleray.data.transformed import Step


class StreamSource:
    """A Ray Dataset, streamed: its rows cannot be addressed, so their order depends on the number of workers."""

    group_sizes: tuple[int, ...] | None = None
    tokens_per_row: int | None = None

    def __init__(self, dataset: Any, *, num_rows: int | None = None) -> None:
        self.dataset = dataset
        self.num_rows = dataset.count() if num_rows is None else num_rows
        self.preprocessor: Any = None
        """The fitted preprocessor through which the rows go."""
        self.row_bytes = 1024

    def mapped(self, step: Step) -> StreamSource:
        """The same rows, changed in Ray's own tasks, which know of no seed: `rng` draws other numbers each time."""
        mapped = self.dataset.map_batches(functools.partial(_unseeded, step), batch_format="numpy")
        source = StreamSource(mapped, num_rows=self.num_rows)
        source.preprocessor = step.preprocessor if isinstance(step, Preprocess) else self.preprocessor
        return source

    def read(self, indices: np.ndarray) -> Columns:
        raise TypeError("a Ray Dataset is streamed, not addressed by index")

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "Ray Dataset",
            "rows": self.num_rows,
            "bytes": None,
            "sha256": None,
            "hashed": "nothing: rows are computed",
        }


def _unseeded(step: Step, rows: Columns) -> Columns:
    seeds = np.frombuffer(os.urandom(8 * len(next(iter(rows.values())))), dtype=np.uint64)
    given = step({n: as_column(n, column, allows_text=True) for n, column in rows.items()}, RowRandom(seeds))
    return {name: list(c) if isinstance(c, Ragged) else c for name, c in given.items()}
