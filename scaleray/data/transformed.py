"""Sources whose rows are changed by a workload's `transform(rows, rng)` as they are read, in the reading process.

A transform takes the columns of a block of rows and returns columns with the same number of rows. It draws random
numbers for each row from `rng` (`row_random.RowRandom`), so a row is the same in any block, on any number of workers
and after a resume. This is checked on a few rows when the data are loaded."""

from __future__ import annotations

import contextlib
import inspect
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from scaleray.data.ragged import Ragged, flat_values, joined, with_ragged
from scaleray.data.row_random import RowRandom
from scaleray.data.row_values import (
    RowValues,
    first_difference,
    generator_states,
    generators_kept,
    have_moved,
    row_values_of,
    rows_to_look_at,
)
from scaleray.data.sample_order import mixed
from scaleray.data.source_interface import Columns, Source, as_column
from scaleray.data.user_dataset import TURNS
from scaleray.errors import WorkloadError
from scaleray.workload import call_user_code, own_method, user_frames

ADVICE = "draw random numbers from rng, and compute each row only from itself"


@dataclass(frozen=True)
class Transform:
    """A workload's `transform` for one split. where: file and line of the method."""

    method: Callable[..., Any]
    split: str
    takes_split: bool
    where: str
    kind = "transform"

    @property
    def name(self) -> str:
        """Name of the method with its class."""
        return str(self.method.__qualname__)

    @property
    def is_of_scaleray(self) -> bool:
        """Whether the method belongs to one of this package's workloads."""
        return str(self.method.__module__).startswith("scaleray.")

    @classmethod
    def of(cls, workload: Any, split: str) -> Transform | None:
        """The workload's transform, or None if it has none. Raises WorkloadError if its parameters are wrong."""
        method = own_method(workload, "transform")
        if method is None:
            return None
        parameters = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty]
        names = [p.name for p in parameters]
        where = place_of(method)
        if len(names) not in (2, 3) or (len(names) == 3 and names[2] != "split"):
            allowed = "it must take rows and rng, and split if splits differ"
            raise WorkloadError(f"transform() at {where}", f"defined with the parameters {names}", allowed)
        return cls(method, split, "split" in inspect.signature(method).parameters, where)

    def __call__(self, rows: Columns, rng: RowRandom) -> Columns:
        """Transform rows. Raises WorkloadError if the result is not columns with the same number of rows."""
        more = {"split": self.split} if self.takes_split else {}
        # in place is allowed: memory that others hold, or that cannot be written, is copied
        own = {name: _writable(column) for name, column in rows.items()}
        given = call_user_code(
            lambda: self.method(own, rng, **more), what="transform()", doing=f"changing {len(rng)} rows"
        )
        return checked_rows(given, len(rng), what=f"transform() at {self.where}")


def checked_rows(given: Any, num_rows: int, *, what: str, allows_text: bool = False) -> Columns:
    """Check columns returned by user code. Raises WorkloadError if they do not have the given number of rows."""
    if not isinstance(given, Mapping) or not given:
        allowed = "it must return a dict of columns: arrays with the rows along dimension 0"
        found = "an empty mapping" if isinstance(given, Mapping) else f"a {type(given).__name__}"
        raise WorkloadError(f"the result of {what}", found, allowed)
    columns = {str(n): as_column(str(n), column, allows_text=allows_text) for n, column in given.items()}
    lengths = {name: len(c) if isinstance(c, Ragged) or c.ndim else "no" for name, c in columns.items()}
    if set(lengths.values()) != {num_rows}:
        raise WorkloadError.problem(
            f"the result of {what}",
            f"has columns of {', '.join(f'{number} rows ({name})' for name, number in lengths.items())}: "
            f"it received {num_rows} rows, and must return as many in every column",
            "the rows of a step are chosen before they are read: filter rows in datasets(), or weight them in the loss",
        )
    return columns


class Step(Protocol):
    """Interface of a step that changes rows as they are read: a Transform or a Preprocess."""

    @property
    def kind(self) -> str:
        """Kind of step, for the user: `transform` or `preprocessor`."""

    @property
    def name(self) -> str:
        """Name of the step for the record."""

    @property
    def where(self) -> str:
        """File and line, for messages."""

    @property
    def is_of_scaleray(self) -> bool:
        """Whether its code belongs to this package; any number of threads may run such code."""

    def __call__(self, rows: Columns, rng: RowRandom) -> Columns:
        """Change rows; their number stays the same."""


