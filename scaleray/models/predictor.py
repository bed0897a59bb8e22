"""Predictions for tables of rows, with retained columns and the reasons for failed rows."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scaleray.data.ragged import Ragged, flat_values
from scaleray.data.source_interface import Columns, Source, rows_in
from scaleray.data.transformed import under_transforms
from scaleray.errors import DataError, ScaleRayError, WorkloadError, first_line
from scaleray.models.load import ModelParts, TrainedModel
from scaleray.models.row_files import Shape, columns_of

# Rows without the columns that only training needs: labels, which a preprocessor fitted with them requires all the
# same.
#
# A missing column is replaced by a value of training's. A column that changes with another replacement is made of it,
# and is left out again: the rest is as it would be with the column.

Change = Callable[[Columns], Columns]


class Unlabelled:
    """Transforms rows as in training, even if columns are missing. examples: some untransformed training rows; empty if
    unknown."""

    def __init__(self, change: Change, examples: Columns, where: str) -> None:
        self.change, self.examples, self.where = change, examples, where
        self._made_of: dict[tuple[str, ...], set[str]] = {}  # columns that are left out, by those that are missing

    def __call__(self, rows: Columns) -> Columns:
        """Transform rows, omitting columns that depend on missing ones."""
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
        """The error for a model that needs a missing column."""
        for missing, made in self._made_of.items():
            if made:
                columns = ", ".join(sorted(made))
                return DataError(
                    f"column {missing[0]} of {self.where}", None, f"{columns} of the batch is computed from it"
                )
        return None

    def _with(self, rows: Columns, missing: Sequence[str], *, other: bool) -> Columns:
        num_rows = rows_in(rows)
        filled = {name: _repeated(self.examples[name], num_rows, other=other) for name in missing}
        return self.change({**{name: column.copy() for name, column in rows.items()}, **filled})


def _repeated(examples: Any, num_rows: int, *, other: bool) -> Any:
    """Column with the first example, or a different one, in every row."""
    index = 0
    if other:
        first = examples[0]
        index = next((n for n in range(len(examples)) if not np.array_equal(examples[n], first)), 0)
    return examples[np.full(num_rows, index)]


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and np.array_equal(_values(left), _values(right))


def _values(column: Any) -> np.ndarray:
    flat = flat_values(column) if isinstance(column, Ragged) else column
    return np.nan_to_num(flat) if flat.dtype.kind == "f" else flat


FAILED = "scaleray.failed"
"""Column of a prediction table with the reason for a missing prediction; null in other rows."""
INDEX = "id"
"""Column of row numbers, as named by `ray.data.range`, if the rows themselves are read from a source."""


@dataclass(frozen=True)
class PredictorParts:
    """Parts from which a process predicts. keep: columns of the rows to write next to the predictions. where: name of
    the data in messages. threads: number for torch; None: unchanged."""

    model: ModelParts
    shape: Shape
    gives_tuples: bool
    keep: tuple[str, ...] = ()
    where: str = "the data"
    threads: int | None = None
    uses_gpu: bool = False


class Predictor:
    """Has the model, and is called with Arrow tables of rows or of row numbers of `source`."""

    def __init__(self, parts: PredictorParts, source: Source | None = None) -> None:
        import torch

        if parts.threads is not None:
            torch.set_num_threads(parts.threads)
        self.parts, self.source = parts, source
        model: TrainedModel = parts.model.build("cuda" if parts.uses_gpu else "cpu")
        self.model = dataclasses.replace(model, gives_tuples=parts.gives_tuples)
        self.answers = self.model.answers()
        self.change = Unlabelled(self.model.changed, parts.shape.examples, parts.where)
        self.beside = {} if source is None else beside_of(source)
        self._types: dict[str, Any] = {}  # of the answers, by column, once there were some

    def __call__(self, table: Any) -> Any:
        """Return a table of predictions, with a row for each row of `table` in the same order.

        Raises WorkloadError or DataError if every row has failed so far, as rows are then not the cause."""
        import pyarrow as pa

        kept = self._kept(table)
        answers, failed, first = self._answered(table)
        if answers:
            names = answers[0]
            columns = {name: pa.concat_arrays([arrow_array(piece[name]) for piece in answers]) for name in names}
            self._types = {name: column.type for name, column in columns.items()}
        elif self._types:
            columns = {name: pa.array([], kind) for name, kind in self._types.items()}
        else:
            assert first is not None
            raise first
        return as_table(columns, [failed.get(row) for row in range(table.num_rows)], kept)

    def _answered(self, table: Any) -> tuple[list[dict[str, Any]], dict[int, Exception], Exception | None]:
        """Predictions in pieces, in order, for the rows that do not fail; errors of the other rows; and the error of
        all rows together."""
        answers: list[dict[str, Any]] = []
        failed: dict[int, Exception] = {}
        try:
            return [self._answer(table)], {}, None
        except Exception as exc:
            first = exc
        if _is_out_of_memory(first):
            raise first
        for row in range(table.num_rows):
            try:
                answers.append(self._answer(table.slice(row, 1)))
            except Exception as exc:
                failed[row] = exc
        return answers, failed, first

    def _answer(self, table: Any) -> dict[str, Any]:
        if self.source is not None:
            return self.answers(self.source.read(np.asarray(table.column(INDEX))))
        shape = self.parts.shape
        columns, problems = columns_of(table, self.parts.where, allows_text=shape.allows_text)
        rows = shape.fit(columns)
        if not rows:
            there = ", ".join(table.column_names)
            wanted = f"training had {', '.join(shape.columns)}" if shape.columns else "columns of numbers are required"
            raise problems[0] if problems else DataError.problem(self.parts.where, f"has the columns {there}: {wanted}")
        try:
            return self.answers(self.change(rows))
        except ScaleRayError:
            # the column that is wanted is most likely the one that is left out
            if left_out := (*problems, self.change.problem())[0]:
                raise left_out from None
            raise

    def _kept(self, table: Any) -> Mapping[str, Any]:
        import pyarrow as pa

        there = [*table.column_names, *self.beside]
        if missing := [name for name in self.parts.keep if name not in there]:
            raise DataError(
                "--keep", missing[0], f"{self.parts.where} has no such column", f"there are: {', '.join(there)}"
            )
        kept: dict[str, Any] = {name: table.column(name) for name in self.parts.keep if name not in self.beside}
        if len(kept) < len(self.parts.keep):
            rows = table.column(INDEX).to_pylist()
            for name in (name for name in self.parts.keep if name in self.beside):
                kept[name] = pa.array([self.beside[name][row] for row in rows])
        return kept


def beside_of(source: Source) -> Mapping[str, Sequence[Any]]:
    """Columns that identify rows of a source and are not in batches, such as file names."""
    found: Mapping[str, Sequence[Any]] = getattr(under_transforms(source), "beside", {})
    return found


class RayPredictor(Predictor):
    """A predictor for Ray Data, which creates one in each actor. parts and source: references; source may be None."""

    def __init__(self, parts: Any, source: Any) -> None:
        import ray

        os.environ.setdefault("OMP_NUM_THREADS", "1")
        super().__init__(ray.get(parts), ray.get(source) if source is not None else None)


def as_table(answers: Mapping[str, Any], failed: Sequence[Exception | None], kept: Mapping[str, Any]) -> Any:
    """Arrow table of all rows. answers: Arrow arrays of the rows that have not failed; failed rows get nulls and the
    reason."""
    import pyarrow as pa

    good = np.cumsum([error is None for error in failed]) - 1
    positions = pa.array(
        [int(at) if error is None else None for at, error in zip(good, failed, strict=True)], pa.int64()
    )
    columns = {**kept, **{name: values.take(positions) for name, values in answers.items()}}
    reasons = [None if error is None else _reason(error) for error in failed]
    return pa.table({**columns, FAILED: pa.array(reasons, pa.string())})


def _reason(error: Exception) -> str:
    """Reason why a row failed, on one line: the user's own error, if any."""
    cause = error.__cause__ if isinstance(error, WorkloadError) else None
    return f"{type(cause).__name__}: {first_line(cause)}" if cause is not None else first_line(error)


def arrow_array(values: Any) -> Any:
    """Rows of numbers of any shape, or of text, as an Arrow array: lists of equal length if a row has several."""
    import pyarrow as pa

    if not isinstance(values, np.ndarray):
        return pa.array(values)
    array = pa.array(np.ascontiguousarray(values).reshape(-1))
    for length in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, length)
    return array


def _is_out_of_memory(exc: BaseException) -> bool:
    from scaleray.training.health.live_memory import is_out_of_memory

    return is_out_of_memory(exc) or (exc.__cause__ is not None and is_out_of_memory(exc.__cause__))
