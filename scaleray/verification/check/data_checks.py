"""Checks of a workload's data: the first batch, whether rows repeat, and how fast they are read."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from scaleray.data import TRAIN, Input, Part, RankBatch
from scaleray.data.ragged import Ragged, flat_values, joined
from scaleray.data.row_values import row_values_of
from scaleray.data.source_interface import Columns, Source, rows_in
from scaleray.data.transformed import place_of
from scaleray.data.user_dataset import problem_of
from scaleray.errors import DataError
from scaleray.records.check_record import DOUBTFUL, GOOD, WRONG, ColumnFacts, Finding
from scaleray.training.setup.job import TrainJob
from scaleray.workload import own_method

READ_S = 1.0
"""Seconds for which rows are read to measure the speed."""

FEW = 4
"""Number of rows, or values of a row, below which they may be equal by chance."""
ROWS = 32
"""Minimum number of rows searched for constants, if the split has that many."""
FEATURES = 32
"""Number of columns of a table up to which each constant column is reported. In wider tables, such as the pixels of
images, several columns may always be constant, so they are reported only up to a tenth of the columns."""


def columns_of_splits(sources: Mapping[str, Source]) -> Iterator[Finding]:
    """A finding for each split with a column of another type than in training, and one if all splits have the same
    columns. A split may lack columns, since a transform may add some only in training; its loss and metrics show
    whether they are needed."""
    types = {name: found for name, source in sources.items() if (found := _types(name, source)) is not None}
    first, alike = types.get(TRAIN, {}), True
    for name, found in types.items():
        if (column := next((c for c in first if c in found and first[c] != found[c]), None)) is not None:
            alike = False
            text = f"column {column} is {found[column]} here and {first[column]} in train"
            yield Finding(f"split {name}", DOUBTFUL, text)
        elif first and found.keys() != first.keys():
            alike = False
            only = {name: [c for c in found if c not in first], TRAIN: [c for c in first if c not in found]}
            text = " and ".join(f"{', '.join(columns)} only in {split}" for split, columns in only.items() if columns)
            yield Finding(f"split {name}", GOOD, f"{text}; the other columns are the same")
    if alike and len(sources) > 1:
        yield Finding("splits", GOOD, f"{', '.join(sources)} have the same columns")


def sendable(sources: Mapping[str, Source]) -> Iterator[Finding]:
    """A finding for each split whose Dataset cannot be sent to workers."""
    for name, source in sources.items():
        if (problem := problem_of(source)) is not None:
            yield Finding(f"split {name}", WRONG, str(problem))


def repeatable(workload: Any, sources: Mapping[str, Source]) -> Iterator[Finding]:
    """A finding for each split whose rows change when they are read again."""
    for name, source in sources.items():
        values = row_values_of(source)
        if not values.are_repeatable:
            text = f"the rows are not repeatable: {values.difference}\n  {values.advice}"
            yield Finding(f"split {name}", WRONG, text)
    if (method := own_method(workload, "transform")) is not None:
        yield Finding("transform", GOOD, f"transform() at {place_of(method)} gave the same result twice for a few rows")


def constant(batch: RankBatch, *, embeds: bool = False) -> Iterator[Finding]:
    """A finding for each column of a batch with a single value, for each table with such columns, and for
    multidimensional rows, such as images and sequences, with a single value. Columns of single integers, such as
    labels, are left to `ModelCheck.extremes`, since a few may be equal by chance. embeds: whether the model looks up
    tokens, of which the first and last are often equal in every row."""
    for name, values in batch.columns.items():
        flat = flat_values(values)
        is_whole, is_ragged = flat.dtype.kind in "iu", isinstance(values, Ragged)
        if len(values) < FEW or not flat.size or flat.dtype.kind not in "biufc":
            continue
        if is_whole and not is_ragged and values.ndim == 1:
            continue
        is_binary = flat.dtype.kind == "b" or (is_whole and set(np.unique(flat).tolist()) <= {0, 1})
        if (flat == flat.flat[0]).all():
            is_mask = is_binary and (is_ragged or values.ndim <= 2 or not is_whole)
            if not is_mask or len(batch.columns) == 1:
                text = f"column {name} is {flat.flat[0]} in all of {len(values)} rows: the model learns nothing from it"
                yield Finding("first batch", DOUBTFUL, text)
            continue
        if is_ragged or values.ndim == 1 or is_binary:
            continue
        rows = values.reshape(len(values), -1)
        same = np.flatnonzero((rows == rows[0]).all(axis=0)).tolist()
        is_table, size = values.ndim == 2 and not (embeds and is_whole), rows.shape[1]
        if is_table and same and (size <= FEATURES or 10 * len(same) <= size):
            text = f"column {name} has one value in all of {len(rows)} rows at position {', '.join(map(str, same))}"
            yield Finding("first batch", DOUBTFUL, text)
        elif (is_whole or values.ndim > 2 or size > FEATURES) and size >= FEW:
            number = int((rows == rows[:, :1]).all(axis=1).sum())
            text = f"{number} of {len(rows)} rows of column {name} consist of a single value, like an empty image"
            if number:
                yield Finding("first batch", DOUBTFUL, text)


class InputCheck:
    """The rows of a training, as its only worker reads them."""

    def __init__(self, job: TrainJob, sources: Mapping[str, Source]) -> None:
        self.job = job
        plan = job.train_plan()
        self.split = job.splits[TRAIN]
        if self.split.is_streamed:
            raise DataError(
                "the train data", "a Ray Dataset", "check runs without Ray", "pass a few of its rows as arrays"
            )
        self.plan, self.part = plan, Part(plan, 0, 1, 0, job.recipe.total_steps)
        self.input = Input(sources, job.config.data, may_draw=True, others_wait_s=lambda: 60.0, warn=lambda text: None)

    def first_batch(self) -> RankBatch:
        """All rows of the first global batch."""
        stream = self.input.open(self.split, Part(self.plan, 0, 1, 0, 1))
        try:
            return next(stream)
        finally:
            stream.close()

    def first_rows(self, batch: RankBatch) -> RankBatch:
        """The first batch, or the first ROWS rows if the split has more."""
        wanted = min(ROWS, self.plan.num_samples)
        if batch.num_rows >= wanted:
            return batch
        num_steps = min(-(-wanted // batch.num_rows), self.job.recipe.total_steps)
        stream = self.input.open(self.split, Part(self.plan, 0, 1, 0, num_steps))
        try:
            batches = [next(stream).columns for _ in range(num_steps)]
        finally:
            stream.close()
        columns = joined(batches)
        return RankBatch(0, columns, rows_in(columns))

    def speed(self, figures: dict[str, Any]) -> Finding:
        """Finding on the number of rows that one worker reads per second."""
        stream = self.input.open(self.split, self.part)
        rows, started, taken = 0, time.perf_counter(), 0.0
        try:
            for batch in stream:
                rows += batch.num_rows
                taken = time.perf_counter() - started
                if taken >= READ_S:
                    break
        finally:
            stream.close()
        figures["input_rows_per_s"] = rows / max(taken, 1e-9)
        return Finding("input", GOOD, f"{figures['input_rows_per_s']:,.0f} rows per second, read by one worker")

    def columns(self, batch: RankBatch) -> Iterator[ColumnFacts]:
        """Facts about each column of a batch."""
        for name, values in batch.columns.items():
            flat = flat_values(values)
            has_range = flat.size and flat.dtype.kind in "biuf" and np.isfinite(flat).any()
            numbers = flat[np.isfinite(flat)] if has_range else flat
            low, high = (float(numbers.min()), float(numbers.max())) if has_range else (None, None)
            yield ColumnFacts(name, _shape(values), str(values.dtype), low, high)


def _types(split: str, source: Source) -> dict[str, str] | None:
    """Type and shape of each column; columns of a Dataset of tuples are named without their split."""
    try:
        rows: Columns = source.read(np.arange(1))
    except (DataError, TypeError):
        return None
    return {
        name.removeprefix(split) if name.startswith(f"{split}[") else name: (
            f"{values.dtype}[{_shape(values, rows=False)}]"
        )
        for name, values in rows.items()
    }


def _shape(values: Any, *, rows: bool = True) -> str:
    if isinstance(values, Ragged):
        lengths = values.lengths
        return f"{len(values)} of {lengths.min()} to {lengths.max()}" if rows else "ragged"
    return " x ".join(map(str, values.shape if rows else values.shape[1:]))
