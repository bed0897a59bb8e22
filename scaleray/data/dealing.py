"""How an IterableDataset deals its rows out to workers, where it does: by a method `shard`, or by torch's worker info.

Each worker then iterates its own part alone, and no worker reads the rows of another one. A dataset deals by a method
`shard(rank=..., world_size=...)` (or `shard(num_shards=..., index=...)`, as others call it), which gives an iterable of
one part, or by `torch.utils.data.get_worker_info()` in its `__iter__`, where every training worker then is what a
worker of a DataLoader is. Whether it does the latter is seen from its first rows.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.data

from scaleray.workload import call_user_code

BY_SHARD, BY_WORKER_INFO = "shard()", "get_worker_info()"
PARAMETERS = (("rank", "world_size"), ("index", "num_shards"))
"""Names by which a `shard` takes which part it is to give, and of how many."""
_TURN = threading.RLock()  # worker info belongs to the process, and its other threads are workers of nobody


def deals_by(dataset: Any, first_rows: Callable[[Any], list[Any]]) -> str:
    """How a dataset deals its rows out: BY_SHARD, BY_WORKER_INFO, or "" for one that gives everybody all of them.

    first_rows: the first rows of an iterable, in a form that can be compared.
    """
    if _shard_parameters(dataset) is not None:
        return BY_SHARD
    if not isinstance(dataset, torch.utils.data.IterableDataset):
        return ""
    halves = [first_rows(_WithWorkerInfo(dataset, part, 2)) for part in range(2)]
    return BY_WORKER_INFO if halves[0] != halves[1] else ""


def part_of(dataset: Any, how: str, rank: int, world_size: int) -> Any:
    """An iterable of the rows that a dataset deals to this worker. Raises WorkloadError where its `shard` fails."""
    if how == BY_WORKER_INFO:
        return _WithWorkerInfo(dataset, rank, world_size)
    names = _shard_parameters(dataset)
    assert names is not None
    given = dict(zip(names, (rank, world_size), strict=True))
    what = f"{type(dataset).__name__}.shard()"
    return call_user_code(lambda: dataset.shard(**given), what=what, doing=f"dealing rows to worker {rank}")


def in_words(dataset: Any, how: str, rank: int, world_size: int) -> str:
    """The part of a dataset, as its user would find it."""
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
    """Iterable of a dataset's rows, during each of which this process is one of so many workers of a DataLoader."""

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
        with _TURN:
            before = module._worker_info
            module._worker_info = module.WorkerInfo(
                id=self.rank, num_workers=self.world_size, seed=torch.initial_seed() + self.rank, dataset=self.dataset
            )
            try:
                yield
            finally:
                module._worker_info = before
