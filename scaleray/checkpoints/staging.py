"""Host memory for the parts of the state that a rank writes, which training does not touch."""

from __future__ import annotations

import torch

Key = tuple[str, tuple[int, ...]]
"""Name of a tensor, and offsets of a part of it."""


class Staging:
    """Host memory for the parts of the state that this rank writes; kept from one checkpoint to the next."""

    def __init__(self) -> None:
        self._buffers: dict[Key, torch.Tensor] = {}

    def copy(self, key: Key, tensor: torch.Tensor) -> torch.Tensor:
        """Copy of the tensor's bytes, uint8 (n,), in memory that training does not touch. A CUDA device fills it in the
        order of its stream, which must be waited for."""
        source = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() != source.numel():
            buffer = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=source.is_cuda)
            self._buffers[key] = buffer
        buffer.copy_(source, non_blocking=True)
        return buffer
