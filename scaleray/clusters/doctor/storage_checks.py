"""Check whether the storage of runs is shared, and its speed, by writing files and reading those of other nodes."""

import contextlib
import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scaleray.common.filesystems import open_filesystem
from scaleray.errors import first_line

PIECE_BYTES = 16 * 2**20
MOST_BYTES = 64 * 2**20
WRITE_S = 1.5
"""Seconds after which writing stops, enough to recognise slow storage."""
APPEARS_WITHIN_S = 5.0
"""Seconds within which other nodes must see a file."""
MOST_READ = 3
"""Number of other nodes' files that a node reads; it only checks the existence of the rest."""
Content = tuple[int, str]
"""Bytes of a file, and the SHA-256 of its content."""


@dataclass(frozen=True)
class Written:
    """File that a node wrote. error: reason why it could not write."""

    content: Content = (0, "")
    bytes_per_s: float | None = None
    error: str = ""


@dataclass(frozen=True)
class FilesRead:
    """Other nodes' files, as a node found them. missing: names of files that are absent or have wrong content."""

    missing: tuple[str, ...] = ()
    bytes_per_s: float | None = None


def write_file(folder: str, name: str) -> Written:
    """Write a file large enough to measure the rate, and flush it to disk."""
    try:
        filesystem, inner = open_filesystem(folder)
        filesystem.create_dir(inner, recursive=True)
        path, started = f"{inner}/{name}", time.perf_counter()
        digest, piece, size = hashlib.sha256(), os.urandom(PIECE_BYTES), 0
        with _opened(filesystem, path, "wb") as output:
            while size < MOST_BYTES and (not size or time.perf_counter() - started < WRITE_S):
                output.write(piece)
                digest.update(piece)
                size += len(piece)
                if "://" not in folder:
                    output.flush()
                    os.fsync(output.fileno())
        return Written((size, digest.hexdigest()), size / (time.perf_counter() - started))
    except Exception as exc:  # pyarrow raises errors of any type, depending on the URI
        return Written(error=f"cannot write there: {first_line(exc)}")


def read_files(folder: str, contents: Mapping[str, Content]) -> FilesRead:
    """Find these files, and read the content of the first few. contents: by name of the file."""
    filesystem, inner = open_filesystem(folder)
    missing, size, took = [], 0, 0.0
    for number, (name, content) in enumerate(contents.items()):
        if not _appears(filesystem, f"{inner}/{name}", content[0]):
            missing.append(name)
            continue
        if number < MOST_READ:
            is_same, seconds = _read(filesystem, f"{inner}/{name}", content, is_local="://" not in folder)
            missing += [] if is_same else [name]
            size, took = size + content[0], took + seconds
    return FilesRead(tuple(missing), size / took if took else None)


def remove_folder(folder: str) -> None:
    """Remove the folder with its contents, and its parent if empty."""
    with contextlib.suppress(Exception):  # nothing to remove if the storage cannot be written
        filesystem, inner = open_filesystem(folder)
        filesystem.delete_dir(inner)
        if "://" not in folder:
            os.rmdir(os.path.dirname(inner))


def _appears(filesystem: Any, path: str, size: int) -> bool:
    deadline = time.monotonic() + APPEARS_WITHIN_S
    while True:
        with contextlib.suppress(OSError):
            if filesystem.get_file_info(path).size == size:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def _read(filesystem: Any, path: str, content: Content, *, is_local: bool) -> tuple[bool, float]:
    """Whether a file has the right content, and the seconds that reading it took."""
    digest, took = hashlib.sha256(), 0.0
    try:
        with _opened(filesystem, path, "rb") as source:
            if is_local and hasattr(os, "posix_fadvise"):  # read from the storage, not from this node's page cache
                os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while True:
                started = time.perf_counter()
                piece = source.read(PIECE_BYTES)
                took += time.perf_counter() - started
                if not piece:
                    return digest.hexdigest() == content[1], took
                digest.update(piece)
    except OSError:
        return False, took


def _opened(filesystem: Any, path: str, mode: str) -> Any:
    """Open a file; on this machine with Python's own `open`, so that it can be flushed to disk."""
    if filesystem.type_name == "local":
        return open(path, mode, buffering=0)
    return filesystem.open_output_stream(path) if mode == "wb" else filesystem.open_input_stream(path)
