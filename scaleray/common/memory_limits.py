"""Memory that this process may use, by its machine and its container."""

from collections.abc import Iterator

import psutil

CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files with the memory limit and the memory use of a container, for both versions of Linux's control groups."""


def container_memory() -> Iterator[tuple[int, int]]:
    """Yield the memory limit and the memory use of this container in bytes, or nothing if there is no limit."""
    for limit, used in CGROUP_FILES:
        try:
            with open(limit) as most, open(used) as now:
                yield int(most.read()), int(now.read())
        except (OSError, ValueError):  # there is no such file, or no limit: "max"
            continue


def free_memory() -> int:
    """Bytes of memory that this process may still use."""
    return min([psutil.virtual_memory().available, *(limit - used for limit, used in container_memory())])
