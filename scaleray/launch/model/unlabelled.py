"""Rows without the columns that only training needs: labels, which a preprocessor fitted with them asks for all the
same.

A column that is missing is stood in for by a value of training's, and taken out again. That is right only where no
other column depends on it, which is looked at with two values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from scaleray.data.ragged import Ragged, flat_values
from scaleray.data.source import Columns
from scaleray.errors import DataError, ScaleRayError

Change = Callable[[Columns], Columns]


class Unlabelled:
    """Changes rows as training's are, of which some columns may be missing. examples: some rows of training, before any
    change; empty where they are not known."""

    def __init__(self, change: Change, examples: Columns, where: str) -> None:
        self.change, self.examples, self.where = change, examples, where
        self._looked_at: set[str] = set()

    def __call__(self, rows: Columns) -> Columns:
        """The changed rows. Raises DataError for a missing column that other columns are made of."""
        missing = [name for name in self.examples if name not in rows]
        try:
            # a preprocessor may change what it is given
            return self.change({name: column.copy() for name, column in rows.items()} if missing else rows)
        except ScaleRayError:
            if not missing:
                raise
        given = self._with(rows, missing, other=False)
        if not self._looked_at.issuperset(missing):
            if not _same(given, self._with(rows, missing, other=True)):
                there = ", ".join(rows)
                raise DataError(
                    f"column {missing[0]} of {self.where}",
                    None,
                    "the model's columns are made of it",
                    f"there are: {there}",
                )
            self._looked_at.update(missing)
        return given

    def _with(self, rows: Columns, missing: list[str], *, other: bool) -> Columns:
        num_rows = len(next(iter(rows.values())))
        filled = {name: _repeated(self.examples[name], num_rows, other=other) for name in missing}
        own = {name: column.copy() for name, column in rows.items()}
        return {name: column for name, column in self.change({**own, **filled}).items() if name not in missing}


def _repeated(examples: Any, num_rows: int, *, other: bool) -> Any:
    """The first example in every row, or another one that differs from it."""
    place = 0
    if other:
        first = examples[0]
        place = next((n for n in range(len(examples)) if not np.array_equal(examples[n], first)), 0)
    return examples[np.full(num_rows, place)]


def _same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    if left.keys() != right.keys():
        return False
    return all(
        type(left[name]) is type(right[name]) and np.array_equal(_values(left[name]), _values(right[name]))
        for name in left
    )


def _values(column: Any) -> np.ndarray:
    flat = flat_values(column) if isinstance(column, Ragged) else column
    return np.nan_to_num(flat) if flat.dtype.kind == "f" else flat
