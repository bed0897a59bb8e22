"""Numbers that a device is still computing while the host continues; they are copied asynchronously and read some steps
later. Reading a device tensor waits for all work queued before it, and the host cannot queue more in the meantime, so a
step of many small kernels loses half of its speed. A step therefore leaves its loss, norm and verdicts on the device,
and the loop reads them long after they have arrived. Source: PyTorch Performance Tuning Guide, "Avoid unnecessary
CPU-GPU synchronization"."""

from collections.abc import Sequence

import torch

STEPS_AHEAD = 2
"""Steps that the host may be ahead of the results it has read. With one, the device would wait while the host reads."""


def steps_ahead(device: torch.device) -> int:
    """Number of steps that the host may run ahead: none on the CPU, where calls return results."""
    return 0 if device.type == "cpu" else STEPS_AHEAD


def on_device(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A few numbers, copied to the device without waiting for it, unlike a copy from pageable memory."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Later:
    """Numbers in transit from the device, float64 (n,), which no other code may change."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._has_arrived = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._has_arrived = torch.cuda.Event()
            self._has_arrived.record()

    def wait(self) -> None:
        """Wait until the numbers have arrived, but not for later work of the device."""
        if self._has_arrived is not None:
            self._has_arrived.synchronize()

    def read(self) -> list[float]:
        """The numbers; waits for them."""
        self.wait()
        found: list[float] = self._values.tolist()
        return found
