"""Read the rows of a part in blocks of several steps, in this process, and cut blocks into batches."""

import contextlib
import copy
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import numpy as np

from scaleray.data.iterable import IterableSource
from scaleray.data.ragged import Ragged, concatenated
from scaleray.data.rank_part import Part
from scaleray.data.row_values import read_alone, row_values_of
from scaleray.data.source_interface import Columns, Source, rows_in
from scaleray.data.sources import IN_MEMORY, STORED, DatasetSource
from scaleray.data.transformed import Transformed
from scaleray.data.user_dataset import TURNS
from scaleray.workload import no_exit

COPIED_BYTES = 2**19  # rows copied at once: into memory that a core's cache holds, and that earlier rows have left
ORDERED_ROWS = 2**14  # rows whose place in the order is computed at once, which takes more time row by row


def chunks(part: Part, *, row_bytes: int, chunk_bytes: float) -> Iterator[range]:
    """Ranges of steps to read together: small at first so that training starts early, then `chunk_bytes` each.

    Sources with row groups are read in whole windows, since each chunk would otherwise read the same groups again."""
    most = max(1, int(chunk_bytes // (part.rows_per_step * row_bytes)))
    size = 1
    if part.plan.group_sizes is not None and part.plan.shuffle:
        size = most = max(most, -(-part.plan.window_rows // part.plan.global_batch_size))
    step = part.first_step
    while step < part.last_step:
        yield range(step, min(step + size, part.last_step))
        step += size
        size = min(most, size * 4)


def read_chunk(source: Source, part: Part, steps: range, *, is_alone: bool = False) -> Columns:
    """Read the rows of these steps, one after another, in the exact order of the plan. is_alone: no other code in this
    process draws random numbers at the same time, so rows that draw any can be read under their own seeds."""
    positions, plan = part.positions(steps), part.plan
    transforms: list[Transformed] = []
    while isinstance(source, Transformed):
        transforms.append(source)
        source = source.source
    if isinstance(source, IterableSource):
        rows = source.read_on(positions, plan)
    else:
        # a Dataset takes its turn for each row
        turn = contextlib.nullcontext() if type(source) in (*STORED, DatasetSource) else TURNS
        with turn, no_exit("the source of the data"):
            if is_alone and type(source) not in STORED:
                rows = read_alone(source, plan.samples_at(positions), lambda: plan.row_seeds(positions))
            else:
                rows = source.read(plan.samples_at(positions))
    for transformed in reversed(transforms):
        rows = transformed.changed(rows, plan.row_seeds(positions))
    return rows


class LocalBlocks(Iterator[Columns]):
    """The chunks of a part, read in this process.

    may_draw: assume that user code draws random numbers even if a check of a few rows did not show it."""

    def __init__(self, source: Source, part: Part, *, chunk_bytes: float, may_draw: bool = False) -> None:
        self.are_copies = type(source) in (*IN_MEMORY, DatasetSource)
        """Whether every block has its own memory, which training may change."""
        self.is_read_alone = type(source) not in STORED and (may_draw or row_values_of(source).draw_random_numbers)
        """Whether these blocks may be read only while no other code in this process draws random numbers."""
        self.is_in_memory = type(source) in IN_MEMORY
        """Whether the next block only needs to be copied."""
        if self.is_in_memory:
            self._blocks = _copies(source, part, chunk_bytes=min(chunk_bytes, COPIED_BYTES))
            return
        # a step at a time, as training stands still while it is read
        source = with_own_place(source, part)
        steps = chunks(part, row_bytes=source.row_bytes, chunk_bytes=0.0 if self.is_read_alone else chunk_bytes)
        self._blocks = (read_chunk(source, part, those, is_alone=self.is_read_alone) for those in steps)

    def __next__(self) -> Columns:
        return next(self._blocks)


def _copies(source: Source, part: Part, *, chunk_bytes: float) -> Iterator[Columns]:
    """Yield the rows of a part in the order of the plan, copied from memory a few steps at a time."""
    num_rows = max(1, int(chunk_bytes // (part.rows_per_step * source.row_bytes))) * part.rows_per_step
    for steps in chunks(part, row_bytes=1, chunk_bytes=ORDERED_ROWS):
        indices = part.plan.samples_at(part.positions(steps))
        for start in range(0, len(indices), num_rows):
            yield source.read(indices[start : start + num_rows])


def with_own_place(source: Source, part: Part) -> Source:
    """Source for the reader of a part. If rows can only be iterated, it has a position of its own."""
    if isinstance(source, Transformed):
        source = copy.copy(source)
        source.source = with_own_place(source.source, part)
    return source.opened(part) if isinstance(source, IterableSource) else source


def close_blocks(blocks: Iterable[Columns]) -> None:
    """Close a generator in the thread that ran it; do nothing for other iterators."""
    if isinstance(blocks, Generator):
        blocks.close()


def rebatch(blocks: Iterable[Columns], sizes: Iterable[int]) -> Iterator[tuple[Columns, int]]:
    """Cut blocks of any length into pieces of the given sizes, in order. Training may change the pieces.

    Each piece comes with the number of rows already available for later pieces."""
    # Ray's blocks are read-only shared memory, and a source of the user may hand out its own
    is_copied = isinstance(blocks, LocalBlocks) and blocks.are_copies

    def copied(column: Any) -> Any:
        if isinstance(column, Ragged):
            return column if is_copied else column.copy()
        return np.asarray(column) if is_copied else np.array(column)

    pending: list[Columns] = []
    available = 0
    source = iter(blocks)
    for size in sizes:
        while available < size:
            block = next(source, None)
            if block is None:
                return
            available += rows_in(block)
            pending.append(block)
        piece: list[Columns] = []
        missing = size
        while missing:
            block = pending[0]
            length = rows_in(block)
            taken = min(missing, length)
            piece.append({name: values[:taken] for name, values in block.items()})
            if taken == length:
                pending.pop(0)
            else:
                pending[0] = {name: values[taken:] for name, values in block.items()}
            missing -= taken
        available -= size
        whole = {
            name: concatenated([p[name] for p in piece]) if len(piece) > 1 else copied(piece[0][name])
            for name in piece[0]
        }
        yield whole, available
