"""Rows of a torch IterableDataset, or of any other object that can only be iterated.

Every worker iterates all rows and keeps its own rows of each step. The steps are therefore the same for every number of
workers if the dataset yields the same rows in each iteration, which is checked on its first rows. The cost is that each
worker reads everything, and that a resumed run reads its epoch again from the start. With `data.shuffle`, rows are
drawn from a buffer of `data.window_rows` rows, with the run's seed.

If a dataset divides its rows among workers, each worker trains on its own part, so the rows of a step depend on the
number of workers. Evaluations read all rows, so that their values are exact."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch.utils.data

from scaleray.common.progress import stage
from scaleray.common.seeding import seed_row
from scaleray.data.hugging_face_data import is_stream
from scaleray.data.rank_part import Part
from scaleray.data.row_values import (
    RowValues,
    fingerprint,
    first_difference,
    generator_states,
    generators_kept,
    have_moved,
)
from scaleray.data.sample_order import StepPlan, stream_key
from scaleray.data.source_interface import Columns
from scaleray.data.sources import DatasetSource, length_of
from scaleray.data.user_dataset import TURNS, AsGiven
from scaleray.errors import DataError, WorkloadError
from scaleray.workload import call_user_code

# How an IterableDataset deals its rows out to workers, where it does: by a method `shard`, or by torch's worker info.
#
# Each worker then iterates its own part alone, and no worker reads the rows of another one. A dataset deals by a
# method `shard(rank=..., world_size=...)` (or `shard(num_shards=..., index=...)`, as others call it), which gives an
# iterable of one part, or by `torch.utils.data.get_worker_info()` in its `__iter__`, where every training worker then
# is what a worker of a DataLoader is. Whether it does the latter is seen from its first rows.

BY_SHARD, BY_WORKER_INFO = "shard()", "get_worker_info()"
PARAMETERS = (("rank", "world_size"), ("index", "num_shards"))
"""Parameter names of `shard` for the index of a part and the number of parts."""


def deals_by(dataset: Any, first_rows: Callable[[Any], list[Any]]) -> str:
    """How a dataset divides its rows among workers: BY_SHARD, BY_WORKER_INFO, or "" if every worker gets all rows.

    first_rows: returns an iterable's first rows in a comparable form."""
    if is_stream(dataset):  # its shards are not of one size
        return ""
    if _shard_parameters(dataset) is not None:
        return BY_SHARD
    if not isinstance(dataset, torch.utils.data.IterableDataset):
        return ""
    halves = [first_rows(_WithWorkerInfo(dataset, part, 2)) for part in range(2)]
    return BY_WORKER_INFO if halves[0] != halves[1] and all(halves) else ""


def part_of(dataset: Any, how: str, rank: int, world_size: int) -> Any:
    """An iterable over the dataset's rows for this worker. Raises WorkloadError if its `shard` fails."""
    if how == BY_WORKER_INFO:
        return _WithWorkerInfo(dataset, rank, world_size)
    names = _shard_parameters(dataset)
    assert names is not None
    given = dict(zip(names, (rank, world_size), strict=True))
    what = f"{type(dataset).__name__}.shard()"
    return call_user_code(lambda: dataset.shard(**given), what=what, doing=f"selecting the rows of worker {rank}")


def to_text(dataset: Any, how: str, rank: int, world_size: int) -> str:
    """Name of a dataset's part, for messages."""
    if how == BY_WORKER_INFO:
        return f"{type(dataset).__name__} under worker info {rank} of {world_size}"
    return f"{type(dataset).__name__}.shard for worker {rank} of {world_size}"


def _shard_parameters(dataset: Any) -> tuple[str, str] | None:
    shard = getattr(dataset, "shard", None)
    if not callable(shard):
        return None
    with contextlib.suppress(TypeError, ValueError):  # of some built-in functions nobody knows the parameters
        there = inspect.signature(shard).parameters
        return next((names for names in PARAMETERS if set(names) <= set(there)), None)
    return None


