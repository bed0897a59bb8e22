"""Memory that a worker uses, in bytes: resident memory of its process, and the peak of its device or process."""

import contextlib
import resource
from pathlib import Path

import torch


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_resident_bytes() -> int:
    """Peak resident memory of this process; `reset_peak` does not affect it."""
    # Linux counts the peak in KiB, and brings it up to date later than the present value
    return max(resident_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def counted_peak_bytes(device: torch.device) -> int:
    """Peak that the device's allocator or the system has counted so far. Reading it takes a few microseconds, a quarter
    of the time for reading the current memory as well."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_bytes(device: torch.device) -> int:
    """Peak of the memory allocated on a GPU, or of this process's resident memory on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return peak_resident_bytes()


def reset_peak(device: torch.device) -> None:
    """Reset the peak for `peak_since_reset`. Does nothing on a CPU whose system does not allow it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: sets VmHWM to the present resident memory


def peak_since_reset(device: torch.device) -> int:
    """Peak, since `reset_peak`, of the memory that `peak_bytes` measures."""
    if device.type != "cuda":
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    return peak_bytes(device)
