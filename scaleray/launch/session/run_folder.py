"""The folder of one run, local or in a bucket: reserve it before anything starts, or reopen it to continue a run."""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.storage import Store
from scaleray.common.filesystems import lock, open_filesystem
from scaleray.config import RunConfig
from scaleray.errors import ConfigError, StorageError
from scaleray.records.hangs import HANGS

_LOCKS: dict[str, IO[str]] = {}


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    name: the run's name. path: local path or URI. work_dir: local folder, either the same or one to upload from."""

    name: str
    path: str
    work_dir: str

    @classmethod
    def reserve(cls, config: RunConfig, default_name: str | None = None) -> RunFolder:
        """Create the folder, which proves that it is writable. Raises StorageError.

        default_name: name if the user gave none; None: a training's default. Raises ConfigError for a name in use,
        under which Ray Train would silently resume the old run."""
        import pyarrow.fs

        name = (
            config.tracking.run_name
            or default_name
            or unique_name(f"{config.workload.stem}-w{config.scale.max_workers:03d}-b{config.batch.global_size}")
        )
        root = config.checkpoint.storage_path
        path = f"{root.rstrip('/')}/{name}"
        try:
            filesystem, inner = open_filesystem(path)
            exists = filesystem.get_file_info(inner).type != pyarrow.fs.FileType.NotFound
            # killed before it had made anything of its own: nobody could continue it
            exists = exists and any(name not in (".lock", "ray_train", HANGS) for name in Store(path).names())
            copies = config.checkpoint.copy_path and Catalog.of_run(path, config.checkpoint.copy_path).stores[1].names()
            if not exists and not copies:
                filesystem.create_dir(inner, recursive=True)
                with filesystem.open_output_stream(f"{inner}/.writable") as probe:
                    probe.write(b"1")
                filesystem.delete_file(f"{inner}/.writable")
        except (OSError, ValueError) as exc:
            raise StorageError(
                "checkpoint.storage_path",
                root,
                f"it cannot be written: {exc}",
                "choose another folder or bucket, or fix its permissions",
            ) from exc
        if copies and not exists:
            raise ConfigError(
                "checkpoint.copy_path",
                config.checkpoint.copy_path,
                f"it has checkpoints of another run called {name}",
                "choose another name or path, or remove them",
            )
        if exists:
            raise ConfigError(
                "tracking.run_name",
                name,
                f"{path} exists already",
                f"continue that run with --resume {path}, choose another name, or leave it out for a unique one",
            )
        return cls(name, path, _work_dir(path))._locked()

    @classmethod
    def reopen(cls, path: str) -> RunFolder:
        """The folder of an interrupted run. Raises StorageError while another process is writing to it."""
        name = path.partition("?")[0].rstrip("/").rpartition("/")[2]
        return cls(name, path, _work_dir(path))._locked()

    def _locked(self) -> RunFolder:
        """Lock the folder for as long as this process lives. Only a local folder can be locked."""
        if self.is_local:
            file = open(f"{self.path}/.lock", "w")  # noqa: SIM115 - the kernel frees it when the process is gone
            try:
                is_ours = lock(file)
            except OSError as exc:
                is_ours = True
                text = "%s cannot be locked (%s): do not start a second process that writes to this run"
                logging.getLogger(__name__).warning(text, self.path, exc.strerror)
            if not is_ours:
                file.close()
                raise StorageError.problem(
                    f"the run folder {self.path}", "is in use by another process", "wait until that process has ended"
                )
            _LOCKS[self.path] = file
        return self

    def unlock(self) -> None:
        """Release the lock, so that another process may continue this run."""
        file = _LOCKS.pop(self.path, None)
        if file is not None:
            file.close()

    @property
    def is_local(self) -> bool:
        """Whether the folder is on this machine rather than in a bucket."""
        return self.path == self.work_dir

    def local(self, names: Sequence[str]) -> list[str]:
        """Local files of the run folder, as MLflow requires; for a bucket, they exist only until `complete`."""
        if self.is_local:
            return [f"{self.path}/{name}" for name in names]
        fetched = Store(self._fetched)
        for name in names:
            fetched.copy_from(Store(self.path), name)
        return [f"{self._fetched}/{name}" for name in names]

    @property
    def _fetched(self) -> str:
        return f"{self.work_dir}-fetched"  # beside what will be uploaded

    def complete(self) -> None:
        """Upload files that were written locally; does nothing for a local folder."""
        if self.is_local:
            return
        import pyarrow.fs

        filesystem, inner = open_filesystem(self.path)
        pyarrow.fs.copy_files(self.work_dir, inner, destination_filesystem=filesystem)
        for folder in (self.work_dir, self._fetched):
            shutil.rmtree(folder, ignore_errors=True)

    def remove_if_empty(self) -> None:
        """Remove an unused local folder; files of a failed run are kept."""
        if self.is_local:
            with contextlib.suppress(OSError):
                if {entry.name for entry in Path(self.path).iterdir()} <= {".lock"}:
                    Path(self.path, ".lock").unlink(missing_ok=True)
                    Path(self.path).rmdir()  # not if a file has come meanwhile

    def remove_without_checkpoints(self) -> bool:
        """Remove a folder in which nothing was trained. If it holds a checkpoint, keep it and return False."""
        if Catalog.of_run(self.path).newest() is not None:
            return False
        parent, _, name = self.path.rstrip("/").rpartition("/")
        Store(parent).delete_folder(name)
        return True


def unique_name(start: str) -> str:
    """Unique name: the given prefix, the time and some random digits."""
    return f"{start}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _work_dir(path: str) -> str:
    return path if "://" not in path else tempfile.mkdtemp(prefix="scaleray-")
