"""Rows of a torch IterableDataset, or of anything else that can only be iterated: one after another.

Every worker iterates all rows and keeps its own of each step. So the steps are the same for every number of workers, if
the dataset gives the same rows each time it is iterated, which is looked at on its first rows; what it costs is that
each worker reads everything, and that a resumed run reads its epoch again from the start. With `data.shuffle` the rows
go through a buffer of `data.window_rows`, from which they are drawn by the run's seed.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from scaleray.data.row_values import RowValues, first_difference, generator_states, generators_kept, have_moved
from scaleray.data.sample_order import StepPlan, stream_key
from scaleray.data.source import Columns
from scaleray.data.sources import DatasetSource
from scaleray.errors import DataError
from scaleray.progress import stage
from scaleray.reproducibility.seeding import seed_row
from scaleray.workload import no_exit

LOOKED_AT = 8
COUNT_S = 60.0  # so long the rows are counted of a dataset without a length


class IterableSource(DatasetSource):
    """The rows of an object with `__iter__`, in its order. Without a length its rows are counted once."""

    def __init__(self, dataset: Any, *, allows_text: bool = False) -> None:
        self.dataset, self.allows_text = dataset, allows_text
        self.lengths = None
        if iter(dataset) is dataset:
            raise DataError(
                f"a {type(dataset).__name__}",
                "an iterator",
                "it can be read once, and epochs and workers need it again",
                "give an object whose __iter__ starts anew, such as an IterableDataset",
            )
        first, again, moved = self._first_rows()
        self.num_rows = self._count() if first else 0
        rows = [self._columns_of(row) for row in first]
        self.gives_tuples = bool(first) and not isinstance(first[0], Mapping)
        self.row_bytes = sum(v.nbytes for row in rows for v in row.values()) // max(1, len(rows)) or 1
        self.ragged_columns = tuple(n for n in (rows[0] if rows else ()) if len({row[n].shape for row in rows}) > 1)
        reads = [(row, self._columns_of(other)) for row, other in zip(rows, again, strict=False)]
        found = next(((n, c) for n, pair in enumerate(reads) if (c := first_difference(list(pair))) is not None), None)
        if len(first) != len(again):
            found = found or (min(len(first), len(again)), "any")
        self.row_values = RowValues(
            moved, f"row {found[0]} differs in column {found[1]} when it is iterated again" if found else ""
        )
        self.row_s = 0.0
        self._place: tuple[StepPlan, int, Iterator[tuple[int, Any]]] | None = None

    def _first_rows(self) -> tuple[list[Any], list[Any], bool]:
        """The first rows, the same again, and whether they draw from the generators of the process."""
        reads = []
        with generators_kept():
            before = generator_states()
            moved = False
            for _ in range(2):
                seed_row(0)
                before = generator_states()
                with no_exit(f"{type(self.dataset).__name__}.__iter__()"):
                    reads.append(list(itertools.islice(self.dataset, LOOKED_AT)))
                moved = moved or have_moved(before)
        return reads[0], reads[1], moved

    def _count(self) -> int:
        try:
            return len(self.dataset)
        except (TypeError, NotImplementedError):
            pass
        until, number = time.monotonic() + COUNT_S, 0
        with stage("counting the rows"), generators_kept():
            for number, _ in enumerate(self.dataset, start=1):
                if time.monotonic() > until:
                    raise DataError(
                        f"the length of {type(self.dataset).__name__}",
                        "not known",
                        f"counting its rows takes more than {COUNT_S:.0f} s ({number} so far)",
                        "give it __len__, the number of rows of an epoch",
                    )
        return number

    def opened(self) -> IterableSource:
        """The same rows with a place of its own, for one reader."""
        source = copy.copy(self)
        source._place = None
        return source

    def read(self, indices: np.ndarray) -> Columns:
        """The rows at `indices` (n,), in that order, unshuffled: iterated from the start."""
        wanted = set(indices.tolist())
        rows = self._iterate(StepPlan(self.num_rows, 1, shuffle=False), 0)
        found = {place: row for place, row in itertools.islice(rows, int(indices.max()) + 1) if place in wanted}
        return self._filled((self._columns_of(found[i]) for i in indices.tolist()), len(indices))

    def read_on(self, positions: np.ndarray, plan: StepPlan) -> Columns:
        """The rows at positions of the endless sequence of all epochs, ascending: those between are passed over."""
        return self._filled((self._columns_of(self._at(int(p), plan)) for p in positions), len(positions))

    def _at(self, position: int, plan: StepPlan) -> Any:
        epoch, place = divmod(position, plan.num_samples)
        if self._place is None or self._place[0] != plan or self._place[1] != epoch or self._last >= place:
            self._place = plan, epoch, self._iterate(plan, epoch)
        for number, row in self._place[2]:
            self._last = number
            if number == place:
                return row
        raise DataError(
            f"the {plan.name} data",
            f"{type(self.dataset).__name__} with {self._last + 1} rows in epoch {epoch + 1}",
            f"it had {plan.num_samples} at the start of the run",
            "give as many rows in every epoch; __len__ says how many",
        )

    _last = -1

    def _iterate(self, plan: StepPlan, epoch: int) -> Iterator[tuple[int, Any]]:
        """The rows of an epoch with their places."""
        self._last = -1
        if callable(begin := getattr(self.dataset, "set_epoch", None)):
            begin(epoch)
        rows = self._seeded(plan, epoch) if self.row_values.draw_random_numbers else iter(self.dataset)
        rows = itertools.islice(rows, plan.num_samples)
        if plan.shuffle:
            key = stream_key(plan.seed, "buffer", plan.name, epoch)
            rows = _shuffled(rows, np.random.Generator(np.random.Philox(key=key)), plan.window_rows)
        return enumerate(rows)

    def _seeded(self, plan: StepPlan, epoch: int) -> Iterator[Any]:
        """Rows that draw random numbers, each under a seed that follows from the run's, the epoch and its place."""
        rows = None
        for place in itertools.count():
            with generators_kept():
                seed_row(stream_key(plan.seed, "rows", plan.name, epoch, place))
                rows = iter(self.dataset) if rows is None else rows
                try:
                    row = next(rows)
                except StopIteration:
                    return
            yield row

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "kind": f"IterableDataset {type(self.dataset).__name__}"}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_place": None}


def promise(plan_shuffles: bool, window_rows: int) -> str:
    """What a user can rely on in the order of the rows, in words."""
    mixed = f", shuffled in a buffer of {window_rows} rows" if plan_shuffles else ""
    return (
        f"as the IterableDataset gives them{mixed}: the same for every number of workers as long as it gives the same "
        "rows each time; every worker reads all rows and keeps its own, and a resume reads its epoch from the start"
    )


def _shuffled(rows: Iterator[Any], draw: np.random.Generator, size: int) -> Iterator[Any]:
    """The rows, each drawn at random from a buffer of so many."""
    buffer = list(itertools.islice(rows, size))
    for row in rows:
        place = int(draw.integers(len(buffer)))
        buffer[place], chosen = row, buffer[place]
        yield chosen
    for place in draw.permutation(len(buffer)):
        yield buffer[place]
