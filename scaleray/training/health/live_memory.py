"""Count the bytes of live tensors on the CPU, whose allocator has no counter.

The resident memory of a process depends on its history, its threads and fragmentation. These bytes depend only on the
program, so a limit on them can be tested."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from scaleray.common.equal_models import dense_parts
from scaleray.errors import text_of


class LiveTensors(TorchDispatchMode):
    """Counts the storages created by operations inside the context, for as long as they live. Storages from before the
    context and memory of compiled code are not counted. bytes: currently alive; peak: largest number alive at the same
    time. problem: error that ended the counting; it never affects the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.problem: Exception | None = None
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it will ask again for each rank's own part
        kwargs = kwargs or {}
        before = self._storages((args, kwargs))
        result = func(*args, **kwargs)
        new = self._storages(result)
        for key in new.keys() - before.keys():
            self._count(new[key])
        return result

    def counted(self) -> LiveTensors:
        """This counter, if it has counted everything. Raises the error that ended its counting."""
        if self.problem is not None:
            raise self.problem
        return self

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor is counted."""
        return any(id(part.untyped_storage()) in self._alive for part in dense_parts(local_part(tensor)).values())

    def _storages(self, values: Any) -> dict[int, torch.UntypedStorage]:
        try:
            parts = (part for t in tree_iter(values) if _has_storage(t) for part in dense_parts(t).values())
            return {id(part.untyped_storage()): part.untyped_storage() for part in parts}
        except Exception as exc:  # a tensor of a kind that has none: this is inside the training's own operations
            self.problem = exc
            return {}

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)  # the object lives as long as the memory
        if key in self._alive:
            return
        self._alive[key] = storage.nbytes()
        weakref.finalize(storage, self._forget, key)
        self.bytes += storage.nbytes()
        self.peak = max(self.peak, self.bytes)

    def _forget(self, key: int) -> None:
        self.bytes -= self._alive.pop(key, 0)


def _has_storage(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout in (torch.strided, torch.sparse_coo) and not value.is_meta


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of memory behind these tensors on this rank; shared memory is counted once."""
    parts = (part for t in tensors if not t.is_meta for part in dense_parts(local_part(t).detach()).values())
    storages = {id(s): s for s in (part.untyped_storage() for part in parts)}
    return sum(storage.nbytes() for storage in storages.values())


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether an error means that a device or the host is out of memory."""
    if isinstance(exc, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(exc, RuntimeError) and "can't allocate memory" in text_of(exc)


def free_unused(device: torch.device) -> None:
    """Free what a failed pass has left: reference cycles that hold activations, and unused blocks of the allocator."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor that may be sharded."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
