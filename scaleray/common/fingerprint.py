"""Fingerprint of what a result was measured on: code, packages, hardware, drivers.
No environment variable but GIT_COMMIT is stored."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch

from scaleray.common import nvml
from scaleray.common.progress import stage

LARGEST_HASHED_BYTES = 2**24  # larger files count by their size: data beside the code must not delay every start
PACKAGES = ("scaleray", "torch", "ray", "mlflow", "mlflow-skinny", "numpy", "pyarrow", "pydantic")


def environment(folder: str | Path = ".") -> dict[str, Any]:
    """Facts about this machine and this code; `folder` is the one that git is asked about."""
    with stage("taking down code, packages and hardware"):
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
    """SHA-256 (16 hex digits) of the facts: two measurements with the same hash may be on one curve."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def git_state(folder: Path) -> dict[str, Any]:
    """Commit of the checkout around `folder`, and a hash of what differs from it.

    Outside a checkout, as in a submitted job, it is the commit that GIT_COMMIT names, if that is set.
    """

    def git(*words: str) -> bytes:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=True, timeout=20).stdout

    try:
        commit = git("rev-parse", "HEAD").decode().strip()
        new_files = git("ls-files", "-z", "--others", "--exclude-standard").split(b"\0")
        difference = git("diff", "HEAD") + b"".join(_new_file(folder, name) for name in new_files if name)
    except (OSError, subprocess.SubprocessError):
        commit = os.environ.get("GIT_COMMIT", "")
        return {"commit": commit, "is_dirty": None, "diff_sha256": None} if commit else {}
    return {
        "commit": commit,
        "is_dirty": bool(difference),
        "diff_sha256": hashlib.sha256(difference).hexdigest() if difference else None,
    }


def _new_file(folder: Path, name: bytes) -> bytes:
    """Part of the difference that a file unknown to git adds: its name and a hash of its content, or its size if it is
    large."""
    path = folder / os.fsdecode(name)
    if not path.is_file():
        return name
    size = path.stat().st_size
    content = hashlib.sha256(path.read_bytes()).digest() if size <= LARGEST_HASHED_BYTES else str(size).encode()
    return name + b"\0" + content


def package_versions() -> dict[str, str]:
    """Versions of the packages that can change a result."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Platform of a worker: processor, GPUs with their drivers, kernel, and torch."""
    return {
        "cpu": cpu_model(),
        "accelerators": accelerators(),
        "os": platform.platform(),
        "torch": package_versions().get("torch"),
    }


@lru_cache
def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def accelerators() -> dict[str, Any]:
    """GPUs with driver, CUDA, cuDNN and NCCL versions and how they are linked; {} without any."""
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
    except Exception as exc:  # a driver too old for NVML must not stop a run; the record says what is missing
        facts["nvml_error"] = str(exc)
    return facts
