"""Host memory for the parts of the state that a rank writes, which training does not touch."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

Key = tuple[str, tuple[int, ...]]
"""Name of a tensor, and offsets of a part of it."""


class Staging:
    """Host memory for the parts of the state that this rank writes; kept from one checkpoint to the next.

    A GPU fills it on a stream of its own, next to the training's: `begin` in the thread that trains, `copy` and `wait`
    in any other. That path has not been run.
    """

    def __init__(self) -> None:
        self._buffers: dict[Key, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begin to copy tensors as they are once the training's streams have done what they were given until now."""
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))
            stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, key: Key, tensor: torch.Tensor) -> torch.Tensor:
        """Copy of the tensor's bytes, uint8 (n,), in memory that training does not touch. Complete after `wait` where
        the tensor is on a GPU."""
        with torch.cuda.stream(self._streams.get(tensor.device)):  # None: nothing changes
            source = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            buffer = self._buffers.get(key)
            if buffer is None or buffer.numel() != source.numel():
                buffer = pinned(source.numel()) if source.is_cuda else torch.empty(source.numel(), dtype=torch.uint8)
                self._buffers[key] = buffer
            buffer.copy_(source, non_blocking=True)
        return buffer

    def wait(self) -> None:
        """Wait for the copies, and not for the training."""
        for stream in self._streams.values():
            stream.synchronize()


def pinned(num_bytes: int) -> torch.Tensor:
    """Memory, uint8 (num_bytes,), that a GPU copies to by itself. torch's own is rounded up to a power of two, which
    would be up to twice the state of a training."""
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    address, cuda = buffer.data_ptr(), torch.cuda.cudart()
    if not num_bytes or int(cuda.cudaHostRegister(address, num_bytes, 0)) != 0:  # a limit on locked memory
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    weakref.finalize(buffer, cuda.cudaHostUnregister, address)
    return buffer
