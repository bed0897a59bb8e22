"""NVIDIA's driver, opened by NVML at one place, with the facts that several readers need."""

from __future__ import annotations

from typing import Any


def opened() -> Any:
    """The module `pynvml` with the driver open. Raises without a driver that answers, an error of any kind."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def name_of(nvml: Any, handle: Any) -> str:
    """Name of a GPU; older versions of `pynvml` give bytes."""
    name: str | bytes = nvml.nvmlDeviceGetName(handle)
    return name.decode() if isinstance(name, bytes) else name


def num_nvlinks(nvml: Any, handle: Any) -> int:
    """Number of active NVLinks of a GPU; the first link that it does not have ends the count."""
    active = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
        except nvml.NVMLError:
            break
    return active
