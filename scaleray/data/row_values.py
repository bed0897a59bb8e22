"""Random numbers drawn while rows are read, which are detected at the start and seeded for each row.

A Dataset draws its random transforms from the global generators of torch, numpy or `random`. These belong to the whole
process: a thread that seeds them also seeds the dropout of the training. A source that draws is therefore read only
while no other code in its process draws: by Ray tasks, which run one at a time in separate processes, or by a worker
while its training thread waits for the rows (`blocks.LocalBlocks`). The generators are seeded before each row, from the
run's seed, the split, the epoch and the row (`StepPlan.row_seeds`), and restored after the last one. A row is then the
same in every process, and the training's own random numbers do not change.

A few rows show whether a source draws; a source that does not is read ahead in a thread, at no cost. Random numbers
from elsewhere (a generator object, the operating system, the clock) cannot be seeded, and are reported."""

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from scaleray.common.seeding import seed_row
from scaleray.data.ragged import Ragged, flat_values, joined
from scaleray.data.source_interface import Columns, Source

ROWS_LOOKED_AT = 8
READS = 3  # reads of each row: a flip with a chance of one half shows with probability 1 - 4^-8
UNSEEDED = "random numbers are seeded if they come from the global generators of torch, numpy or `random`"


@dataclass(frozen=True)
class RowValues:
    """Whether the values of a source's rows are repeatable. difference: evidence that they are not, as text. advice:
    remedy."""

    draw_random_numbers: bool = False
    """Whether rows draw from a global generator of torch, numpy or Python, so that reading must seed it."""
    difference: str = ""
    advice: str = f"{UNSEEDED}: draw from these"
    draw_by_row: bool = False
    """Whether a transform draws from the generators of the rows, which need no seeding."""

    @property
    def are_repeatable(self) -> bool:
        """Whether a row always has the same values in the same epoch of a run with the same seed."""
        return not self.difference

    @property
    def promise(self) -> str:
        """Guarantee for the user, as text; empty for stored rows."""
        if self.difference:
            return f"the values of the rows are not repeatable: {self.difference}"
        is_random = self.draw_random_numbers or self.draw_by_row
        return "random transforms follow from seed, epoch and row" if is_random else ""


AS_STORED = RowValues()


def row_values_of(source: Source) -> RowValues:
    """Result of the check at the creation of the source; without a check, its rows count as stored."""
    found: RowValues = getattr(source, "row_values", AS_STORED)
    return found


def look_at_rows(read_row: Callable[[int], Columns], rows: Sequence[int]) -> RowValues:
    """Check rows by reading each several times under one seed. The generators are restored.

    Unreadable rows are skipped; their errors are reported with rank and step when training reads them."""
    draws = False
    with generators_kept():
        for row in rows:
            found: list[Columns] = []
            try:
                for _ in range(READS):
                    seed_row(row)
                    before = generator_states()
                    found.append(read_row(row))
                    draws = draws or have_moved(before)
            except Exception:
                continue
            if (column := first_difference(found)) is not None:
                return RowValues(
                    draws, f"row {row} differs in column {column} when it is read again under the same seed"
                )
    return RowValues(draws)


def spread_rows(num_rows: int) -> list[int]:
    """Indices of a few rows, evenly spread from the first to the last."""
    return np.unique(np.linspace(0, num_rows - 1, ROWS_LOOKED_AT).astype(int)).tolist() if num_rows else []


def rows_to_look_at(source: Source) -> list[int]:
    """Indices that are cheap to read: the first rows if random access is expensive."""
    if source.group_sizes is None and not hasattr(source, "read_on"):
        return spread_rows(source.num_rows)
    most = source.num_rows if source.group_sizes is None else source.group_sizes[0]
    return list(range(min(ROWS_LOOKED_AT, most)))


def read_alone(source: Source, indices: np.ndarray, seeds: Callable[[], np.ndarray]) -> Columns:
    """Read rows at `indices` (n,) from user code that may draw random numbers; no other code in this process may draw
    at the same time. seeds: returns one seed for each row, uint64 (n,)."""
    if not row_values_of(source).draw_random_numbers:
        with generators_kept():
            before = generator_states()
            columns = source.read(indices)
            draws = have_moved(before)
        if not draws:
            return columns  # else the finding of the first look at a few rows does not hold for these
    reader: Any = source if hasattr(source, "read_seeded") else RowByRow(source)
    seeded: Columns = reader.read_seeded(indices, seeds())
    return seeded


