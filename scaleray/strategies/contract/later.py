"""Numbers that a device still computes while the host continues: copied during the training, and read some steps later.

A read of a device's tensor waits for everything that the device was given before it, and until then the host can give
it nothing more: a step of many small kernels loses half of its speed. So a step leaves its loss, norm and verdicts on
the device, and the loop reads them when they have long arrived. Source: PyTorch Performance Tuning Guide, "Avoid
unnecessary CPU-GPU synchronization".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

STEPS_AHEAD = 2
"""Steps that the host may run ahead of what it knows of a device. One lets the device wait while the host reads."""


def steps_ahead(device: torch.device) -> int:
    """Steps that the host may run ahead of what it knows: none on the CPU, which has computed when a call returns."""
    return 0 if device.type == "cpu" else STEPS_AHEAD


def on_device(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A few numbers on the device. Does not wait for the device, which a copy from pageable memory would."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Later:
    """Numbers in transit from the device, float64 (n,), which no other code changes."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._has_arrived = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._has_arrived = torch.cuda.Event()
            self._has_arrived.record()

    def wait(self) -> None:
        """Wait until they have arrived, and for nothing that the device was given after them."""
        if self._has_arrived is not None:
            self._has_arrived.synchronize()

    def read(self) -> list[float]:
        """The numbers; waits for them."""
        self.wait()
        found: list[float] = self._values.tolist()
        return found
