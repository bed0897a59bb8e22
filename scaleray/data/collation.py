"""Turn rows into a batch: the argument of a workload's `collate(rows)`, and collate functions for rows of unequal
length.

`padded` pads every row to the longest one; `flattened` concatenates the rows. A workload's own `collate` can call them,
or they can replace it: `collate = scaleray.data.Padding(value=0, mask="mask")`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from scaleray.data.ragged import Ragged
from scaleray.data.source_interface import Columns, as_column, rows_in
from scaleray.data.user_dataset import TURNS
from scaleray.errors import DataError
from scaleray.workload import call_user_code

Batch = dict[str, torch.Tensor]


class Rows(list[Any]):
    """The rows of a micro-batch: a list of dicts of tensors by column name, or of tuples if the Dataset yields tuples.

    columns: the same rows as arrays and Ragged columns by name, for collate functions without a loop."""

    def __init__(self, columns: Columns, *, gives_tuples: bool = False) -> None:
        self.columns, self.gives_tuples = columns, gives_tuples
        by_column = [_rows_of(column) for column in columns.values()]
        if gives_tuples:
            order = sorted(range(len(columns)), key=lambda place: int(list(columns)[place]))
            super().__init__(zip(*(by_column[place] for place in order), strict=True))
        else:
            super().__init__(dict(zip(columns, row, strict=True)) for row in zip(*by_column, strict=True))


def _rows_of(column: Any) -> Iterable[torch.Tensor]:
    if isinstance(column, Ragged) and column.shapes is not None:
        return [torch.from_numpy(row) for row in column]
    if isinstance(column, Ragged):
        return torch.split(torch.from_numpy(column.values), column.lengths.tolist())
    return torch.from_numpy(column).unbind()


def collated(collate: Callable[[Any], Any], columns: Columns, *, gives_tuples: bool) -> Any:
    """Call a workload's `collate` for these rows. Raises WorkloadError with the user's line if it fails."""
    num_rows = rows_in(columns)
    rows = columns if isinstance(collate, Columnwise) else Rows(columns, gives_tuples=gives_tuples)
    with TURNS:
        return call_user_code(lambda: collate(rows), what="collate()", doing=f"making a batch of {num_rows} rows")


def batch_values(batch: Any) -> list[Any]:
    """Yield all values in a batch of nested dicts, tuples and lists."""
    if isinstance(batch, Mapping):
        return [value for inner in batch.values() for value in batch_values(inner)]
    if isinstance(batch, tuple | list):
        return [value for inner in batch for value in batch_values(inner)]
    return [batch]


def refuse_ragged(columns: Columns, *, what: str) -> None:
    """Raise DataError for rows of unequal length without a `collate`. what: the data's name, as in `the train data`."""
    for name, column in columns.items():
        if isinstance(column, Ragged):
            if column.shapes is not None:
                raise DataError.problem(
                    f"column {name} of {what}",
                    f"has rows of unequal size ({column.sizes}), which cannot form a batch",
                    "give them one size in transform(rows, rng), such as np.stack([resize(i) for i in "
                    "rows['image']]), or combine them in a collate(rows) of your own",
                )
            raise DataError.problem(
                f"column {name} of {what}",
                f"has rows of unequal length ({column.sizes}): a collate(rows) must turn them into a batch",
                "in the workload, collate = scaleray.data.Padding(value=0, mask='mask') pads them and marks real "
                "values; scaleray.data.Flattening() concatenates them",
            )


class Columnwise:
    """A collate function that works on columns, without an object for each row."""


class Padding(Columnwise):
    """`padded` with these options, as a workload's `collate`."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __call__(self, rows: Columns | Sequence[Any]) -> Batch:
        return padded(rows, **self.options)


class Flattening(Columnwise):
    """`flattened` as a workload's `collate`."""

    def __call__(self, rows: Columns | Sequence[Any]) -> Batch:
        return flattened(rows)


def padded(
    rows: Columns | Sequence[Any],
    *,
    value: float | Mapping[str, float] = 0,
    mask: str | None = "mask",
    lengths: str | None = None,
    to: int | None = None,
    multiple_of: int = 1,
) -> Batch:
    """Rows as tensors (n, longest, ...), padded at the end; columns of one shape are unchanged.

    value: the padding value, for all columns or by column (-100 for labels). mask: name of a column (n, longest) that
    is True for real values. lengths: name of a column (n,) with the lengths. If all ragged columns have equal lengths,
    they share one mask and one lengths column; otherwise each has its own, such as `column_mask`. None omits them. to:
    length of every batch, in place of its longest row's; multiple_of: lengths are rounded up to a multiple of it."""
    columns = columns_of(rows)
    ragged = {name: column for name, column in columns.items() if isinstance(column, Ragged)}
    batch = {n: torch.from_numpy(np.ascontiguousarray(c)) for n, c in columns.items() if n not in ragged}
    are_alike = len({column.lengths.tobytes() for column in ragged.values()}) == 1
    for name, column in ragged.items():
        _check_lengths_alone(name, column)
        longest = int(column.lengths.max(initial=0))
        if to is not None and longest > to:
            raise DataError.problem(
                f"column {name}",
                f"has a row of {longest} values, more than the {to} that Padding(to={to}) allows",
                "shorten rows in transform()",
            )
        width = -(-(to or longest) // multiple_of) * multiple_of
        is_real = np.arange(width) < column.lengths[:, None]
        fill = value.get(name, 0) if isinstance(value, Mapping) else value
        filled = np.full((len(column), width, *column.values.shape[1:]), fill, column.dtype)
        filled[is_real] = column.values
        batch[name] = torch.from_numpy(filled)
        prefix = "" if are_alike else f"{name}_"
        if mask is not None:
            batch[prefix + mask] = torch.from_numpy(is_real)
        if lengths is not None:
            batch[prefix + lengths] = torch.from_numpy(column.lengths)
    return batch


def flattened(rows: Columns | Sequence[Any]) -> Batch:
    """Each ragged column as values (total, ...) and `column_offsets` (n + 1,): row starts and the end. Others are
    unchanged."""
    batch: Batch = {}
    for name, column in columns_of(rows).items():
        if isinstance(column, Ragged):
            _check_lengths_alone(name, column)
            batch[name] = torch.from_numpy(np.ascontiguousarray(column.values))
            batch[f"{name}_offsets"] = torch.from_numpy(column.offsets)
        else:
            batch[name] = torch.from_numpy(np.ascontiguousarray(column))
    return batch


def _check_lengths_alone(name: str, column: Ragged) -> None:
    """Raise DataError if rows differ in more than their length."""
    if column.shapes is not None:
        allowed = "rows can be padded or concatenated only along their first dimension"
        raise DataError.problem(
            f"column {name}", f"has rows of {column.sizes}: {allowed}", "give them one size in transform()"
        )


def columns_of(rows: Columns | Sequence[Any]) -> Columns:
    """Columns of rows in any form that a collate function may receive: a list of dicts, or columns."""
    if isinstance(rows, Mapping):
        return {name: as_column(name, column) for name, column in rows.items()}
    if isinstance(rows, Rows):
        return rows.columns
    as_dicts = [row if isinstance(row, Mapping) else {str(i): v for i, v in enumerate(row)} for row in rows]
    return {name: as_column(name, [row[name] for row in as_dicts]) for name in as_dicts[0]}
