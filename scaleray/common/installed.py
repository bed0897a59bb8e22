"""Report required libraries that are missing or newer than the tested ones, and import optional ones on use."""

import functools
import importlib
import importlib.metadata
import importlib.util
import json
import re
import urllib.parse
from collections.abc import Callable
from types import ModuleType
from typing import ParamSpec, TypeVar

from scaleray.common.idle_warnings import leave_out_idle_warnings
from scaleray.errors import UsageError, WorkloadError, first_line

P = ParamSpec("P")
R = TypeVar("R")
OF_TRAIN = (
    "cloudpickle",
    "grpc",
    "mlflow",
    "pandas",
    "pathspec",
    "prometheus_client",
    "pyarrow",
    "ray",
    "safetensors",
    "torch",
    "xxhash",
)
"""Modules that only the extra `train` installs; without extras, only plan and config work."""
OF_REPORTS = ("matplotlib", "scipy")
"""Modules of the extra `reports`, for report and compare; `train` includes this extra."""
NEWEST_TESTED = {"torch": "2.13", "ray": "2.60", "mlflow": "3.17"}
"""Newest releases with which all tests passed."""


def install_command(extra: str) -> str:
    """Command that installs an extra from where scaleray itself came: a clone, a wheel, or else a package index."""
    return f"pip install '{_source()}[{extra}]'"


def _source() -> str:
    """Folder or file from which scaleray was installed; its name if it came from an index."""
    try:
        text = importlib.metadata.distribution("scaleray").read_text("direct_url.json")
        address = urllib.parse.urlsplit(json.loads(text)["url"]) if text else None
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError):
        return "."
    if address is None:
        return "scaleray"
    return urllib.parse.unquote(address.path) if address.scheme == "file" else f"scaleray @ {address.geturl()}"


def missing_library(error: ModuleNotFoundError) -> UsageError | None:
    """Error for a failed import of a library of the extra `train` or `reports`; None for any other."""
    root = (error.name or "").partition(".")[0]
    if root not in (*OF_TRAIN, *OF_REPORTS) or importlib.util.find_spec(root) is not None:
        return None
    extra = "train" if root in OF_TRAIN else "reports"
    return UsageError(f"the library {root}", None, "this needs it", install_command(extra))


def names_what_is_missing(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise UsageError if a library of `train` or `reports` is not installed."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ModuleNotFoundError as exc:
            missing = missing_library(exc)
            if missing is None:
                raise
            raise missing from exc

    return wrapped


def newer_than_tested() -> list[str]:
    """One sentence for each library that is newer than any tested version."""
    found = []
    for name, newest in NEWEST_TESTED.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if _numbers(version)[:2] > _numbers(newest):
            found.append(f"{name} {version} is newer than {newest}, the newest version tested with scaleray")
    return found


def is_tested(name: str) -> bool:
    """Whether the installed release of a library, ignoring its last number, is the newest tested one."""
    return _numbers(importlib.metadata.version(name))[:2] == _numbers(NEWEST_TESTED[name])


def _numbers(version: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", version)]


def library(name: str, *, extra: str, wanted_by: str) -> ModuleType:
    """Import an optional library or one of its modules. wanted_by: the feature that needs it, as described to the user.

    Raises WorkloadError, with the extra to install, if the library is missing or cannot be loaded.
    """
    root = name.partition(".")[0]
    install = install_command(extra)
    leave_out_idle_warnings()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and exc.name.partition(".")[0] == root:
            raise WorkloadError(f"the library {root}", "not installed", f"{wanted_by} needs it", install) from exc
        found = f"not usable ({first_line(exc)})"
        raise WorkloadError(f"the library {root}", found, f"{wanted_by} needs it", install) from exc
    except (ImportError, RuntimeError, OSError) as exc:  # compiled parts that were built for another torch
        found = f"not usable ({first_line(exc)})"
        hint = f"{install}; its version and its build (CPU or CUDA) must match torch"
        raise WorkloadError(f"the library {root}", found, f"{wanted_by} needs it", hint) from exc
