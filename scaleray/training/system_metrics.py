"""Utilisation of this node, under the names that MLflow itself uses for system metrics."""

from __future__ import annotations

import psutil
import torch


class SystemMetrics:
    """Samples CPU, memory, disk, network and GPUs. Rates are since the previous sample."""

    def __init__(self) -> None:
        psutil.cpu_percent()  # the first call only starts the interval
        self._network = psutil.net_io_counters()

    def sample(self) -> dict[str, float]:
        """Percentages, and megabytes as MLflow counts them (10^6)."""
        memory, disk, network = psutil.virtual_memory(), psutil.disk_usage("/"), psutil.net_io_counters()
        found = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": memory.percent,
            "disk_usage_percentage": disk.percent,
        }
        if network is not None and self._network is not None:
            found["network_receive_megabytes"] = (network.bytes_recv - self._network.bytes_recv) / 1e6
            found["network_transmit_megabytes"] = (network.bytes_sent - self._network.bytes_sent) / 1e6
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                found.update(_gpu(index))
        return found


def _gpu(index: int) -> dict[str, float]:
    free, total = torch.cuda.mem_get_info(index)
    found = {
        f"gpu_{index}_memory_usage_megabytes": (total - free) / 1e6,
        f"gpu_{index}_memory_usage_percentage": 100 * (total - free) / total,
    }
    try:
        found[f"gpu_{index}_utilization_percentage"] = float(torch.cuda.utilization(index))
        found[f"gpu_{index}_power_usage_watts"] = torch.cuda.power_draw(index) / 1000
    except (RuntimeError, ModuleNotFoundError):  # no NVML for this driver: the other figures stay
        pass
    return found
