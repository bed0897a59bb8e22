"""Filesystems of paths and URIs, through pyarrow, as in Ray; atomic writes and locks of local files."""

import fcntl
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

SHARED = {
    "nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "ceph-fuse", "beegfs", "glusterfs", "sshfs", "juicefs",
    "s3fs", "gcsfuse", "virtiofs", "9p", "wekafs", "panfs",
}  # fmt: skip
"""Filesystem types, as the kernel names them, to which several machines can write concurrently."""


def open_filesystem(path: str) -> tuple[Any, str]:
    """Return the filesystem of an absolute path or a URI such as s3://bucket/prefix, and the path within it.

    Raises OSError, or ValueError for a URI with an unknown scheme.
    """
    import pyarrow.fs

    if "://" not in path:  # not from_uri, which would interpret a '?' or '%20' in a path
        return pyarrow.fs.LocalFileSystem(), path.rstrip("/")
    return pyarrow.fs.FileSystem.from_uri(path.replace(" ", "%20"))  # allowed in a folder's name, but not in a URI


def shared_filesystem(path: Path) -> str:
    """Type of the network filesystem of a path, such as nfs4; empty for a disk of this machine."""
    import psutil

    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    kind = next((mounts[mount] for mount in [path, *path.parents] if mount in mounts), "")
    return kind if kind.removeprefix("fuse.") in SHARED else ""


def is_shared(folder: Path) -> bool:
    """Whether other users are meant to read a local folder: the folder or its parent is writable by a group or belongs
    to another user, or it is on a network filesystem."""
    for directory in (folder, folder.parent):
        about = directory.stat()
        if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH | stat.S_ISGID) or about.st_uid != os.geteuid():
            return True
    return bool(shared_filesystem(folder))


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a local file atomically, so that an interrupted write leaves the old file. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # possibly another user's, left by a killed process
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    part.replace(path)


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files in and below a folder, including those of linked folders and excluding hidden ones."""
    above = {str(folder): [os.path.realpath(folder)]}
    for directory, folders, files in os.walk(folder, followlinks=True):
        within = above.pop(directory)
        folders[:] = [f for f in folders if not f.startswith(".")]
        for inner in list(folders):
            real = os.path.realpath(os.path.join(directory, inner))
            if real in within:
                folders.remove(inner)  # a link to a parent folder
            else:
                above[os.path.join(directory, inner)] = [*within, real]
        yield from (Path(directory, f) for f in files if not f.startswith("."))


def lock(file: IO[Any], *, waits: bool = False, is_shared: bool = False) -> bool:
    """Lock an open file until it is closed here and in the processes that inherit it. Return False if another process
    holds the lock. Raises OSError if the filesystem does not support locks.

    The file must be open for writing, since NFS rejects an exclusive lock otherwise. The library `filelock` is
    unsuitable: it reports a folder that rejects the lock as in use, waits for a file that a killed process left if the
    filesystem has no locks, and provides no file that a child can inherit.
    """
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind if waits else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(file: Path) -> bool:
    """Whether a process holds the lock on a file; False if that cannot be determined."""
    try:
        with file.open() as opened:
            return not lock(opened, is_shared=True)
    except OSError:
        return False


def unlock(file: IO[Any]) -> None:
    """Release the lock now, in every process that inherited the file."""
    fcntl.flock(file, fcntl.LOCK_UN)


def set_aside(folder: Path) -> Path | None:
    """Rename a folder to the first free one of `NAME.before-1`, `NAME.before-2`, ...; None if there is no folder."""
    if not folder.is_dir():
        return None
    names = (folder.with_name(f"{folder.name}.before-{number}") for number in itertools.count(1))
    return folder.rename(next(name for name in names if not name.exists()))
