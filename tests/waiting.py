"""Wait for a condition instead of a time, so that tests pass on a loaded machine."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(is_so: Callable[[], object], *, seconds: float = 600) -> None:
    """Poll until the condition holds, or fail: nothing else tells of what another thread or process does."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"it did not happen in {seconds:g} s"
        time.sleep(0.02)
