"""Open NVIDIA's driver through NVML, and query facts that several modules need."""

from typing import Any


def opened() -> Any:
    """Return the module `pynvml` with an open driver. May raise any type of error if no driver answers."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def name_of(nvml: Any, handle: Any) -> str:
    """Name of a GPU; older versions of `pynvml` return bytes."""
    name: str | bytes = nvml.nvmlDeviceGetName(handle)
    return name.decode() if isinstance(name, bytes) else name


def num_nvlinks(nvml: Any, handle: Any) -> int:
    """Number of active NVLinks of a GPU, counted up to its first missing link."""
    active = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
        except nvml.NVMLError:
            break
    return active
