"""Clean-up after a dead driver: its MLflow run, and the processes and folders of its own Ray."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from scaleray.checkpoints.storage import remove_parts
from scaleray.common.filesystems import lock
from scaleray.config.base import without_password
from scaleray.errors import first_line
from scaleray.launch.cluster.local_state import marked_processes
from scaleray.launch.cluster.worker_template import SOCKET
from scaleray.recording.store import mark_left_running

LOCK_S = 10.0
"""Seconds within which processes forked by the driver release the lock of the run's folder."""
GRACE_S = 5.0


@dataclass(frozen=True)
class LeftOpen:
    """The guard's facts about a driver's run.

    command: the user's command. folder: of the run, path or URI. hint: how to continue the run. uri: of MLflow, with
    its password. experiment: its name; or experiment_id: its id. key: of the run in MLflow; None before it can exist.
    ray: see `driver_guard.note_ray`."""

    command: str
    folder: str
    hint: str
    uri: str
    experiment: str
    experiment_id: str | None = None
    key: str | None = None
    ray: Mapping[str, Any] = field(default_factory=dict)

    def close(self, ended: str) -> None:
        """End remaining processes, mark the run FAILED, and print one message. ended: Ray process that ended first."""
        end_processes(self.ray.get("folder"), self.ray.get("logs"))
        reason = (
            f"{ended} of its own Ray ended, and with it the driver"
            if ended
            else "its process ended without a message (SIGKILL, out of memory, or the end of its Ray)"
        )
        is_continued = not self._is_free()
        marked = ""
        if is_continued:
            marked = "; another process continues the run"
        elif self.key is not None:
            try:
                is_marked = mark_left_running(
                    self.uri,
                    self.key,
                    status="FAILED",
                    reason=reason,
                    experiment=self.experiment,
                    experiment_id=self.experiment_id,
                )
                marked = "; its MLflow run is marked FAILED" if is_marked else ""
            except Exception as exc:  # mlflow, its HTTP client and its database drivers share no base class
                marked = f"; its MLflow run could not be marked FAILED: {first_line(exc)}"
        if not is_continued and "://" not in self.folder:
            remove_parts(self.folder)
        lines = [f"RunFailedError: {self.command} ended before it was done: {reason}{marked}"]
        if self.ray.get("logs"):
            lines.append(f"  Ray's logs: {self.ray['logs']}")
        if self.key is not None and not is_continued:
            lines.append(f"  to continue: {without_password(self.hint)}")
        with contextlib.suppress(OSError):
            print("\n".join(lines), file=sys.stderr, flush=True)

    def _is_free(self) -> bool:
        """Whether no process is writing to the run's folder."""
        if not os.path.exists(lock_file := f"{self.folder}/.lock"):
            return True
        deadline = time.monotonic() + LOCK_S
        while True:
            with contextlib.suppress(OSError), open(lock_file, "a") as file:
                if lock(file):
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)


def end_processes(folder: str | None, logs: str | None = None) -> None:
    """End all processes of the Ray whose template listens in this folder, and remove the folder. logs: folder of their
    logs."""
    if folder is None:
        return
    mark = str(Path(folder, "template"))
    deadline = time.monotonic() + GRACE_S
    while left := marked_processes(SOCKET, mark) | _writing_to(logs):
        for process in left:
            with contextlib.suppress(psutil.Error):
                (process.terminate if time.monotonic() < deadline else process.kill)()
        psutil.wait_procs(left, timeout=GRACE_S)
        if time.monotonic() > deadline + GRACE_S:
            break
    shutil.rmtree(folder, ignore_errors=True)


def _writing_to(logs: str | None) -> set[psutil.Process]:
    """Agents and workers that write to this folder. Their titles overwrite their environments, and once their raylet
    has ended, no ancestor identifies them."""
    found, log_folder = set(), f"{os.path.realpath(logs)}/" if logs else ""
    for process in psutil.process_iter() if logs else ():
        with contextlib.suppress(psutil.Error, OSError):
            is_rays = process.name().startswith("ray::")
            if is_rays and any(file.path.startswith(log_folder) for file in process.open_files()):
                found.add(process)
    return found
