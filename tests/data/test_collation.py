"""From rows to batches: what a collate gets, and the collations for ragged rows against loops over rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scaleray.data import Flattening, Padding, Ragged, flattened, padded
from scaleray.data.collation import Rows, collated
from scaleray.errors import DataError, WorkloadError

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=9)


def columns(lengths=(3, 1, 0, 2)):
    total = sum(lengths)
    x = np.split(np.arange(1, total + 1, dtype=np.float32), np.cumsum(lengths)[:-1])
    return {"x": Ragged.of(x), "y": np.arange(len(lengths))}


@given(LENGTHS, st.sampled_from([1, 4]), st.sampled_from([0, -100]))
def test_padding_is_that_of_a_loop_over_rows(lengths, multiple_of, value):
    rows = columns(lengths)
    batch = padded(rows, value=value, lengths="lengths", multiple_of=multiple_of)
    width = -(-max(lengths) // multiple_of) * multiple_of
    assert batch["x"].shape == batch["mask"].shape == (len(lengths), width) and batch["x"].dtype == torch.float32
    for row, length in enumerate(lengths):
        assert batch["x"][row].tolist() == rows["x"][row].tolist() + [value] * (width - length)
        assert batch["mask"][row].tolist() == [True] * length + [False] * (width - length)
    assert batch["lengths"].tolist() == lengths and batch["y"].tolist() == list(range(len(lengths)))


@given(LENGTHS)
def test_flattening_leaves_the_values_one_after_another(lengths):
    batch = flattened(columns(lengths))
    assert batch["x"].tolist() == list(range(1, sum(lengths) + 1))
    assert batch["x_offsets"].diff().tolist() == lengths


def test_values_and_masks_by_column():
    rows = {**columns(), "labels": Ragged.of([[1], [2, 3], [], [4]])}
    batch = padded(rows, value={"labels": -100})
    assert batch["labels"].tolist() == [[1, -100], [2, 3], [-100, -100], [4, -100]]
    assert set(batch) == {"x", "x_mask", "labels", "labels_mask", "y"} and not batch["x"][2].any()
    assert set(padded(rows, mask=None)) == {"x", "labels", "y"}


def test_a_width_of_its_own_and_a_row_that_is_longer():
    assert padded(columns(), to=5)["x"].shape == (4, 5)
    with pytest.raises(DataError, match=r"a row of 3 values.*Padding\(to=2\)"):
        padded(columns(), to=2)


def test_a_collate_gets_dicts_of_tensors_or_the_tuples_of_a_dataset():
    rows = Rows(columns())
    assert isinstance(rows, list) and [row["x"].tolist() for row in rows] == [[1, 2, 3], [4], [], [5, 6]]
    assert [int(row["y"]) for row in rows] == [0, 1, 2, 3] and rows.columns["y"].tolist() == [0, 1, 2, 3]
    tuples = Rows({"1": np.arange(2), "0": np.ones((2, 3))}, gives_tuples=True)
    assert [(x.shape, int(y)) for x, y in tuples] == [((3,), 0), ((3,), 1)]
    stacked = torch.utils.data.default_collate(tuples)
    assert stacked[0].shape == (2, 3) and stacked[1].tolist() == [0, 1]


def test_padding_takes_columns_rows_and_plain_lists_of_dicts():
    plain = [{"x": np.arange(1, 3), "y": 5}, {"x": np.arange(4), "y": 6}]
    expected = {"x": [[1, 2, 0, 0], [0, 1, 2, 3]], "y": [5, 6]}
    of_columns = {"x": Ragged.of([row["x"] for row in plain]), "y": np.array([5, 6])}
    for given_rows in (plain, of_columns, Rows(of_columns)):
        batch = padded(given_rows, mask=None)
        assert {name: value.tolist() for name, value in batch.items()} == expected


def test_built_in_collations_make_no_object_for_each_row(monkeypatch):
    monkeypatch.setattr("scaleray.data.collation.Rows", None)
    assert collated(Padding(value=7), columns(), gives_tuples=False)["x"][1].tolist() == [4, 7, 7]
    assert "x_offsets" in collated(Flattening(), columns(), gives_tuples=False)


def test_a_collate_that_fails_is_shown_with_its_line():
    with pytest.raises(WorkloadError, match=r"collate\(\) failed while making a batch of 4 rows[^$]*test_collation"):
        collated(lambda rows: rows[0]["z"], columns(), gives_tuples=False)
