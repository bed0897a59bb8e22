"""Checks of one node, made by a process on it: an actor on each node of a Ray cluster, or this process."""

import contextlib
import os
import platform
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from scaleray.clusters.doctor import storage_checks
from scaleray.clusters.doctor.measure import Seats, matmul_rate, measure_links
from scaleray.clusters.preflight.version_checks import WATCHED
from scaleray.clusters.submit.package_versions import Versions
from scaleray.common import nvml
from scaleray.errors import TrackingError
from scaleray.recording.store import check_reachable
from scaleray.records.doctor_record import AllReduceTime, DeviceRate, DiskSeen, GpuSeen, Links, NodeSeen
from scaleray.training.setup.stores import OwnedStore, StorePlace, open_store

LIMITS = {"nofile": "RLIMIT_NOFILE", "nproc": "RLIMIT_NPROC", "memlock": "RLIMIT_MEMLOCK"}
BOOT_ID, PORT_RANGE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/sys/net/ipv4/ip_local_port_range")
RDMA_DEVICES, SHARED_MEMORY = Path("/sys/class/infiniband"), Path("/dev/shm")


def facts_of_this_node(name: str, places: Mapping[str, str]) -> NodeSeen:
    """Return facts about this process's node. places: folders whose disks are checked, by their use in a training."""
    import torch

    from scaleray.common.fingerprint import accelerators

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
    """Limits of this process by name, None if unlimited; limits that the system lacks are omitted."""
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
    """Free space at a folder that exists or could be created; None for a bucket."""
    if "://" in path:
        return None
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return DiskSeen(use=use, path=path, free_bytes=usage.free, total_bytes=usage.total)


def gpus_here() -> list[GpuSeen]:
    """Return all GPUs of the node that NVIDIA's driver reports, regardless of CUDA_VISIBLE_DEVICES; empty if none."""
    try:
        driver = nvml.opened()
        return [_gpu(driver, index) for index in range(driver.nvmlDeviceGetCount())]
    except Exception:  # no driver, or one that fails
        return []


def _gpu(driver: Any, index: int) -> GpuSeen:
    handle = driver.nvmlDeviceGetHandleByIndex(index)
    memory = used = utilisation = None
    processes: list[str] = []
    # each of these may fail separately: slices of a GPU and virtual GPUs support only some
    with contextlib.suppress(driver.NVMLError):
        about = driver.nvmlDeviceGetMemoryInfo(handle)
        memory, used = about.total, about.used
    with contextlib.suppress(driver.NVMLError):
        utilisation = driver.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    with contextlib.suppress(driver.NVMLError):
        running = [process.pid for process in driver.nvmlDeviceGetComputeRunningProcesses(handle)]
        processes = [_process(pid) for pid in running if pid != os.getpid()]
    return GpuSeen(
        index=index,
        name=nvml.name_of(driver, handle),
        memory_bytes=memory,
        used_bytes=used,
        utilisation=utilisation,
        processes=processes,
        num_nvlinks=nvml.num_nvlinks(driver, handle),
    )


def _process(pid: int) -> str:
    try:
        return f"{psutil.Process(pid).name()} ({pid})"
    except psutil.Error:  # a process in another container, not visible from here
        return f"a process ({pid})"


def _ports(text: str) -> int | None:
    words = text.split()
    return int(words[1]) - int(words[0]) + 1 if len(words) == 2 else None


def _text_of(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


CONNECT_S = 3.0
MOST_AT_ONCE = 64


class Listener:
    """A port of this node that accepts connections and closes them immediately."""

    def __init__(self, host: str) -> None:
        """host: address of this node for other nodes."""
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.place: tuple[str, int] = (host, self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="scaleray-doctor-port", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        # accept() in the thread would otherwise hold the port until the next connection
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError:
                return


def unreachable(places: Mapping[str, tuple[str, int]]) -> list[str]:
    """Names of the addresses that do not accept a connection from here."""

    def is_open(place: tuple[str, int]) -> bool:
        try:
            socket.create_connection(place, timeout=CONNECT_S).close()
        except OSError:
            return False
        return True

    if not places:
        return []
    with ThreadPoolExecutor(min(MOST_AT_ONCE, len(places))) as pool:
        opened = pool.map(is_open, places.values())
    return [name for name, found in zip(places, opened, strict=True) if not found]


@dataclass(frozen=True)
class Asked:
    """What to check on every node. places: folders, by what a training stores there. tracking_uri: of a server that
    every node should reach; None checks no server.
    """

    places: Mapping[str, str]
    tracking_uri: str | None = None


class NodeInspector:
    """Methods that are called on one node. `name`: its name; `host`: its address for others."""

    def __init__(self, name: str, host: str) -> None:
        self.name, self.host = name, host
        self._listener: Listener | None = None
        self._store: OwnedStore | None = None

    def clock(self) -> float:
        """Return the time of this node's clock."""
        return time.time()

    def facts(self, asked: Asked) -> NodeSeen:
        """Return the facts of the node."""
        import dataclasses

        return dataclasses.replace(
            facts_of_this_node(self.name, asked.places), mlflow_error=_mlflow_error(asked.tracking_uri)
        )

    def listen(self) -> tuple[str, int]:
        """Open a port that other nodes try to reach, until `stop_listening`."""
        self._listener = Listener(self.host)
        return self._listener.place

    def stop_listening(self) -> None:
        """Close the port."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def unreachable(self, places: Mapping[str, tuple[str, int]]) -> list[str]:
        """Names of the other nodes whose ports cannot be reached from here."""
        return unreachable({name: place for name, place in places.items() if name != self.name})

    def write(self, folder: str, file: str) -> storage_checks.Written:
        """Write a file to the storage."""
        return storage_checks.write_file(folder, file)

    def read(self, folder: str, contents: Mapping[str, storage_checks.Content]) -> storage_checks.FilesRead:
        """Find and read files in the storage."""
        return storage_checks.read_files(folder, contents)

    def remove(self, folder: str) -> None:
        """Remove a folder from the storage."""
        storage_checks.remove_folder(folder)

    def matmuls(self, num_gpus: int) -> list[DeviceRate]:
        """Rates of matrix products on each GPU, one after another, or on one CPU core without GPUs."""
        return [matmul_rate(self.name, index) for index in (range(num_gpus) if num_gpus else [None])]

    def open_store(self) -> StorePlace:
        """Open a rendezvous port until all ranks have joined."""
        self._store = OwnedStore(self.host)
        return self._store.place

    def links(self, rank: int, seats: Seats, place: StorePlace, timeout_s: float) -> tuple[list[AllReduceTime], Links]:
        """Take part in measuring links, as a rank of a process group that ends with this call."""
        import os

        import torch.distributed as dist

        from scaleray.training.process_group import interface_of

        if (interface := interface_of(self.host)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        limit = timedelta(seconds=timeout_s)
        store = open_store(place, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=seats.num_ranks, timeout=limit)
        try:
            return measure_links(rank, seats)
        finally:
            dist.destroy_process_group()


def _mlflow_error(uri: str | None) -> str | None:
    if uri is None:
        return None
    try:
        check_reachable(uri)
    except TrackingError as exc:
        return f"{exc.what} {exc.allowed}"
    return ""
