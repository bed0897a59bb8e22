"""A Ray Dataset as the data of a split, streamed by Ray Data in its own order.

A row of a stream has no index to seed its random numbers. They are computed from its values, the seed, the split and
the epoch instead. A row is then the same in any order of arrival, on any number of workers and after a resume, and
equal rows draw equal numbers. The reading worker knows the epoch, but Ray Data's tasks do not; a `transform` therefore
runs in tasks of the reading worker."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np

from scaleray.data.preprocessing import Preprocess
from scaleray.data.ragged import Ragged
from scaleray.data.row_random import RowRandom
from scaleray.data.sample_order import StepPlan, mixed, stream_key
from scaleray.data.source_interface import Columns, as_column, rows_in
from scaleray.data.transformed import Step


class StreamSource:
    """A streamed Ray Dataset. Its rows cannot be read by index, so their order depends on the number of workers."""

    group_sizes: tuple[int, ...] | None = None
    tokens_per_row: int | None = None

    def __init__(self, dataset: Any, *, num_rows: int | None = None) -> None:
        self.dataset = dataset
        self.num_rows = dataset.count() if num_rows is None else num_rows
        self.preprocessor: Any = None
        """The fitted preprocessor applied to the rows."""
        self.transform: Step | None = None
        """Steps that change the rows after Ray Data has read them."""
        self.row_bytes = 1024

    def mapped(self, step: Step) -> StreamSource:
        """Add a step: a preprocessor runs in Ray Data's own tasks, a transform as rows are read."""
        source = StreamSource(self.dataset, num_rows=self.num_rows)
        source.preprocessor, source.transform = self.preprocessor, self.transform
        if isinstance(step, Preprocess):
            source.dataset = self.dataset.map_batches(functools.partial(_preprocessed, step), batch_format="numpy")
            source.preprocessor = step.preprocessor
        else:
            source.transform = step
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


def _preprocessed(step: Preprocess, rows: Columns) -> Columns:
    columns = {n: as_column(n, column, allows_text=True) for n, column in rows.items()}
    given = step(columns, RowRandom(np.zeros(rows_in(rows), np.uint64)))  # it draws nothing
    return {name: list(c) if isinstance(c, Ragged) else c for name, c in given.items()}


def seeds_of_values(rows: Columns, plan: StepPlan, epoch: int) -> np.ndarray:
    """Seeds of rows without an index, uint64 (n,), computed from seed, split, epoch and the rows' values."""
    digests = [hashlib.blake2b(digest_size=8) for _ in range(rows_in(rows))]
    for _, column in sorted(rows.items()):
        for digest, row in zip(digests, column, strict=True):
            value = np.asarray(row)
            digest.update(repr(row).encode() if value.dtype == object else np.ascontiguousarray(value).tobytes())
    found = np.frombuffer(b"".join(digest.digest() for digest in digests), dtype=np.uint64)
    return mixed(found ^ np.uint64(stream_key(plan.seed, "rows", plan.name, epoch)))
