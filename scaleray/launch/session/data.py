"""The data of a command: sources by split, their size, and whether they are those of before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scaleray.data import as_source
from scaleray.data.source import Source
from scaleray.errors import DataError
from scaleray.scaling.recipe.values import DataSize
from scaleray.training.setup.job import TRAIN
from scaleray.workload import call_user_code


def load_sources(workload: Any) -> dict[str, Source]:
    """The workload's data by split. Raises DataError or WorkloadError."""
    given = call_user_code(workload.datasets, what="datasets()", doing="reading the data")
    if not isinstance(given, Mapping) or TRAIN not in given:
        found = f"splits {sorted(given)}" if isinstance(given, Mapping) else type(given).__name__
        raise DataError(
            "datasets()",
            found,
            "it must return a mapping with the split 'train'",
            "for example {'train': ..., 'val': ...}",
        )
    return {name: as_source(value, split=name) for name, value in given.items()}


def size_of(sources: Mapping[str, Source]) -> DataSize:
    """Rows and tokens of the training split, which the recipe needs to know."""
    source = sources[TRAIN]
    return DataSize(source.num_rows, source.tokens_per_row)


def check_same_data(was: str | None, now: str | None, *, what: str, advice: str) -> None:
    """Raise DataError where both hashes (SHA-256 of the training data) are known and differ.

    what: the interrupted thing that read the other data. advice: what to do next.
    """
    if was and now and was != now:
        raise DataError(
            "the training data",
            f"SHA-256 {now[:16]}...",
            f"the interrupted {what} read other data, {was[:16]}...",
            advice,
        )