class RowByRow:
    """A user's source with computed values, read one row at a time, each under its seed.

    A source with row groups is not read row by row, since each row would read a whole group."""

    def __init__(self, source: Source, row_values: RowValues = RowValues(draw_random_numbers=True)) -> None:
        self.source, self.row_values = source, row_values
        self.num_rows, self.row_bytes = source.num_rows, source.row_bytes
        self.tokens_per_row, self.group_sizes = source.tokens_per_row, source.group_sizes

    def read(self, indices: np.ndarray) -> Columns:
        """Read the rows at `indices` (n,) in the given order, under one seed."""
        return self.read_seeded(indices, np.zeros(len(indices), np.uint64))

    def read_seeded(self, indices: np.ndarray, seeds: np.ndarray) -> Columns:
        """Read the rows at `indices` (n,), each under its seed, uint64 (n,)."""
        if not self.row_values.draw_random_numbers or not len(indices):
            return self.source.read(indices)
        size = 1 if self.group_sizes is None else len(indices)
        pieces = []
        with generators_kept():
            for start in range(0, len(indices), size):
                seed_row(int(seeds[start]))
                pieces.append(self.source.read(indices[start : start + size]))
        return joined(pieces)

    def describe(self) -> dict[str, Any]:
        """Description of the wrapped source."""
        return self.source.describe()


def with_row_values(source: Source) -> Source:
    """Wrap a user's source if its values must be seeded or are not repeatable."""
    # one row of a source with groups reads a whole group
    rows = spread_rows(source.num_rows) if source.group_sizes is None else [0][: source.num_rows]
    found = look_at_rows(lambda row: source.read(np.array([row])), rows)
    if found.draw_random_numbers and found.are_repeatable and source.group_sizes is not None:
        found = RowValues(True, f"{type(source).__name__} draws random numbers, and is read in groups of rows")
    return source if found == AS_STORED else RowByRow(source, found)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Context that restores the global generators, including those of GPUs, on exit."""
    # all of them: in a thread that reads, the current GPU need not be the one of the training
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    from_torch, from_numpy, from_python = generator_states()
    try:
        yield
    finally:
        torch.set_rng_state(from_torch)
        np.random.set_state(from_numpy)
        random.setstate(from_python)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)


def generator_states() -> tuple[torch.Tensor, Any, Any]:
    """States of the global generators of torch, numpy and Python."""
    # not seeding.random_state, which makes tensors for checkpoints: ten times slower, and this is done every step
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def have_moved(before: tuple[torch.Tensor, Any, Any]) -> bool:
    """Whether any of the global generators has changed its state."""
    from_torch, from_numpy, from_python = generator_states()
    same_numpy = all(np.array_equal(ours, theirs) for ours, theirs in zip(from_numpy, before[1], strict=True))
    return not (torch.equal(from_torch, before[0]) and same_numpy and from_python == before[2])


def first_difference(reads: list[Columns]) -> str | None:
    """Name of the first column that differs between these reads in shape, type or bits; None if all are equal."""
    first, *others = reads
    for name, values in first.items():
        if any(name not in other or _bits(values) != _bits(other[name]) for other in others):
            return name
    return None


def fingerprint(columns: Columns) -> str:
    """Hash of the names and values of columns."""
    bits = [(n, *_bits(c)[:3], c.tolist() if c.dtype == object else _bits(c)[3]) for n, c in sorted(columns.items())]
    return hashlib.sha256(repr(bits).encode(errors="surrogatepass")).hexdigest()


def _bits(column: Any) -> tuple[Any, ...]:
    lengths = column.lengths.tobytes() if isinstance(column, Ragged) else b""
    if isinstance(column, Ragged) and column.shapes is not None:
        lengths += column.shapes.tobytes()
    values = flat_values(column)
    return values.dtype, values.shape, lengths, values.tobytes()