class _WithWorkerInfo:
    """Iterable over a dataset's rows; while it reads, this process has the worker info of a DataLoader worker."""

    def __init__(self, dataset: Any, rank: int, world_size: int) -> None:
        self.dataset, self.rank, self.world_size = dataset, rank, world_size

    def __iter__(self) -> Iterator[Any]:
        with self._info():
            rows = iter(self.dataset)
        for _ in itertools.count():
            with self._info():
                try:
                    row = next(rows)
                except StopIteration:
                    return
            yield row

    @contextlib.contextmanager
    def _info(self) -> Iterator[None]:
        # torch has no public way: its own loaders set this in each of their processes
        module: Any = torch.utils.data._utils.worker
        with TURNS:  # worker info belongs to the process
            before = module._worker_info
            module._worker_info = module.WorkerInfo(
                id=self.rank, num_workers=self.world_size, seed=torch.initial_seed() + self.rank, dataset=self.dataset
            )
            try:
                yield
            finally:
                module._worker_info = before


FIRST_ROWS = 8
IN_TURN_S = 0.1
MOST_IN_TURN = 1024  # rows of the longest piece that is read in turn with other splits
COUNT_S = 60.0  # so long the rows are counted of a dataset without a length
SHORT_COUNT_S = 3.0  # and so long where nothing is counted in epochs
END = object()
ENDLESS = 2**48
"""Number of rows assumed if counting does not reach the end of a dataset without a length."""


