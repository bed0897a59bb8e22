"""Filter for messages of torchao on stderr that need no action by the user, by their text.

transformers and peft import torchao wherever it is installed, in every process. It then reports each of its compiled
libraries that cannot be loaded, such as those for CUDA with a CPU build of torch, and torch warns torchao's authors
that one of their calls is deprecated. Used before a workload or an optional library is imported.
"""

import logging
import sys

OF_ANOTHER_PYTHON = ".cpython-"
"""Text before the version in the name of a library compiled for only one version of Python."""


def leave_out_idle_warnings() -> None:
    """Add the filters to two loggers. Imports nothing, and may be called repeatedly."""
    for name, is_wanted in (("torchao", _of_torchao), ("torch.utils._pytree", _of_pytree)):
        logging.getLogger(name).addFilter(is_wanted)  # an existing filter is not added again


def _of_torchao(record: logging.LogRecord) -> bool:
    """Whether to show a record of torchao: not for a library that no process with this Python and torch could load."""
    text = record.getMessage()
    if not text.startswith("Failed to load ") or ".so" not in text:
        return True
    name = text.removeprefix("Failed to load ").partition(".so")[0]
    is_foreign = OF_ANOTHER_PYTHON in name and f".{sys.implementation.cache_tag}" not in name
    return not is_foreign and not _is_cpu_build()


def _of_pytree(record: logging.LogRecord) -> bool:
    """Whether to show a record of torch's pytree: not for a call by torchao that torch will remove."""
    kind = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return not str(getattr(kind, "__module__", "")).startswith("torchao.")


def _is_cpu_build() -> bool:
    """Whether torch, if imported, was built without CUDA and ROCm: it cannot use compiled kernels."""
    version = getattr(sys.modules.get("torch"), "version", None)
    return version is not None and version.cuda is None and getattr(version, "hip", None) is None
