"""Datasets and streams of Hugging Face's library `datasets`, which is used only if the user has imported it.

A Dataset is read in blocks of rows, as reading row by row takes up to twenty times as long. Memory-mapped files are
sent to other processes as paths. Every worker iterates a whole stream (IterableDataset), since its shards rarely have
equal sizes; `split_dataset_by_node` is refused."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from scaleray.data.parquet import column_to_numpy
from scaleray.data.ragged import with_ragged
from scaleray.data.row_values import READS, rows_to_look_at
from scaleray.data.source_interface import Columns, as_column
from scaleray.data.sources import DatasetSource
from scaleray.data.user_dataset import AsGiven
from scaleray.errors import DataError
from scaleray.workload import no_exit

MAP_STYLE, STREAM = ("datasets.arrow_dataset", "Dataset"), ("datasets.iterable_dataset", "IterableDataset")
IN_BLOCKS = ("arrow", "numpy", "torch")
"""Formats in which a row does not depend on its block, as it may with `with_transform`."""
OF_TABLES = ("pandas", "polars")


def is_dataset(value: Any) -> bool:
    """Whether a value is a map-style Dataset of Hugging Face."""
    return _is(value, MAP_STYLE)


def is_stream(value: Any) -> bool:
    """Whether a value is an IterableDataset of Hugging Face, or the rows of a DataLoader over one."""
    return _is(_unwrapped(value), STREAM)


def _unwrapped(value: Any) -> Any:
    return getattr(value, "items", value)


def _is(value: Any, name: tuple[str, str]) -> bool:
    return any((kind.__module__, kind.__name__) == name for kind in type(value).__mro__)


def check(value: Any, *, split: str) -> None:
    """Raise DataError for a Dataset or stream whose rows are not mappings, or that is only one worker's part."""
    if not (is_dataset(value) or is_stream(value)):
        return
    value = _unwrapped(value)
    formatting = value.format["type"] if is_dataset(value) else getattr(value._formatting, "format_type", None)
    if formatting in OF_TABLES or (is_stream(value) and formatting == "arrow"):
        allowed = "a row must be a mapping of columns"
        raise DataError(f"the format of the {split} data", formatting, allowed, "with_format(None), 'numpy' or 'torch'")
    if getattr(value, "_distributed", None) is not None:
        raise DataError(
            f"the {split} data",
            "a part of a stream (split_dataset_by_node)",
            "every worker would get the same part",
            "omit split_dataset_by_node(): scaleray gives each worker its own rows",
        )
    if getattr(value, "_starting_state_dict", None) is not None:
        raise DataError(
            f"the {split} data",
            "a stream with a loaded state",
            "its epochs would begin in the middle",
            "omit load_state_dict(): a resumed run finds its position by itself",
        )


def in_blocks(dataset: Any, *, allows_text: bool) -> BlockSource | None:
    """Source for a Dataset whose rows do not depend on their block; None for other Datasets, such as images."""
    formatting = dataset.format
    if formatting["type"] is None and all(_is_plain(dataset.features[name]) for name in formatting["columns"]):
        dataset = dataset.with_format("arrow", columns=formatting["columns"])
    return BlockSource(dataset, allows_text=allows_text) if dataset.format["type"] in IN_BLOCKS else None


def _is_plain(feature: Any) -> bool:
    """Whether a column's values, or the values of its lists, are stored numbers or text."""
    while (inner := getattr(feature, "feature", None)) is not None:
        feature = inner
    return type(feature).__name__ in ("Value", "ClassLabel")


class BlockSource(DatasetSource):
    """A Hugging Face Dataset of numbers or text, read in blocks of rows."""

    def __init__(self, dataset: Any, *, allows_text: bool = False) -> None:
        super().__init__(dataset, allows_text=allows_text, as_given=AsGiven(dataset))
        self.gives_tuples = False
        self.lengths = self._lengths() if self.ragged_columns else None
        if few := rows_to_look_at(self):
            self.row_s = min(self._seconds(np.array(few)) for _ in range(READS)) / len(few)

    def _lengths(self) -> np.ndarray:
        """Length of each row (its longest list), computed without reading the lists."""
        import pyarrow.compute as pc

        columns = [self.dataset.data.table.column(name) for name in self.ragged_columns]
        lengths = np.max([pc.list_value_length(column).to_numpy() for column in columns], axis=0)
        order = self.dataset._indices  # of a Dataset that was shuffled, or of which rows were selected
        return lengths if order is None else lengths[order.column(0).to_numpy()]

    def _seconds(self, indices: np.ndarray) -> float:
        started = time.perf_counter()
        self.read(indices)
        return time.perf_counter() - started

    def read(self, indices: np.ndarray) -> Columns:
        with no_exit(f"{type(self.dataset).__name__}.__getitem__"):
            return with_ragged(self._columns_of(self.dataset[indices.tolist()]), self.ragged_columns)

    def _columns_of(self, item: Any) -> Columns:
        """Columns of a block of rows, or of a single row."""
        if isinstance(item, Mapping):
            return {name: as_column(name, value, allows_text=self.allows_text) for name, value in item.items()}
        where = f"the Dataset of {self.num_rows} rows"
        numbers = lambda name: column_to_numpy(name, item[name], where, allows_text=self.allows_text)
        return {name: numbers(name).copy() for name in item.column_names}  # Arrow's memory must not be written
