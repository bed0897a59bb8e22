"""How many bytes of tensors are alive: an allocator's counter where there is none, on the CPU.

The resident memory of a process depends on its past, on threads and on fragments; these bytes depend on the program
alone, so that a limit on them can be tested.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveTensors(TorchDispatchMode):
    """Counts the storages that operations inside the context make, as long as they live. Compiled code is not seen.

    bytes: alive now; peak: the most there were at once. What was there before the context does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = {id(t.untyped_storage()) for t in tree_iter((args, kwargs)) if _has_storage(t)}
        result = func(*args, **kwargs)
        for tensor in tree_iter(result):
            if _has_storage(tensor) and id(tensor.untyped_storage()) not in before:
                self._count(tensor.untyped_storage())
        return result

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
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta


def storage_bytes(tensors: Any) -> int:
    """Bytes of the memory behind some tensors on this rank, shared memory counted once."""
    sizes = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if _has_storage(local):
            sizes[local.untyped_storage().data_ptr() or id(local)] = local.untyped_storage().nbytes()
    return sum(sizes.values())
