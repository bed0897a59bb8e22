"""Optional libraries: imported on use, with the extra to install in the error if they are missing."""

import importlib
from types import ModuleType

from scaleray.common.idle_warnings import leave_out_idle_warnings
from scaleray.common.installed import install_command
from scaleray.errors import WorkloadError, first_line


def library(name: str, *, extra: str, wanted_by: str) -> ModuleType:
    """Import an optional library or a module of one. wanted_by: description, for the user, of the feature that needs
    it.

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
        hint = f"{install}; its version and its build (CPU or CUDA) must be those of torch"
        raise WorkloadError(f"the library {root}", found, f"{wanted_by} needs it", hint) from exc
