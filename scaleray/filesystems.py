"""The filesystem that a path or a URI is on, through pyarrow, which Ray uses too."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

SHARED = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "gpfs",
    "ceph",
    "beegfs",
    "glusterfs",
    "fuse.glusterfs",
    "fuse.sshfs",
}
"""Types of filesystem, as the kernel names them, that several machines write at once."""


def open_filesystem(path: str) -> tuple[Any, str]:
    """The filesystem of an absolute path or a URI such as s3://bucket/prefix, and the path within it.

    Raises OSError, or ValueError for a URI of an unknown kind.
    """
    import pyarrow.fs

    if "://" not in path:  # not from_uri, which would take a '?' or '%20' in a path for its own
        return pyarrow.fs.LocalFileSystem(), path.rstrip("/")
    return pyarrow.fs.FileSystem.from_uri(path.replace(" ", "%20"))  # a folder's name may have one, a URI may not


def shared_filesystem(path: Path) -> str:
    """Type of the network filesystem that a path is on, such as nfs4; empty if it is on a disk of this machine."""
    import psutil

    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    kind = next((mounts[place] for place in [path, *path.parents] if place in mounts), "")
    return kind if kind in SHARED else ""


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a local file whole or not at all: an interrupted writer leaves the old file. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    part.replace(path)


def set_aside(folder: Path) -> Path | None:
    """Rename a folder to the first free one of `NAME.before-1`, `NAME.before-2`, ...; None if there is no folder."""
    if not folder.is_dir():
        return None
    names = (folder.with_name(f"{folder.name}.before-{number}") for number in itertools.count(1))
    return folder.rename(next(name for name in names if not name.exists()))
