"""Facts about one split of the data, for those who do not hold its rows."""

from __future__ import annotations

from dataclasses import dataclass

from scaleray.data.row_values import AS_STORED, RowValues, row_values_of
from scaleray.data.source import Source
from scaleray.data.sources import IN_MEMORY, DatasetSource, StreamSource


@dataclass(frozen=True)
class Split:
    """Facts about one split that workers need to know without holding its rows."""

    name: str
    num_rows: int
    row_bytes: int
    tokens_per_row: int | None
    group_sizes: tuple[int, ...] | None
    gives_tuples: bool
    is_streamed: bool
    row_values: RowValues = AS_STORED
    is_in_memory: bool = False
    """Whether reading its rows is copying them."""

    @classmethod
    def of(cls, name: str, source: Source) -> Split:
        """Collect the facts of a source."""
        return cls(
            name=name,
            num_rows=source.num_rows,
            row_bytes=source.row_bytes,
            tokens_per_row=source.tokens_per_row,
            group_sizes=source.group_sizes,
            gives_tuples=isinstance(source, DatasetSource) and source.gives_tuples,
            is_streamed=isinstance(source, StreamSource),
            row_values=row_values_of(source),
            is_in_memory=type(source) in IN_MEMORY,
        )

    def read_by(self, readers: str) -> str:
        """Who reads the rows under this value of `data.readers`: `worker` or `ray`."""
        if self.is_streamed:
            return "ray"
        return ("worker" if self.is_in_memory else "ray") if readers == "auto" else readers
