"""Ragged columns against plain lists of arrays, and the sources that give them."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scaleray.data import ArraySource, DatasetSource, ParquetSource, Part, StepPlan
from scaleray.data.blocks import LocalBlocks, rebatch
from scaleray.data.ragged import Ragged, as_ragged, concatenated, with_ragged
from scaleray.data.split_facts import lengths_of
from scaleray.errors import DataError

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=12)


def made(lengths, *, width=0):
    """Rows of these lengths, in which every value is another one."""
    total = int(np.sum(lengths))
    values = np.arange(total * max(1, width), dtype=np.float32).reshape(total, *([width] if width else []))
    return np.split(values, np.cumsum(lengths)[:-1])


def assert_rows(column, rows):
    assert isinstance(column, Ragged) and len(column) == len(rows)
    assert column.offsets[0] == 0 and column.offsets[-1] == len(column.values)
    for found, row in zip(column, rows, strict=True):
        assert found.dtype == row.dtype and np.array_equal(found, row) and found.shape[1:] == row.shape[1:]


@given(LENGTHS, st.data(), st.sampled_from([0, 2]))
def test_a_column_is_cut_indexed_and_joined_like_the_list_of_its_rows(lengths, data, width):
    rows = made(lengths, width=width)
    column = Ragged.of(rows)
    assert_rows(column, rows)
    assert column.lengths.tolist() == lengths
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(rows))] * 2)))
    assert_rows(column[start:stop], rows[start:stop]) if stop > start else None
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=9))
    assert_rows(column[np.array(index)], [rows[i] for i in index])
    assert np.array_equal(column[index[0]], rows[index[0]])
    assert_rows(
        concatenated([column[:1], column, column[np.array(index)]]), [rows[0], *rows, *(rows[i] for i in index)]
    )
    assert_rows(pickle.loads(pickle.dumps(column)), rows)


def test_rows_of_one_length_join_ragged_ones():
    even = np.arange(6.0).reshape(2, 3)
    rows = [np.array([7.0]), np.array([8.0, 9.0])]
    assert_rows(concatenated([even, Ragged.of(rows)]), [*even, *rows])
    assert_rows(as_ragged(even), list(even))
    assert set(with_ragged({"x": even, "y": even}, ["x", "z"])) == {"x", "y"}


def test_a_copy_has_memory_of_its_own_and_a_slice_has_not():
    column = Ragged.of(made([2, 3]))
    assert np.shares_memory(column[1:].values, column.values)
    assert not np.shares_memory(column.copy().values, column.values)


# sources

ROWS = made([3, 0, 1, 5, 2, 2, 4, 1])
INDICES = np.array([3, 0, 7, 0])


class Items(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"x": torch.from_numpy(self.rows[index]), "y": index}


def parquet(tmp_path):
    table = pa.table({"x": pa.array([row.tolist() for row in ROWS], pa.list_(pa.float32())), "y": range(len(ROWS))})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=3)
    return ParquetSource(tmp_path / "rows.parquet")


@pytest.mark.parametrize("kind", ["arrays", "objects", "dataset", "parquet"])
def test_every_source_of_unequal_rows_gives_them_in_the_order_asked_for(kind, tmp_path):
    objects = np.empty(len(ROWS), dtype=object)
    objects[:] = ROWS
    source = {
        "arrays": lambda: ArraySource({"x": [torch.from_numpy(row) for row in ROWS], "y": np.arange(len(ROWS))}),
        "objects": lambda: ArraySource({"x": objects, "y": np.arange(len(ROWS))}),
        "dataset": lambda: DatasetSource(Items(ROWS)),
        "parquet": lambda: parquet(tmp_path),
    }[kind]()
    found = source.read(INDICES)
    assert_rows(found["x"], [ROWS[i] for i in INDICES])
    assert found["y"].tolist() == INDICES.tolist()
    part = Part(StepPlan(len(ROWS), 3, seed=2), 0, 1, 0, 7)
    pieces = rebatch(LocalBlocks(source, part, chunk_bytes=50), [part.num_rows(step) for step in range(7)])
    for step, (columns, _) in enumerate(pieces):
        rows = [ROWS[i] for i in part.plan.global_indices(step)]
        for got, row in zip(columns["x"], rows, strict=True):
            assert np.array_equal(got, row)


def test_a_hash_of_ragged_arrays_knows_where_rows_begin():
    hashes = {ArraySource({"x": made(lengths)}).describe()["sha256"] for lengths in ([1, 2, 3], [2, 1, 3], [3, 2, 1])}
    assert len(hashes) == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: ArraySource({"x": [np.ones((2, 3)), np.ones(3)]}),
        lambda: DatasetSource(Items([np.ones((2, 3)), np.ones(3)])).read(np.array([0, 1])),
    ],
)
def test_rows_that_differ_in_their_number_of_dimensions_are_refused(make):
    with pytest.raises(DataError, match="may differ in size but not in their number of dimensions"):
        make()


def test_lists_within_lists_of_several_lengths_are_refused(tmp_path):
    table = pa.table({"x": pa.array([[[1], [2, 3]], [[4, 5]]], pa.list_(pa.list_(pa.int64())))})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="rows may differ only in the length of their outer list"):
        ParquetSource(tmp_path / "rows.parquet").read(np.array([0, 1]))


def test_a_column_of_parquet_and_an_attribute_of_a_dataset_give_lengths(tmp_path):
    lengths = [len(row) for row in ROWS]
    parquet(tmp_path)
    known = ParquetSource(tmp_path / "rows.parquet", lengths="x")
    items = Items(ROWS)
    items.lengths = torch.tensor(lengths)
    for source in (known, DatasetSource(items), ArraySource({"x": ROWS, "y": np.arange(8)})):
        assert lengths_of(source).values.tolist() == lengths
    assert lengths_of(ParquetSource(tmp_path / "rows.parquet")) is None
    items.lengths = [1, 2]
    with pytest.raises(DataError, match="must be 8 non-negative numbers, one per row"):
        lengths_of(DatasetSource(items))
    for column, words in (("y", "a column of lists"), ("z", "has no such column; it has x, y")):
        with pytest.raises(DataError, match=words):
            ParquetSource(tmp_path / "rows.parquet", lengths=column)