class IterableSource(DatasetSource):
    """The rows of an object with `__iter__`, in its order. Without a length, its rows are counted once.

    reads_copy: iterate a copy, since training may iterate the same object concurrently and move its position.
    may_be_endless: accept a dataset without a length that cannot be counted in time; it then has ENDLESS rows."""

    def __init__(
        self,
        dataset: Any,
        *,
        allows_text: bool = False,
        reads_copy: bool = False,
        as_given: AsGiven | None = None,
        may_be_endless: bool = False,
    ) -> None:
        self.may_be_endless = may_be_endless
        self.as_given = as_given or AsGiven(dataset)
        reads_copy = reads_copy and self.as_given.problem is None
        self.dataset = self.as_given.copy() if reads_copy else dataset
        self.allows_text, self.lengths = allows_text, None
        if call_user_code(lambda: iter(dataset), what=self._what, doing="reading the data") is dataset:
            raise DataError(
                f"a {type(dataset).__name__}",
                "an iterator",
                "it can be read only once, while every epoch and worker reads it again",
                "give an object whose __iter__ starts from the beginning, such as an IterableDataset",
            )
        first, again, moved = self._first_rows()
        self.num_rows = self._count() if first else 0
        rows = [columns for _, columns in first]
        self.gives_tuples = bool(first) and not isinstance(first[0][0], Mapping)
        self.row_bytes = sum(v.nbytes for row in rows for v in row.values()) // max(1, len(rows)) or 1
        self.ragged_columns = tuple(n for n in (rows[0] if rows else ()) if len({row[n].shape for row in rows}) > 1)
        reads = [(row, other) for row, (_, other) in zip(rows, again, strict=False)]
        found = next(((n, c) for n, pair in enumerate(reads) if (c := first_difference(list(pair))) is not None), None)
        if len(first) != len(again):
            found = found or (min(len(first), len(again)), "any")
        self.row_values = RowValues(
            moved, f"row {found[0]} differs in column {found[1]} when the rows are iterated again" if found else ""
        )
        self.row_s = 0.0
        self.deals_by = deals_by(dataset, self._compared)
        """How the dataset divides its rows among workers: by `shard()` or `get_worker_info()`; "" if it does not."""
        self._rank, self._world_size = 0, 1
        self._place: tuple[StepPlan, int, Iterator[tuple[int, Columns]]] | None = None

    @property
    def _what(self) -> str:
        return f"{type(self.dataset).__name__}.__iter__()"

    def _first_rows(self) -> tuple[list[tuple[Any, Columns]], list[tuple[Any, Columns]], bool]:
        """Read the first rows twice; also returns whether they draw from the process's generators."""
        with generators_kept():
            (first, moved), (again, moved_again) = (self._some_rows(self.dataset) for _ in range(2))
        return first, again, moved or moved_again

    def _some_rows(self, rows: Any) -> tuple[list[tuple[Any, Columns]], bool]:
        """Copies of the first rows of the dataset or a part, read under one seed, and whether they drew random
        numbers."""
        seed_row(0)
        before = generator_states()
        found = call_user_code(
            lambda: [(row, self._own_columns(row)) for row in itertools.islice(rows, FIRST_ROWS)],
            what=self._what,
            doing="reading its first rows",
        )
        return found, have_moved(before)

    def _compared(self, rows: Any) -> list[Any]:
        """The first rows of a part, as bytes."""
        with generators_kept():
            found, _ = self._some_rows(rows)
        return [fingerprint(columns) for _, columns in found]

    def first_fingerprints(self) -> Iterator[str]:
        """Fingerprints of the first rows, read as the training reads them, one at a time."""
        rows = self.opened()._iterate(StepPlan(self.num_rows, 1, shuffle=False), 0)
        return (fingerprint(row) for _, row in rows)

    def _count(self) -> int:
        if hasattr(type(self.dataset), "__len__"):
            try:
                return length_of(self.dataset)
            except WorkloadError as exc:
                if not isinstance(exc.__cause__, TypeError | NotImplementedError):  # as torch has it in its own
                    raise
        limit_s = SHORT_COUNT_S if self.may_be_endless else COUNT_S
        name = type(self.dataset).__name__
        with stage(f"counting the rows of {name}, which has no __len__"), generators_kept():
            return call_user_code(lambda: self._counted(limit_s), what=self._what, doing="counting its rows")

    def _counted(self, limit_s: float) -> int:
        until, number = time.monotonic() + limit_s, 0
        for number, _ in enumerate(self.dataset, start=1):
            if time.monotonic() <= until:
                continue
            if self.may_be_endless:
                return ENDLESS
            raise DataError(
                f"the length of {type(self.dataset).__name__}",
                "not known",
                f"counting its rows takes more than {limit_s:.0f} s ({number} so far)",
                "define __len__ as the number of rows in an epoch; to train without it, give every length in the "
                "config in steps, such as stop.after: 10000 steps",
            )
        return number

    def opened(self, part: Part | None = None) -> IterableSource:
        """The same rows with a separate position, for one reader; only its part if the dataset divides its rows."""
        source = copy.copy(self)
        source._place = None
        if is_stream(self.dataset) and self.as_given.problem is None:
            source.dataset = self.as_given.copy()  # all readers of one object share its epoch and place
        if part is not None and part.plan.is_dealt:
            source._rank, source._world_size = part.rank, part.world_size
        return source

    def read(self, indices: np.ndarray) -> Columns:
        """Read the rows at `indices` (n,) in the given order, without shuffling, by iterating from the start."""
        wanted = set(indices.tolist())
        rows = self._iterate(StepPlan(self.num_rows, 1, shuffle=False), 0)
        found = {place: row for place, row in itertools.islice(rows, int(indices.max()) + 1) if place in wanted}
        return self._filled((found[i] for i in indices.tolist()), len(indices))

    def read_on(self, positions: np.ndarray, plan: StepPlan) -> Columns:
        """Read the rows at ascending positions in the endless sequence of all epochs, skipping rows between them."""
        return self._filled((self._at(int(p), plan) for p in positions), len(positions))

    def _at(self, position: int, plan: StepPlan) -> Columns:
        epoch, place = divmod(position, plan.num_samples)
        if self._world_size > 1:
            place = plan.place_among_own(epoch, place, self._rank, self._world_size)
        if self._place is None or self._place[0] != plan or self._place[1] != epoch or self._last >= place:
            self._place = plan, epoch, self._iterate(plan, epoch)
        for number, row in self._place[2]:
            self._last = number
            if number == place:
                return row
        found = f"with {self._last + 1} rows in epoch {epoch + 1}"
        if self._world_size > 1:
            raise DataError(
                f"the {plan.name} data",
                f"{to_text(self.dataset, self.deals_by, self._rank, self._world_size)} {found}",
                f"each of the {self._world_size} workers trains on {self._share(plan)} of {plan.num_samples} rows",
                "divide the rows one by one with itertools.islice(rows, rank, None, world_size), so that parts differ "
                "by at most one row; or do not divide them, so that every worker reads all rows and keeps its own",
            )
        if self.num_rows == ENDLESS:
            raise DataError(
                f"the {plan.name} data",
                f"{type(self.dataset).__name__} {found}",
                f"it was taken for endless, as counting its rows took longer than {SHORT_COUNT_S:.0f} s",
                "define __len__ as the number of rows in an epoch, after which the next one starts",
            )
        raise DataError(
            f"the {plan.name} data",
            f"{type(self.dataset).__name__} {found}",
            f"it had {plan.num_samples} at the start of the run",
            "give the same number of rows in every epoch, as returned by __len__. If the dataset already divides its "
            "rows by rank, they are divided twice: define shard(rank, world_size) instead",
        )

    _last = -1

    def _iterate(self, plan: StepPlan, epoch: int) -> Iterator[tuple[int, Columns]]:
        """Yield the rows of an epoch with their positions."""
        self._last = -1
        if callable(begin := getattr(self.dataset, "set_epoch", None)):
            begin(epoch)
        rows = self._seeded(plan, epoch) if self.row_values.draw_random_numbers else iter(self._own())
        rows = itertools.islice(self._in_turn(rows), self._share(plan))
        if plan.shuffle:
            key = stream_key(plan.seed, "buffer", plan.name, epoch, *self._dealt)
            rows = _shuffled(rows, np.random.Generator(np.random.Philox(key=key)), plan.window_rows)
        return enumerate(rows)

    def _in_turn(self, rows: Iterator[Any]) -> Iterator[Columns]:
        """Yield copies of rows, read under a lock."""
        while True:
            with TURNS:
                columns = None if (row := next(rows, END)) is END else self._own_columns(row)
            if columns is None:
                return
            yield columns

    def _own(self) -> Any:
        """An iterable over this reader's rows."""
        if self._world_size == 1:
            return self.dataset
        return part_of(self.dataset, self.deals_by, self._rank, self._world_size)

    def _share(self, plan: StepPlan) -> int:
        """Number of rows of an epoch that this reader iterates."""
        return plan.num_samples // self._world_size

    @property
    def _dealt(self) -> tuple[int, ...]:
        return (self._rank, self._world_size) if self._world_size > 1 else ()

    def _seeded(self, plan: StepPlan, epoch: int) -> Iterator[Any]:
        """Yield rows that draw random numbers, each under a seed made from the run's seed, the epoch and its
        position."""
        rows = None
        for place in itertools.count():
            with generators_kept():
                seed_row(stream_key(plan.seed, "rows", plan.name, epoch, place, *self._dealt))
                rows = iter(self._own()) if rows is None else rows
                try:
                    row = next(rows)
                except StopIteration:
                    return
            yield row

    def describe(self) -> dict[str, Any]:
        sizes = {"rows": None, "bytes": None} if self.num_rows == ENDLESS else {}
        return {**super().describe(), **sizes, "kind": f"IterableDataset {type(self.dataset).__name__}"}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_place": None}


