"""Host memory for copies of a rank's part of the state, which training does not change."""

import weakref
from collections.abc import Iterable

import torch

Key = tuple[str, tuple[int, ...]]
"""Name of a tensor, and offsets of a part of it."""


class Staging:
    """Host memory for the parts of the state that this rank writes; reused for the next checkpoint.

    A GPU fills it on a separate stream, concurrently with training: call `begin` in the training thread, `copy` and
    `wait` in any other. This code has not been run."""

    def __init__(self) -> None:
        self._buffers: dict[Key, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """Start to copy tensors in the state that they have after the work queued so far on the training's streams."""
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))
            stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, key: Key, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the tensor's bytes, uint8 (n,), to memory that training does not change. For a tensor on a GPU, the copy
        is complete after `wait`."""
        with torch.cuda.stream(self._streams.get(tensor.device)):  # None: no change
            source = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            buffer = self._buffers.get(key)
            if buffer is None or buffer.numel() != source.numel():
                buffer = pinned(source.numel()) if source.is_cuda else torch.empty(source.numel(), dtype=torch.uint8)
                self._buffers[key] = buffer
            buffer.copy_(source, non_blocking=True)
        return buffer

    def wait(self) -> None:
        """Wait for the copies but not for the training."""
        for stream in self._streams.values():
            stream.synchronize()


def pinned(num_bytes: int) -> torch.Tensor:
    """Allocate memory, uint8 (num_bytes,), to which a GPU copies asynchronously. torch rounds such memory up to a power
    of two, which could double the state of a training."""
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    address, cuda = buffer.data_ptr(), torch.cuda.cudart()
    if not num_bytes or int(cuda.cudaHostRegister(address, num_bytes, 0)) != 0:  # a limit on locked memory
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    weakref.finalize(buffer, cuda.cudaHostUnregister, address)
    return buffer
