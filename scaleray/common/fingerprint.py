"""Fingerprint of a result's environment: code, packages, hardware, drivers. GIT_COMMIT is the only environment variable
stored."""

import hashlib
import importlib.metadata
import json
import platform
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch

from scaleray.common import nvml
from scaleray.common.git_state import git_state
from scaleray.common.progress import stage

PACKAGES = ("scaleray", "torch", "ray", "mlflow", "mlflow-skinny", "numpy", "pyarrow", "pydantic")


def environment(folder: str | Path = ".") -> dict[str, Any]:
    """Facts about this machine and the code. folder: where to query git."""
    with stage("recording code, packages and hardware"):
        return {
            "git": git_state(Path(folder)),
            "python": platform.python_version(),
            "packages": package_versions(),
            "os": platform.platform(),
            "cpu": {"model": cpu_model(), "cores": psutil.cpu_count(logical=False), "threads": psutil.cpu_count()},
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "accelerators": accelerators(),
        }


def environment_hash(facts: dict[str, Any]) -> str:
    """SHA-256 (16 hex digits) of the facts: measurements with the same hash may share a curve."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def package_versions() -> dict[str, str]:
    """Versions of the packages that can affect a result."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Platform of a worker: CPU, GPUs with their drivers, kernel, and torch."""
    return {
        "cpu": cpu_model(),
        "accelerators": accelerators(),
        "os": platform.platform(),
        "torch": package_versions().get("torch"),
    }


@lru_cache
def cpu_model() -> str:
    """The CPU's name as the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def accelerators() -> dict[str, Any]:
    """GPUs with their driver, CUDA, cuDNN and NCCL versions and their interconnect; {} without GPUs."""
    if not torch.cuda.is_available():
        return {}
    facts: dict[str, Any] = {
        "names": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
    try:
        driver = nvml.opened()
        facts["driver"] = driver.nvmlSystemGetDriverVersion()
        links = nvml.num_nvlinks(driver, driver.nvmlDeviceGetHandleByIndex(0))
        facts["interconnect"] = f"NVLink x{links}" if links else "PCIe"
    except Exception as exc:  # a driver too old for NVML must not stop a run; the record shows what is missing
        facts["nvml_error"] = str(exc)
    return facts