def promise(plan_shuffles: bool, window_rows: int, *, dealt_by: str = "") -> str:
    """Guarantee about the order of the rows, for the user. dealt_by: how rows are divided among workers."""
    mixed = f", shuffled in a buffer of {window_rows} rows" if plan_shuffles else ""
    if dealt_by:
        return (
            f"weak: as divided by {dealt_by} of the IterableDataset{mixed}. Each worker reads only its own part, so "
            f"the rows of a step depend on the number of workers; the rows of an epoch that cannot be divided evenly "
            f"are left out, and a resume reads its epoch from the start"
        )
    return (
        f"as yielded by the IterableDataset{mixed}, the same for every number of workers if it yields the same rows "
        f"each time; every worker reads all rows and keeps its own, and a resume reads its epoch from the start"
    )


def _shuffled(rows: Iterator[Columns], draw: np.random.Generator, size: int) -> Iterator[Columns]:
    """Yield the rows in random order, drawn from a buffer of `size` rows."""
    buffer = list(itertools.islice(rows, size))
    for row in rows:
        place = int(draw.integers(len(buffer)))
        buffer[place], chosen = row, buffer[place]
        yield chosen
    for place in draw.permutation(len(buffer)):
        yield buffer[place]


def refuse_shared_place(sources: Mapping[str, Any]) -> None:
    """Raise DataError for a stream that yields other rows if other splits are read in between, for example through a
    shared handle. Streams whose rows differ each time are not checked."""
    users = {name: source for name, source in sources.items() if isinstance(source, DatasetSource)}
    streams = {name: source for name, source in users.items() if isinstance(source, IterableSource)}
    if not streams or len(users) < 2:
        return
    for name, rows in _read_in_turn(users).items():
        alone = [_read_alone(streams[name], len(rows)) for _ in range(2)]
        if alone[0] == alone[1] != rows:
            raise DataError.problem(
                f"the {name} data",
                f"has different rows if {' or '.join(n for n in users if n != name)} is read at the same time: they "
                "share a handle through a class, a module, a cache or an argument",
                f"open the file in __iter__ of {type(streams[name].dataset).__name__} for each iteration, or seek to "
                f"the position of a row before reading it",
            )


