"""Utilisation of this node, under the names that MLflow itself uses for system metrics.

The values of GPUs come from NVML. cudaMemGetInfo (`torch.cuda.mem_get_info`) would create a context of several hundred
MB on every queried device, even on GPUs of other workers (pytorch issues 86493, 103584)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch

from scaleray.common import nvml
from scaleray.common.watchers import Guard, Watcher

MB = 1e6  # bytes of a megabyte, as MLflow counts


class SystemMetrics:
    """Samples CPU, memory, disk, network and GPUs. The CPU's percentage covers the time since the previous sample,
    network traffic the time since the first one, as in MLflow. guard: lets each value of each GPU fail separately: MIG
    slices and vGPUs have only some."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        psutil.cpu_percent()  # the first call only starts the interval
        self._network = psutil.net_io_counters()
        self._gpus: dict[int, Any] = dict.fromkeys(range(torch.cuda.device_count() if torch.cuda.is_available() else 0))
        if self._gpus:
            guard(Watcher.SYSTEM_METRICS, self._open_gpus, None, part="NVML")

    def sample(self) -> dict[str, float]:
        """Percentages, watts, and megabytes of 10^6 bytes, as in MLflow."""
        found = self.guard(Watcher.SYSTEM_METRICS, self._host, {})
        for index, handle in self._gpus.items():
            for name, measure in (GPU_FIGURES if handle is not None else WITHOUT_NVML).items():
                values = self.guard(
                    Watcher.SYSTEM_METRICS, partial(measure, index, handle), {}, part=f"{name} of GPU {index}"
                )
                found.update({f"gpu_{index}_{figure}": value for figure, value in values.items()})
        return found

    def _open_gpus(self) -> None:
        nvml.opened()
        for index in self._gpus:
            self._gpus[index] = self.guard(Watcher.SYSTEM_METRICS, partial(_handle, index), None, part=f"GPU {index}")

    def _host(self) -> dict[str, float]:
        memory, disk, network = psutil.virtual_memory(), psutil.disk_usage("/"), psutil.net_io_counters()
        found = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / MB,
            "system_memory_usage_percentage": memory.percent,
            "disk_usage_percentage": disk.percent,
        }
        if network is not None and self._network is not None:
            # the counts of an interface that has gone since are gone as well
            received = max(0, network.bytes_recv - self._network.bytes_recv)
            sent = max(0, network.bytes_sent - self._network.bytes_sent)
            found["network_receive_megabytes"], found["network_transmit_megabytes"] = received / MB, sent / MB
        return found


def _handle(index: int) -> Any:
    """NVML's handle of the GPU with torch's index.

    NVML numbers all GPUs of the node, regardless of CUDA_VISIBLE_DEVICES."""
    import pynvml

    uuid = torch.cuda.get_device_properties(index).uuid
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError:
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")  # a MIG slice of a GPU


def _memory(index: int, handle: Any) -> dict[str, float]:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return _usage(memory.used, memory.total)


def _own_memory(index: int, handle: Any) -> dict[str, float]:
    """Memory of this process's own GPU, if the process has a context on it; for machines without NVML."""
    if index != torch.cuda.current_device():
        return {}
    free, total = torch.cuda.mem_get_info(index)
    return _usage(total - free, total)


def _usage(used: int, total: int) -> dict[str, float]:
    return {"memory_usage_megabytes": used / MB, "memory_usage_percentage": 100 * used / total}


def _utilization(index: int, handle: Any) -> dict[str, float]:
    import pynvml

    return {"utilization_percentage": float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)}


def _power(index: int, handle: Any) -> dict[str, float]:
    import pynvml

    return {"power_usage_watts": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000}  # NVML gives milliwatts


Measure = Callable[[int, Any], dict[str, float]]
GPU_FIGURES: dict[str, Measure] = {"memory": _memory, "utilization": _utilization, "power": _power}
WITHOUT_NVML: dict[str, Measure] = {"memory": _own_memory}
