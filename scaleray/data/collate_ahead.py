"""Micro-batches made ahead of training: the reading thread calls a workload's `collate` before the step needs them.

A batch is the same in either thread if `collate` depends only on its rows. This is checked on a few rows when the data
are loaded: a `collate` that draws random numbers, changes the workload, or returns different batches for the same rows
is called by the training thread when it is needed, and the run reports it. If the micro-batches change (because memory
ran out, or shares changed), the training thread makes the batches again.

`collate` runs in this process and not in Ray tasks, because its result depends on the size of the micro-batches, which
a run may change, and padded batches would be copied through the object store. Expensive work on single rows belongs in
`transform`, which runs in tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from scaleray.data.collation import batch_values, collated
from scaleray.data.ragged import with_ragged
from scaleray.data.rank_batch import RankBatch
from scaleray.data.ray_dataset_source import StreamSource
from scaleray.data.row_values import generator_states, generators_kept, have_moved, rows_to_look_at
from scaleray.data.source_interface import Columns, Source, rows_in
from scaleray.data.transformed import place_of, under_transforms
from scaleray.workload import own_method


@dataclass(frozen=True)
class CollateAhead:
    """Makes the micro-batches of a batch in the reading thread. cuts: returns their bounds. times: number of uses of
    each micro-batch. row_bytes: approximate size of a collated row."""

    collate: Callable[[Any], Any]
    gives_tuples: bool
    cuts: Callable[[RankBatch], Iterable[tuple[int, int]]]
    row_bytes: int
    times: int = 1

    def __call__(self, batch: RankBatch) -> RankBatch:
        """Add micro-batches to a batch. Raises WorkloadError with the user's line if `collate` fails."""
        made: dict[tuple[int, int], list[Any]] = {}
        for start, stop in self.cuts(batch):
            rows = ({n: c[start:stop] for n, c in batch.columns.items()} for _ in range(self.times))
            made[start, stop] = [collated(self.collate, each, gives_tuples=self.gives_tuples) for each in rows]
        return dataclasses.replace(batch, made=made)


@dataclass(frozen=True)
class CollateCheck:
    """Result of calling a workload's `collate` on a few rows. why_in_turn: reason to call it in the training thread;
    empty if it is called ahead. is_repeatable: whether equal rows gave equal batches."""

    why_in_turn: str = ""
    is_repeatable: bool = True
    row_bytes: int = 0

    @classmethod
    def at(cls, workload: Any, source: Source) -> CollateCheck | None:
        """Check `collate` on a few rows of this source; None if there is no `collate`. Raises WorkloadError if it
        fails."""
        collate = own_method(workload, "collate")
        if collate is None:
            return None
        if isinstance(source, StreamSource):
            return cls("a Ray Dataset has no rows to check before it starts")
        few = rows_to_look_at(under_transforms(source))
        with generators_kept():
            rows = source.read(np.array(few, dtype=np.int64))
        rows = with_ragged(rows, getattr(source, "ragged_columns", ()))
        return _look(workload, collate, rows, gives_tuples=getattr(source, "gives_tuples", False))


def _look(workload: Any, collate: Any, rows: Columns, *, gives_tuples: bool) -> CollateCheck:
    num_rows = rows_in(rows)

    def made() -> list[Any]:
        fresh = {name: column[np.arange(num_rows)] for name, column in rows.items()}
        return batch_values(collated(collate, fresh, gives_tuples=gives_tuples))

    with generators_kept():
        first = made()  # which may make something once that it keeps
        before, attributes = generator_states(), dict(vars(workload)) if hasattr(workload, "__dict__") else {}
        second = made()
        draws = have_moved(before)
    changed = sorted(n for n, value in attributes.items() if vars(workload).get(n) is not value)
    where, is_repeatable = place_of_collate(collate), draws or _are_equal(first, second)
    why = ""
    if draws:
        why = f"collate() at {where} draws from the generators of the process"
    elif not is_repeatable:
        why = f"collate() at {where} returns different batches for the same rows"
    elif changed:
        why = f"collate() at {where} changes the workload ({', '.join(changed)})"
    row_bytes = sum(value.nbytes for value in second if isinstance(value, torch.Tensor | np.ndarray)) // num_rows
    return CollateCheck(why, is_repeatable, row_bytes)


def _are_equal(first: list[Any], second: list[Any]) -> bool:
    """Whether two batches are equal in shapes, types and bits."""
    return len(first) == len(second) and all(map(_is_same, first, second))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        is_alike = one.dtype == other.dtype and one.shape == other.shape
        return is_alike and bool(((one == other) | ((one != one) & (other != other))).all())  # NaN is NaN again
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return type(one) is type(other)


def place_of_collate(collate: Any) -> str:
    """File and line of a `collate`, for messages."""
    is_function = hasattr(collate, "__code__") or hasattr(collate, "__func__")
    return place_of(collate if is_function else type(collate).__call__)
