"""A worker's rows of a step, cut into the micro-batches that the model sees, on the device and as the workload knows
them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from scaleray.data import RankBatch


def micro_batches(batch: RankBatch, size: int, *, at_least: int = 1) -> Iterator[tuple[dict[str, np.ndarray], int]]:
    """Slices of at most `size` rows with the number of rows that count: 0 for a placeholder.

    Placeholders come first, until there are `at_least` so many.
    """
    for _ in range(at_least - math.ceil(batch.num_rows / size)):
        yield {name: values[:1] for name, values in batch.columns.items()}, 0
    for start, stop in cuts(batch.num_rows, size):
        yield {name: values[start:stop] for name, values in batch.columns.items()}, stop - start


def cuts(num_rows: int, size: int) -> Iterator[tuple[int, int]]:
    """Where the micro-batches of so many rows begin and end; none for no rows."""
    edges = [*range(0, num_rows, size), num_rows]
    if num_rows % size == 1 and len(edges) > 2 and size > 2:
        edges[-2] -= 1  # no micro-batch of a single row beside larger ones: batch normalisation cannot train on it
    return itertools.pairwise(edges)


def to_device(
    columns: dict[str, np.ndarray], device: torch.device, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Columns as tensors on `device`; floating-point ones converted to `dtype` if it is given."""
    tensors = {}
    for name, values in columns.items():
        tensor = torch.from_numpy(values)
        if device.type == "cuda":
            tensor = tensor.pin_memory().to(device, non_blocking=True)
        tensors[name] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    return tensors


def as_user_batch(columns: dict[str, torch.Tensor], gives_tuples: bool) -> Any:
    """The batch as the workload's data gave it: a dict of tensors, or a tuple."""
    return tuple(columns[str(i)] for i in range(len(columns))) if gives_tuples else columns