class Transformed:
    """Source whose rows go through a transform or another step. Raises WorkloadError if it fails on the first rows."""

    def __init__(self, source: Source, transform: Step) -> None:
        self.source, self.transform = source, transform
        self.num_rows, self.group_sizes = source.num_rows, source.group_sizes
        self.tokens_per_row = source.tokens_per_row
        self._ragged_before: tuple[str, ...] = ()
        few = rows_to_look_at(under_transforms(source))
        with generators_kept():
            rows = source.read(np.array(few, dtype=np.int64))
        self._ragged_before = tuple(name for name, column in rows.items() if isinstance(column, Ragged))
        seeds = mixed(np.arange(len(few), dtype=np.uint64))
        look = _check_transform(transform, rows, seeds)
        before = row_values_of(source)
        self.row_values = RowValues(
            before.draw_random_numbers or look.draws_elsewhere,
            before.difference or look.difference,
            before.advice if before.difference else ADVICE,
            draw_by_row=look.draws_by_row,
        )
        self.draws_elsewhere, self.reuses_memory = look.draws_elsewhere, look.reuses_memory
        self.row_bytes = max(1, sum(column.nbytes for column in look.columns.values()) // len(few))
        self.ragged_columns = tuple(n for n, column in look.columns.items() if isinstance(column, Ragged))
        """Columns whose rows differ in length, judged by a few rows."""
        self.gives_tuples = getattr(source, "gives_tuples", False) and set(look.columns) == set(
            map(str, range(len(look.columns)))
        )
        read_s = getattr(source, "row_s", None)
        self.row_s = None if read_s is None else read_s + look.row_s
        """Seconds to read and transform a row; None if reading was not measured."""

    def read(self, indices: np.ndarray) -> Columns:
        """Read the rows at `indices` (n,), in that order, with random numbers that depend only on the index."""
        # without keeping the generators: the thread that reads would put back what the training has drawn meanwhile
        return self.changed(self.source.read(indices), mixed(indices.astype(np.uint64)))

    def changed(self, rows: Columns, seeds: np.ndarray) -> Columns:
        """Transform rows of the wrapped source, each under its seed, uint64 (n,)."""
        rows = with_ragged(rows, self._ragged_before)
        # ours read by no handle, and decode images for long
        turn = contextlib.nullcontext() if self.transform.is_of_scaleray else TURNS
        with turn, generators_kept() if self.draws_elsewhere else contextlib.nullcontext():
            changed = self.transform(rows, RowRandom(seeds))
            if self.reuses_memory:
                changed = {name: column.copy() for name, column in changed.items()}
            return with_ragged(changed, self.ragged_columns)

    def describe(self) -> dict[str, Any]:
        """Description of the wrapped source, with the name of the step that changes its rows."""
        return {**self.source.describe(), self.transform.kind: self.transform.name}


def under_transforms(source: Source) -> Source:
    """The innermost source of the rows, below all transforms."""
    return under_transforms(source.source) if isinstance(source, Transformed) else source


@dataclass(frozen=True)
class _TransformCheck:
    """Result of a transform for a few rows."""

    columns: Columns
    draws_elsewhere: bool
    draws_by_row: bool
    difference: str
    row_s: float
    reuses_memory: bool


def _check_transform(transform: Step, rows: Columns, seeds: np.ndarray) -> _TransformCheck:
    """Check a transform on a few rows, twice together and once in two parts. The generators are restored."""
    rng, everything = RowRandom(seeds), np.arange(len(seeds))
    with generators_kept():
        before = generator_states()
        given = transform(_rows(rows, everything), rng)
        first = {name: column.copy() for name, column in given.items()}
        draws_elsewhere = have_moved(before)
        started = time.perf_counter()  # not the first time, which may import something
        again = transform(_rows(rows, everything), RowRandom(seeds))
        row_s = (time.perf_counter() - started) / len(seeds)
        reuses_memory = any(
            np.may_share_memory(flat_values(given[n]), flat_values(again[n])) for n in given if n in again
        )
        halves = [half for half in np.array_split(everything, 2) if len(half)]
        parts = [transform(_rows(rows, half), RowRandom(seeds[half])) for half in halves]
        difference, which = "", f"{transform.kind}() at {transform.where}"
        if draws_elsewhere:
            line = _line_that_draws(lambda: transform(_rows(rows, everything), RowRandom(seeds)))
            difference = f"{transform.kind}() draws from the generators of the process, at {line or transform.where}"
        elif (column := first_difference([first, again])) is not None:
            difference = f"{which} returns a different column {column} for the same rows and rng"
        elif (column := first_difference([first, joined(parts)])) is not None:
            difference = f"{which} returns a different column {column} if fewer rows are read together"
    return _TransformCheck(first, draws_elsewhere, rng.has_drawn, difference, row_s, reuses_memory)


def _rows(rows: Columns, index: np.ndarray) -> Columns:
    return {name: column[index] for name, column in rows.items()}


def _writable(column: Any) -> Any:
    if isinstance(column, Ragged):
        return column if column.values.flags.owndata and column.values.flags.writeable else column.copy()
    return column if column.flags.owndata and column.flags.writeable else np.array(column)


def place_of(method: Any) -> str:
    """File and line of a method, for messages."""
    code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
    if code is None:
        return str(getattr(method, "__qualname__", method))
    return _place(code.co_filename, code.co_firstlineno)


def _place(filename: str, line: int) -> str:
    with contextlib.suppress(ValueError):
        filename = str(Path(filename).relative_to(Path.cwd()))
    return f"{filename}:{line}"


def _line_that_draws(call: Callable[[], Any]) -> str:
    """File and line of the user's first statement that advances a global generator; empty if none is found."""
    before, found = generator_states(), ""
    lines: dict[Any, int] = {}

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal found
        file = frame.f_code.co_filename
        if not user_frames(traceback.StackSummary.from_list([(file, frame.f_lineno, "", "")])):
            return None
        if not found and frame in lines and have_moved(before):
            found = _place(file, lines[frame])
        lines[frame] = frame.f_lineno
        return trace

    others = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(others)
    return found
