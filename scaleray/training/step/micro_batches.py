"""A worker's rows of a step, cut into the micro-batches that the model sees, on the device and as the workload knows
them."""

from __future__ import annotations

import functools
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
    """Columns as tensors on `device`; floating-point ones converted to `dtype` if it is given.

    A GPU copies them beside what it computes: the host, which runs ahead, asks for the rows of the next micro-batch
    while the last one is still being computed.
    """
    tensors = {name: torch.from_numpy(values) for name, values in columns.items()}
    if device.type == "cuda":
        tensors = _copied_beside(tensors, device)
    return {n: t.to(dtype) if dtype is not None and t.is_floating_point() else t for n, t in tensors.items()}


def _copied_beside(tensors: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors on a GPU, copied on a stream of their own, for which the training's stream waits. Not run yet."""
    copies, training = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copies):
        found = {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()}
    training.wait_stream(copies)
    for tensor in found.values():
        tensor.record_stream(training)  # or its memory would be given away while the training still reads it
    return found


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def as_user_batch(columns: dict[str, torch.Tensor], gives_tuples: bool) -> Any:
    """The batch as the workload's data gave it: a dict of tensors, or a tuple."""
    return tuple(columns[str(i)] for i in range(len(columns))) if gives_tuples else columns
