"""Facts of a node: versions, GPUs, limits of the system, room in memory and on disks. Starts nothing on a GPU."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from scaleray.launch.submit.versions import Versions
from scaleray.preflight.versions import WATCHED
from scaleray.records.preflight import DiskSeen, GpuSeen, NodeSeen

LIMITS = {"nofile": "RLIMIT_NOFILE", "nproc": "RLIMIT_NPROC", "memlock": "RLIMIT_MEMLOCK"}
BOOT_ID, PORT_RANGE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/sys/net/ipv4/ip_local_port_range")
RDMA_DEVICES, SHARED_MEMORY = Path("/sys/class/infiniband"), Path("/dev/shm")


def facts_of_this_node(name: str, places: Mapping[str, str]) -> NodeSeen:
    """The node of this process. places: folders whose disks are looked at, by what a training keeps there."""
    import torch

    from scaleray.reproducibility.fingerprint import accelerators

    versions = Versions.here()
    known = {part: str(value) for part, value in accelerators().items() if part in ("driver", "cuda", "cudnn", "nccl")}
    return NodeSeen(
        name=name,
        machine=_text_of(BOOT_ID),
        python=versions.python,
        packages={package: versions.packages[package] for package in WATCHED if package in versions.packages},
        accelerators=known,
        gpus=gpus_here(),
        torch_gpus=torch.cuda.device_count(),
        limits=limits_here(),
        has_rdma=RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir()),
        shm_bytes=shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else None,
        memory_bytes=psutil.virtual_memory().total,
        disks=[disk for use, path in places.items() if (disk := disk_of(use, path)) is not None],
        port_range=_ports(_text_of(PORT_RANGE)),
    )


def limits_here() -> dict[str, int | None]:
    """Limits of this process by name, None for unlimited; without those that the system does not know."""
    if platform.system() == "Windows":
        return {}
    import resource

    found: dict[str, int | None] = {}
    for name, constant in LIMITS.items():
        if hasattr(resource, constant):
            soft, _ = resource.getrlimit(getattr(resource, constant))
            found[name] = None if soft == resource.RLIM_INFINITY else soft
    return found


def disk_of(use: str, path: str) -> DiskSeen | None:
    """Room where a folder is or would be made; None for a bucket, which has no end."""
    if "://" in path:
        return None
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        usage = shutil.disk_usage(place)
    except OSError:
        return None
    return DiskSeen(use=use, path=path, free_bytes=usage.free, total_bytes=usage.total)


def gpus_here() -> list[GpuSeen]:
    """The GPUs as NVIDIA's driver shows them, all of the node, whatever CUDA_VISIBLE_DEVICES says; none without one."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no driver, or none that answers
        return []


def _gpu(pynvml: Any, index: int) -> GpuSeen:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    name = pynvml.nvmlDeviceGetName(handle)
    memory = used = utilisation = None
    processes: list[str] = []
    # each of these may be refused alone: slices of a card and virtual cards have some and not others
    with contextlib.suppress(pynvml.NVMLError):
        about = pynvml.nvmlDeviceGetMemoryInfo(handle)
        memory, used = about.total, about.used
    with contextlib.suppress(pynvml.NVMLError):
        utilisation = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    with contextlib.suppress(pynvml.NVMLError):
        running = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        processes = [_process(pid) for pid in running if pid != os.getpid()]
    return GpuSeen(
        index=index,
        name=name.decode() if isinstance(name, bytes) else name,
        memory_bytes=memory,
        used_bytes=used,
        utilisation=utilisation,
        processes=processes,
        num_nvlinks=_num_nvlinks(pynvml, handle),
    )


def _num_nvlinks(pynvml: Any, handle: Any) -> int:
    active = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += bool(pynvml.nvmlDeviceGetNvLinkState(handle, link))
        except pynvml.NVMLError:
            break
    return active


def _process(pid: int) -> str:
    try:
        return f"{psutil.Process(pid).name()} ({pid})"
    except psutil.Error:  # of another container, whose processes cannot be seen from here
        return f"a process ({pid})"


def _ports(text: str) -> int | None:
    words = text.split()
    return int(words[1]) - int(words[0]) + 1 if len(words) == 2 else None


def _text_of(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
