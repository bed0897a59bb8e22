"""A worker's rows of a step, divided into micro-batches on the device, in the workload's form."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from scaleray.data import TRAIN, RankBatch, Split
from scaleray.data.collate_ahead import CollateAhead
from scaleray.data.collation import collated, refuse_ragged
from scaleray.data.rank_batch import Made
from scaleray.training.setup.precision import as_dtype
from scaleray.training.setup.weighted_losses import losses_of
from scaleray.workload import own_method

ALIGNMENT = 64
"""Alignment in bytes of the memory of torch's own tensors. On a CPU, kernels round differently at other addresses, and
NumPy's arrays begin at any multiple of 16, so equal batches would have losses that differ in their last bits."""


def micro_batches(batch: RankBatch, size: int, *, at_least: int = 1) -> Iterator[tuple[dict[str, Any] | Made, int]]:
    """Slices of at most `size` rows, or batches already made by `collate`, each with the number of rows that count (0
    for a placeholder).

    Placeholders come first, as many as it takes to have `at_least` slices."""
    edges = list(cuts_of(batch, size))
    for _ in range(at_least - len(edges)):
        yield {name: values[:1] for name, values in batch.columns.items()}, 0
    for start, stop in edges:
        rows = {name: values[start:stop] for name, values in batch.columns.items()}
        yield batch.take(start, stop) or rows, stop - start


def cuts_of(batch: RankBatch, size: int) -> Iterator[tuple[int, int]]:
    """Bounds of the micro-batches of a batch, by rows or by the token counts of its plan."""
    return cuts(batch.num_rows, size) if batch.cuts is None else itertools.pairwise(batch.cuts.edges)


def most_micro_batches(batch: RankBatch, size: int, *, num_rows: int, num_shares: int) -> int:
    """Largest number of micro-batches on any rank. num_rows: rows of the global batch, which is divided into
    `num_shares`."""
    return math.ceil(math.ceil(num_rows / num_shares) / size) if batch.cuts is None else batch.cuts.most


def cuts(num_rows: int, size: int) -> Iterator[tuple[int, int]]:
    """Bounds (start, stop) of the micro-batches of `num_rows` rows; none if there are no rows."""
    edges = [*range(0, num_rows, size), num_rows]
    if num_rows % size == 1 and len(edges) > 2 and size > 2:
        edges[-2] -= 1  # no micro-batch of a single row beside larger ones: batch normalisation cannot train on it
    return itertools.pairwise(edges)


def collate_ahead(
    workload: Any, split: Split, cuts: Callable[[RankBatch], Iterable[tuple[int, int]]], *, may_draw: bool
) -> CollateAhead | None:
    """Function that makes a split's micro-batches ahead of the training; None if the training has to call `collate`
    itself. cuts: returns the bounds of a batch's micro-batches. may_draw: assume that `collate` draws random numbers.
    """
    look = split.collate
    if look is None or look.why_in_turn or may_draw or not getattr(workload, "collates_ahead", True):
        return None
    times = len(losses_of(workload) or [None]) if split.name == TRAIN else 1
    return CollateAhead(own_method(workload, "collate"), split.gives_tuples, cuts, look.row_bytes, times)


def user_batch(
    workload: Any, rows: dict[str, Any] | Made, device: torch.device, dtype: torch.dtype | None, *, gives_tuples: bool
) -> Any:
    """Rows for the workload's loss, on `device`: its columns as tensors, or the result of its `collate`.

    dtype: type of floating-point tensors, if given. Raises DataError for ragged rows without a `collate`."""
    found: dict[str, Any] = {}
    if isinstance(rows, Made):
        made = _taken_out(rows.batch, found)
    elif (collate := own_method(workload, "collate")) is None:
        refuse_ragged(rows, what="the data")
        columns = to_device(rows, device, dtype)
        return tuple(columns[str(i)] for i in range(len(columns))) if gives_tuples else columns
    else:
        made = _taken_out(collated(collate, rows, gives_tuples=gives_tuples), found)
    return _put_back(made, to_device(found, device, dtype))


@dataclass(frozen=True)
class _Slot:
    """Position of a tensor in a batch."""

    name: str


def _taken_out(batch: Any, found: dict[str, Any]) -> Any:
    """Batch with slots in place of its tensors and arrays, which are stored in `found` by name."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        name = str(len(found))
        found[name] = batch
        return _Slot(name)
    if isinstance(batch, Mapping):
        return {name: _taken_out(value, found) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_taken_out(value, found) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(_taken_out(value, found) for value in batch)
    return batch


def _put_back(batch: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(batch, _Slot):
        return tensors[batch.name]
    if isinstance(batch, dict):
        return {name: _put_back(value, tensors) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_put_back(value, tensors) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(_put_back(value, tensors) for value in batch)
    return batch


def to_device(columns: dict[str, Any], device: torch.device, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Convert columns to tensors on `device`, and floating-point ones to `dtype` if given. A GPU copies them while it
    computes: the host runs ahead and prepares the next micro-batch during the computation of the last one."""
    tensors = {n: v if isinstance(v, torch.Tensor) else torch.from_numpy(v) for n, v in columns.items()}
    if device.type == "cuda":
        tensors = _copied_beside(tensors, device)
    elif device.type == "cpu":
        tensors = {n: _aligned(t) for n, t in tensors.items()}
    return {n: as_dtype(t, dtype) for n, t in tensors.items()}


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if its address is not aligned like those of torch's own tensors. A subclass, such as a fake
    tensor, may have no address."""
    is_elsewhere = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.data_ptr() % ALIGNMENT
    return tensor.clone() if is_elsewhere else tensor


def _copied_beside(tensors: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors on a GPU, copied on a separate stream for which the training's stream waits. Not run yet."""
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
