"""Fitting Ray Data's preprocessors in this process, where there is no Ray.

Their `fit` asks few things of a Ray Dataset: aggregates, and a function over batches. `Blocks` answers these with Ray's
own aggregates and block formats on rows that lie in memory, so that the values are those that a cluster finds (within
rounding, as sums are taken in another order).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from scaleray.errors import ClusterError


class Blocks:
    """Blocks of rows in place of a Ray Dataset while a preprocessor is fitted."""

    def __init__(self, blocks: Iterable[Any]) -> None:
        self.blocks = list(blocks)

    def map_batches(self, function: Callable[[Any], Any], *, batch_format: str = "numpy", **options: Any) -> Blocks:
        """The blocks that a function makes of each; options say how Ray would spread the work."""
        from ray.data.block import BlockAccessor

        return Blocks(BlockAccessor.batch_to_block(function(batch)) for batch in self.iter_batches(batch_format))

    def iter_batches(self, batch_format: str = "numpy", *, batch_size: int | None = None) -> Iterator[Any]:
        """The blocks, in a format of Ray's batches."""
        from ray.data.block import BlockAccessor

        return (BlockAccessor.for_block(block).to_batch_format(batch_format) for block in self.blocks)

    def aggregate(self, *aggregates: Any) -> dict[str, Any]:
        """The result of each of Ray's aggregates over all rows, by name."""
        found = {}
        for one in aggregates:
            total, *parts = (one.accumulate_block(one.init(None), block) for block in self.blocks)
            for part in parts:
                total = one.merge(total, part)
            found[one.name] = one.finalize(total)
        return found

    def groupby(self, key: None) -> _Whole:
        """All rows as one group."""
        return _Whole(self)


class _Whole:
    """All rows as one group, whose aggregates come as the only row of a table."""

    def __init__(self, rows: Blocks) -> None:
        self.rows = rows

    def aggregate(self, *aggregates: Any) -> SimpleNamespace:
        import pyarrow as pa

        found = self.rows.aggregate(*aggregates)
        table = pa.table({name: pa.array([value]) for name, value in found.items()})
        return SimpleNamespace(to_arrow_refs=lambda: [table])


def fit_in_process(preprocessor: Any, tables: Sequence[Any]) -> None:
    """Fit one of Ray Data's preprocessors on tables of rows. Raises ClusterError where it asks for more of a Dataset
    than can be had without Ray."""
    with _results_at_hand():
        try:
            preprocessor.fit(Blocks(tables))
        except AttributeError as exc:
            if not isinstance(exc.obj, Blocks | _Whole | SimpleNamespace):
                raise
            raise ClusterError(
                f"preprocessor() {type(preprocessor).__name__}",
                "not fitted",
                f"its fit asks for {exc.name} of a Ray Dataset, and this command runs without Ray",
                "leave --local out, or return one that is fitted",
            ) from exc


@contextlib.contextmanager
def _results_at_hand() -> Iterator[None]:
    """Context in which Ray's preprocessors take results that are here already for those of tasks: `ray.get` would start
    a cluster."""
    from ray.data.preprocessors import utils

    if not hasattr(utils, "ray"):  # another version of Ray gets its results in another way
        yield
        return
    with patch.object(utils, "ray", SimpleNamespace(get=lambda result: result)):
        yield
