"""This machine as a cluster of one node: its GPUs by the driver, or its processors where there is none."""

from __future__ import annotations

import psutil

from scaleray.errors import ClusterError
from scaleray.planner.hardware import Catalogue, Cluster, Gpu

GIB = 2.0**30


def this_machine(catalogue: Catalogue) -> Cluster:
    """GPUs of one kind with their link, as the driver sees them. Raises ClusterError where they differ."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as exc:  # no driver, or none that answers: the processors are what there is
        return _processors(catalogue, f"no NVIDIA driver answered ({type(exc).__name__})")
    count = pynvml.nvmlDeviceGetCount()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    if not handles:
        return _processors(catalogue, "the driver has no GPU")
    names = [_text(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    if len(set(names)) > 1:
        raise ClusterError(
            "GPUs here", ", ".join(sorted(set(names))), "they must be of one kind", "plan each kind with --cluster"
        )
    gpu = catalogue.find_gpu(names[0])
    joined = _num_nvlinks(pynvml, handles[0])
    # a card that could have NVLink and has none talks over PCIe
    link = gpu.link if joined or not gpu.link.startswith("nvlink") else "pcie4"
    notes = (f"{count} x {names[0]}, {joined} NVLinks each", "one node: other nodes of the cluster are not looked at")
    return Cluster(gpu=gpu, gpus_per_node=count, num_nodes=1, link=catalogue.find_link(link), network=None, notes=notes)


def _processors(catalogue: Catalogue, reason: str) -> Cluster:
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    known = catalogue.find_gpu("cpu")
    share = psutil.virtual_memory().total / GIB / cores
    core = Gpu(**{**known.__dict__, "memory_gib": share})
    notes = (f"{reason}: {cores} processor cores, whose rate is an order of magnitude only; measure with --step-time",)
    return Cluster(
        gpu=core, gpus_per_node=cores, num_nodes=1, link=catalogue.find_link(core.link), network=None, notes=notes
    )


def _num_nvlinks(pynvml, handle) -> int:  # type: ignore[no-untyped-def]
    active = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += bool(pynvml.nvmlDeviceGetNvLinkState(handle, link))
        except pynvml.NVMLError:
            break
    return active


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
