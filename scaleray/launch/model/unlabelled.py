"""Rows without the columns that only training needs: labels, which a preprocessor fitted with them requires all the
same.

A missing column is replaced by a value of training's. A column that changes with another replacement is made of it, and
is left out again: the rest is as it would be with the column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from scaleray.data.ragged import Ragged, flat_values
from scaleray.data.source import Columns, rows_in
from scaleray.errors import DataError, ScaleRayError

Change = Callable[[Columns], Columns]


class Unlabelled:
    """Changes rows as training's are, of which some columns may be missing. examples: some rows of training, before any
    change; empty where they are not known."""

    def __init__(self, change: Change, examples: Columns, where: str) -> None:
        self.change, self.examples, self.where = change, examples, where
        self._made_of: dict[tuple[str, ...], set[str]] = {}  # columns that are left out, by those that are missing

    def __call__(self, rows: Columns) -> Columns:
        """The changed rows, without the columns that missing ones would be needed for."""
        missing = tuple(name for name in self.examples if name not in rows)
        try:
            # a preprocessor may change what it is given
            return self.change({name: column.copy() for name, column in rows.items()} if missing else rows)
        except ScaleRayError:
            if not missing:
                raise
        given = self._with(rows, missing, other=False)
        if missing not in self._made_of:
            again = self._with(rows, missing, other=True)
            self._made_of[missing] = {
                name for name in given if name not in again or not _same(given[name], again[name])
            }
        left_out = {*missing, *self._made_of[missing]}
        return {name: column for name, column in given.items() if name not in left_out}

    def problem(self) -> DataError | None:
        """The error of a model that lacks a column which was left out."""
        for missing, made in self._made_of.items():
            if made:
                columns = ", ".join(sorted(made))
                return DataError(f"column {missing[0]} of {self.where}", None, f"{columns} of the batch is made of it")
        return None

    def _with(self, rows: Columns, missing: Sequence[str], *, other: bool) -> Columns:
        num_rows = rows_in(rows)
        filled = {name: _repeated(self.examples[name], num_rows, other=other) for name in missing}
        return self.change({**{name: column.copy() for name, column in rows.items()}, **filled})


def _repeated(examples: Any, num_rows: int, *, other: bool) -> Any:
    """The first example in every row, or another one that differs from it."""
    place = 0
    if other:
        first = examples[0]
        place = next((n for n in range(len(examples)) if not np.array_equal(examples[n], first)), 0)
    return examples[np.full(num_rows, place)]


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and np.array_equal(_values(left), _values(right))


def _values(column: Any) -> np.ndarray:
    flat = flat_values(column) if isinstance(column, Ragged) else column
    return np.nan_to_num(flat) if flat.dtype.kind == "f" else flat
