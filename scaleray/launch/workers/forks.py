"""The process from which gloo processes are forked. It imports their modules once, since torch alone takes seconds.

This module has no slow imports, so a command can start the process before anything else."""

import contextlib
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from typing import Any

from scaleray.common.own_folder import keep_compiled_code_here

PRELOADED = (
    "scaleray.verification.variants",
    "scaleray.studies.measure_sizes",
    "scaleray.verification.interrupted_runs",
)
"""Modules that the processes use."""
OF_A_CHECK = PRELOADED[:1]


def begin_imports(modules: Sequence[str] = PRELOADED) -> None:
    """Start that process and its imports in the background; does nothing if it is running."""
    keep_compiled_code_here()
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
    with without_main():
        forkserver.ensure_running()


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Context in which processes start without the main script, which they would execute from its beginning. They
    receive its definitions by value."""
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {name: main.__dict__[name] for name in ("__file__", "__spec__") if name in main.__dict__}
    try:
        main.__dict__.pop("__file__", None)
        main.__spec__ = None
        yield
    finally:
        main.__dict__.update(hidden)
