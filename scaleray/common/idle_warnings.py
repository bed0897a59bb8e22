"""Filter for messages on stderr about torchao that need no action by the user, recognised by their text.

transformers and peft import torchao in every process if it is installed. It then reports each of its compiled libraries
that cannot be loaded, such as those for CUDA with a CPU build of torch, and torch warns torchao's authors that one of
their calls is deprecated. The filter is added before a workload or an optional library is imported.
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
    """Whether to show torchao's log record: not for a library that no process with this Python and torch can load."""
    text = record.getMessage()
    if not text.startswith("Failed to load ") or ".so" not in text:
        return True
    name = text.removeprefix("Failed to load ").partition(".so")[0]
    is_foreign = OF_ANOTHER_PYTHON in name and f".{sys.implementation.cache_tag}" not in name
    return not is_foreign and not _is_cpu_build()


def _of_pytree(record: logging.LogRecord) -> bool:
    """Whether to show a log record of torch's pytree; False for torchao's call of a deprecated function."""
    kind = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return not str(getattr(kind, "__module__", "")).startswith("torchao.")


def _is_cpu_build() -> bool:
    """Whether torch is imported and was built without CUDA and ROCm, so that it cannot use compiled kernels."""
    version = getattr(sys.modules.get("torch"), "version", None)
    return version is not None and version.cuda is None and getattr(version, "hip", None) is None