def _read_in_turn(sources: Mapping[str, DatasetSource]) -> dict[str, list[str]]:
    """Fingerprints of the first rows of every stream, read in turn with the other splits in pieces of growing length,
    as a stream may read a file in blocks. Reads at least FIRST_ROWS rows, then more for IN_TURN_S."""
    streams = {name: source for name, source in sources.items() if isinstance(source, IterableSource)}
    found: dict[str, list[str]] = {name: [] for name in streams}

    def read() -> None:
        rows = {name: source.first_fingerprints() for name, source in streams.items()}
        until, piece = time.monotonic() + IN_TURN_S, FIRST_ROWS // 2
        while piece <= FIRST_ROWS // 2 or (time.monotonic() < until and piece < MOST_IN_TURN):
            for name, source in [*sources.items()] * 2:
                if name in rows:
                    found[name] += itertools.islice(rows[name], piece)
                else:
                    source.read(np.array([0]))
            piece *= 2

    with generators_kept():
        call_user_code(read, what="datasets()", doing="reading the first rows of its splits")
    return found


def _read_alone(source: IterableSource, number: int) -> list[str]:
    """Fingerprints of the first rows of a stream, read without pause."""
    with generators_kept():
        return call_user_code(
            lambda: list(itertools.islice(source.first_fingerprints(), number)),
            what="datasets()",
            doing="reading the first rows of its splits",
        )


def refuse_endless(source: Any, split: str) -> None:
    """Raise DataError for an endless split, which is allowed only for training."""
    if source.num_rows == ENDLESS:
        raise DataError.problem(
            f"the {split} data",
            f"is endless: counting its rows for {SHORT_COUNT_S:.0f} s did not reach an end",
            "define __len__ in its IterableDataset, choose another split with --split, or give rows with --data",
        )
