"""Facts about one split of the data, for code that does not have its rows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from scaleray.config.recipe.values import DataSize
from scaleray.data.collate_ahead import CollateCheck
from scaleray.data.iterable import IterableSource
from scaleray.data.length_order import Lengths
from scaleray.data.ray_dataset_source import StreamSource
from scaleray.data.row_values import AS_STORED, RowValues, row_values_of
from scaleray.data.source_interface import TRAIN, Source
from scaleray.data.sources import IN_MEMORY
from scaleray.data.transformed import Step, under_transforms
from scaleray.errors import DataError

COLLATE_ADVICE = "make a batch depend only on its rows, and draw random numbers in transform(rows, rng)"
CHEAP_ROW_S = 50e-6  # a task hands a row over in about that time, and decoding takes several times as much


@dataclass(frozen=True)
class Split:
    """Facts about one split, for workers that do not have its rows."""

    name: str
    num_rows: int
    row_bytes: int
    tokens_per_row: int | None
    group_sizes: tuple[int, ...] | None
    gives_tuples: bool
    is_streamed: bool
    row_values: RowValues = AS_STORED
    is_in_memory: bool = False
    """Whether reading its rows only copies them."""
    row_s: float | None = None
    """Measured seconds to read a row, if any."""
    is_sequential: bool = False
    """Whether its rows can only be iterated, so that every worker reads all of them unless the dataset divides them."""
    dealt_by: str = ""
    """How the dataset divides its rows among training workers; "" if it does not."""
    lengths: Lengths | None = None
    """Lengths of the rows, if the source provides them."""
    lanes: int | None = None
    """Number of contiguous parts; each row continues the row this many positions before. None: independent rows."""
    collate: CollateCheck | None = None
    """Result of calling the workload's `collate` on a few rows, if it has one."""
    transform: Step | None = None
    """Steps that change the rows of a Ray Dataset after Ray Data has read them."""

    @classmethod
    def of(cls, name: str, source: Source, workload: Any = None) -> Split:
        """Collect facts about a source and, if a workload is given, about its `collate`, which is called for this."""
        values, collate = row_values_of(source), CollateCheck.at(workload, source)
        if collate is not None and not collate.is_repeatable and not values.difference:
            values = dataclasses.replace(values, difference=collate.why_in_turn, advice=COLLATE_ADVICE)
        return cls(
            collate=collate,
            name=name,
            num_rows=source.num_rows,
            row_bytes=source.row_bytes,
            tokens_per_row=source.tokens_per_row,
            group_sizes=source.group_sizes,
            gives_tuples=getattr(source, "gives_tuples", False),
            is_streamed=isinstance(source, StreamSource),
            transform=source.transform if isinstance(source, StreamSource) else None,
            row_values=values,
            is_in_memory=type(source) in IN_MEMORY,
            is_sequential=isinstance(under_transforms(source), IterableSource),
            dealt_by=getattr(under_transforms(source), "deals_by", "") if name == TRAIN else "",
            lengths=lengths_of(source),
            lanes=getattr(under_transforms(source), "lanes", None),
            row_s=None if type(source) in IN_MEMORY else getattr(source, "row_s", None),
        )

    @property
    def size(self) -> DataSize:
        """Size of the data, for deriving a recipe."""
        lengths = self.lengths
        packed = (None, None) if lengths is None else (lengths.total, lengths.longest)
        return DataSize(self.num_rows, self.tokens_per_row, *packed)

    def read_by(self, readers: str) -> str:
        """Reader of the rows for this value of `data.readers`: `worker` or `ray`."""
        if self.is_streamed or self.is_sequential:
            return "worker" if self.is_sequential else "ray"
        if readers != "auto":
            return readers
        # rows that draw random numbers can be read ahead by tasks alone
        is_cheap = self.row_s is not None and self.row_s <= CHEAP_ROW_S and not self.row_values.draw_random_numbers
        return "worker" if self.is_in_memory or is_cheap else "ray"

    def reading(self, readers: str) -> dict[str, Any]:
        """Reader of the rows for this value of `data.readers`, and the measured time per row, for a run's record."""
        found: dict[str, Any] = {"read_by": self.read_by(readers)}
        if self.row_s is not None:
            found["row_us"] = round(1e6 * self.row_s, 1)
        if self.collate is not None:
            found["collated"] = self.collate.why_in_turn or "ahead of the training"
        return found


def lengths_of(source: Source) -> Lengths | None:
    """Lengths of a source's rows before any transform, if any. Raises DataError if they do not match the rows."""
    values = getattr(under_transforms(source), "lengths", None)
    if values is None:
        return None
    lengths = Lengths(values)
    if len(lengths) != source.num_rows or (len(lengths) and lengths.values.min() < 0):
        raise DataError.problem(
            "the lengths of the rows",
            f"must be {source.num_rows} non-negative numbers, one per row: there are {len(lengths)}, and the smallest "
            f"is {lengths.values.min(initial=0)}",
        )
    return lengths
