"""Metrics of other programs that dashboards and rules query: Prometheus, Ray 2.60 and NVIDIA's DCGM.

Sources: Ray's own endpoint, and its dashboards in `ray/dashboard/modules/metrics`; `etc/dcp-metrics-included.csv` of
dcgm-exporter. Counters that the exporter omits by default are marked; `dashboards/dcgm_counters.csv` enables them."""

from dataclasses import dataclass
from typing import Literal

Source = Literal["Prometheus", "Ray", "Ray Data", "DCGM"]


@dataclass(frozen=True)
class ForeignMetric:
    """A metric of another program.

    kind: type in its source. node_label: label with the address of the measured node, if any."""

    name: str
    source: Source
    help: str
    kind: Literal["gauge", "counter"] = "gauge"
    node_label: str = ""
    is_on_by_default: bool = True


def _agent(name: str, help: str) -> ForeignMetric:
    """A metric published by Ray's agent on each node."""
    return ForeignMetric(f"ray_{name}", "Ray", help, node_label="ip")


def _ray(name: str, help: str) -> ForeignMetric:
    """A metric published by Ray's other processes."""
    return ForeignMetric(f"ray_{name}", "Ray", help, node_label="NodeAddress")


def _gpu(
    name: str, help: str, kind: Literal["gauge", "counter"] = "gauge", *, is_on_by_default: bool = True
) -> ForeignMetric:
    return ForeignMetric(f"DCGM_FI_{name}", "DCGM", help, kind, is_on_by_default=is_on_by_default)


UP = ForeignMetric("up", "Prometheus", "1 if the last scrape of a target succeeded")
ALERTS = ForeignMetric("ALERTS", "Prometheus", "1 for each alert that is pending or firing")

NODE_CPU = _agent("node_cpu_utilization", "use of all cores, in %")
NODE_MEMORY_USED = _agent("node_mem_used", "memory in use, in bytes; of the container if there is one")
NODE_MEMORY = _agent("node_mem_total", "memory of the node, in bytes; of the container if there is one")
NODE_DISK_FREE = _agent("node_disk_free", "free bytes of the disk of Ray's temporary folder")
NODE_DISK_USED = _agent("node_disk_usage", "bytes in use on the disk of Ray's temporary folder")
NODE_SENT = _agent("node_network_send_speed", "bytes sent per second over all interfaces")
NODE_RECEIVED = _agent("node_network_receive_speed", "bytes received per second over all interfaces")
NODES = ForeignMetric("ray_cluster_active_nodes", "Ray", "nodes that are alive, by type")
RESOURCES = _ray("resources", "logical resources by name and state (USED, AVAILABLE)")
TASKS = _ray("tasks", "tasks by state and name")
INFEASIBLE = _ray("internal_num_infeasible_scheduling_classes", "kinds of tasks that no node can ever run")
FAILED_STARTS = _ray("scheduler_failed_worker_startup_total", "worker processes that did not start, by reason")
OBJECT_STORE_USED = _ray("object_store_used_memory", "bytes of the object store in use")
OBJECT_STORE_FREE = _ray("object_store_available_memory", "bytes of the object store that are free")
SPILLED = _ray("spill_manager_objects_bytes", "bytes of objects on disk or being moved there, by state")
PROCESS_MEMORY = _agent("component_rss_bytes", "resident memory of Ray's processes, by component")

ITER_BLOCKED_S = ForeignMetric(
    "ray_data_iter_total_blocked_seconds", "Ray Data", "total seconds that training waited for batches, as a gauge"
)

GPU_ENGINE_ACTIVE = _gpu("PROF_GR_ENGINE_ACTIVE", "Ratio of time the graphics engine is active.")
GPU_TENSOR_ACTIVE = _gpu("PROF_PIPE_TENSOR_ACTIVE", "Ratio of cycles the tensor (HMMA) pipe is active.")
GPU_DRAM_ACTIVE = _gpu("PROF_DRAM_ACTIVE", "Ratio of cycles the device memory interface is active.")
GPU_SM_ACTIVE = _gpu(
    "PROF_SM_ACTIVE", "The ratio of cycles an SM has at least 1 warp assigned.", is_on_by_default=False
)
GPU_SENT = _gpu("PROF_PCIE_TX_BYTES", "The rate of data transmitted over the PCIe bus (in bytes per second).")
GPU_RECEIVED = _gpu("PROF_PCIE_RX_BYTES", "The rate of data received over the PCIe bus (in bytes per second).")
GPU_NVLINK = _gpu("DEV_NVLINK_BANDWIDTH_TOTAL", "Total number of NVLink bandwidth counters for all lanes.", "counter")
GPU_MEMORY_USED = _gpu("DEV_FB_USED", "Framebuffer memory used (in MiB).")
GPU_MEMORY_FREE = _gpu("DEV_FB_FREE", "Framebuffer memory free (in MiB).")
GPU_CLOCK = _gpu("DEV_SM_CLOCK", "SM clock frequency (in MHz).")
GPU_TEMPERATURE = _gpu("DEV_GPU_TEMP", "GPU temperature (in C).")
GPU_POWER = _gpu("DEV_POWER_USAGE", "Power draw (in W).")
GPU_ENERGY = _gpu("DEV_TOTAL_ENERGY_CONSUMPTION", "Total energy consumption since boot (in mJ).", "counter")
GPU_XID = _gpu("DEV_XID_ERRORS", "Value of the last XID error encountered.")
GPU_PCIE_REPLAYS = _gpu("DEV_PCIE_REPLAY_COUNTER", "Total number of PCIe retries.", "counter")
GPU_REMAPPED_ROWS = _gpu(
    "DEV_UNCORRECTABLE_REMAPPED_ROWS", "Number of remapped rows for uncorrectable errors.", "counter"
)
GPU_REMAP_FAILURE = _gpu("DEV_ROW_REMAP_FAILURE", "Whether remapping of rows has failed.")
GPU_ECC_DOUBLE_BIT = _gpu(
    "DEV_ECC_DBE_VOL_TOTAL", "Total number of double-bit volatile ECC errors.", "counter", is_on_by_default=False
)
NANOSECONDS = 1e9
"""Increase per second of a throttling counter while a GPU is throttled."""
GPU_THROTTLED = tuple(
    _gpu(f"DEV_{reason}_VIOLATION", f"Throttling duration due to {words} (in ns).", "counter", is_on_by_default=False)
    for reason, words in (
        ("POWER", "power constraints"),
        ("THERMAL", "thermal constraints"),
        ("SYNC_BOOST", "sync-boost constraints"),
        ("BOARD_LIMIT", "board limit constraints"),
        ("RELIABILITY", "reliability constraints"),
    )
)
GPU_LINK_ERRORS = tuple(
    _gpu(f"DEV_NVLINK_{kind}_ERROR_COUNT_TOTAL", f"Total number of NVLink {words}.", "counter", is_on_by_default=False)
    for kind, words in (
        ("CRC_FLIT", "flow-control CRC errors"),
        ("CRC_DATA", "data CRC errors"),
        ("REPLAY", "retries"),
        ("RECOVERY", "recovery errors"),
    )
)

ALL = tuple(value for value in list(globals().values()) if isinstance(value, ForeignMetric)) + (
    GPU_THROTTLED + GPU_LINK_ERRORS
)
OF_GPUS = tuple(metric for metric in ALL if metric.source == "DCGM")
