"""Checkpoint files in a local folder or a bucket, through pyarrow's filesystems, as in Ray Train."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

from scaleray.common.filesystems import is_shared, open_filesystem
from scaleray.config.base import without_password

PIECE_BYTES = 8 * 2**20  # bytes read, hashed and written at once


@dataclass(frozen=True)
class Entry:
    """A file in a store. changed_at: seconds since 1970."""

    name: str
    num_bytes: int
    changed_at: float


@dataclass(frozen=True)
class Store:
    """Files under one root: an absolute path or a URI such as s3://bucket/prefix. Names are relative, with '/'."""

    root: str

    def __post_init__(self) -> None:
        if self.root.startswith("file://"):  # like any local folder: files are renamed and flushed there as well
            object.__setattr__(self, "root", unquote(self.root.removeprefix("file://")))

    @cached_property
    def _location(self) -> tuple[Any, str]:
        return open_filesystem(self.root)

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root}  # an open filesystem cannot leave its process

    def __setstate__(self, state: dict[str, Any]) -> None:
        object.__setattr__(self, "root", state["root"])

    @property
    def is_local(self) -> bool:
        """Whether the files are in a folder of this machine (or one that is mounted like it)."""
        return "://" not in self.root

    def child(self, name: str) -> Store:
        """Return the store for a folder below the root. The query of a URI stays at its end."""
        base, mark, query = (self.root, "", "") if self.is_local else self.root.partition("?")
        return Store(f"{base.rstrip('/')}/{name}{mark}{query}")

    @property
    def name(self) -> str:
        """The last part of the root."""
        return (self.root if self.is_local else self.root.partition("?")[0]).rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> Store:
        """Return the store of the parent folder."""
        base, mark, query = (self.root, "", "") if self.is_local else self.root.partition("?")
        return Store(f"{base.rstrip('/').rpartition('/')[0]}{mark}{query}")

    def path(self, name: str) -> str:
        """Full path of a file for display, without a password."""
        return without_password(self.child(name).root)

    def write(self, name: str, pieces: Iterable[Any], *, known: str = "") -> tuple[str, int]:
        """Write buffers in sequence, and finally flush the file to the disk. Returns the SHA-256 of the whole in hex,
        and the number of bytes. known: the hash, if another store of this class has computed it.

        A local file appears once it is completely written, an object once its upload is complete. An existing file is
        replaced."""
        digest, length = hashlib.sha256(), 0
        with self.writing(name) as stream:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                for start in range(0, len(view), PIECE_BYTES):
                    part = view[start : start + PIECE_BYTES]
                    if not known:
                        digest.update(part)
                    stream.write(part)
                length += len(view)
        return known or digest.hexdigest(), length

    def write_text(self, name: str, text: str) -> None:
        """Write a small file."""
        self.write(name, [text.encode()])

    def write_record(self, name: str, text: str, address: str) -> None:
        """Write a small file that contains this tracking address. If it is the address of a server, only this user may
        read the file, unless the local folder is shared."""
        self.write_text(name, text)
        if self.is_local and address and not address.startswith("sqlite"):
            with contextlib.suppress(OSError):  # some mounted filesystems have no modes
                if not is_shared(Path(self.root)):
                    (Path(self.root) / name).chmod(0o600)

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises FileNotFoundError or another OSError."""
        with self.open(name) as stream:
            return stream.read()

    def open(self, name: str) -> Any:
        """Open a file for seeking and reading."""
        if self.is_local:
            return open(Path(self.root) / name, "rb")
        filesystem, root = self._location
        return filesystem.open_input_file(f"{root}/{name}")

    def digest(self, name: str) -> tuple[str, int]:
        """SHA-256 in hex and number of bytes of the file's current content."""
        digest, length = hashlib.sha256(), 0
        with self.open(name) as stream:
            while piece := stream.read(PIECE_BYTES):
                digest.update(piece)
                length += len(piece)
        return digest.hexdigest(), length

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """Fill a buffer with a file's bytes from `start` on. Raises OSError, also if the file ends too early."""
        with self.open(name) as stream:
            stream.seek(start)
            filled = 0
            while filled < len(target):
                count = stream.readinto(target[filled : filled + PIECE_BYTES])
                if not count:
                    raise OSError(f"{self.path(name)} ends {len(target) - filled} bytes too early")
                filled += count

    def copy_from(self, other: Store, name: str) -> tuple[str, int]:
        """Copy a file from another store, replacing an existing one. Returns the result of `write`."""
        with other.open(name) as source:
            return self.write(name, iter(lambda: source.read(PIECE_BYTES), b""))

    def names(self, folder: str = "") -> list[str]:
        """Names of the files and folders in `folder`, relative to the root, sorted; empty if it does not exist."""
        return sorted(name for name, _ in self._infos(folder, recursive=False))

    def entries(self, folder: str) -> list[Entry]:
        """Files in `folder` and below it, sorted by name; empty if it does not exist."""
        return sorted(
            (
                Entry(name, info.size, info.mtime_ns / 1e9)
                for name, info in self._infos(folder, recursive=True)
                if info.is_file
            ),
            key=lambda entry: entry.name,
        )

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; None if it does not exist."""
        import pyarrow.fs

        filesystem, root = self._location
        info = filesystem.get_file_info(f"{root}/{name}")
        if info.type in (pyarrow.fs.FileType.NotFound, pyarrow.fs.FileType.Directory):
            return None
        return int(info.size)

    def delete(self, name: str) -> None:
        """Remove a file, if it exists."""
        filesystem, root = self._location
        with contextlib.suppress(FileNotFoundError):
            filesystem.delete_file(f"{root}/{name}")

    def delete_folder(self, name: str) -> None:
        """Remove a folder with all of its contents, if it exists."""
        filesystem, root = self._location
        with contextlib.suppress(FileNotFoundError):
            filesystem.delete_dir(f"{root}/{name}")

    def _infos(self, folder: str, *, recursive: bool) -> Iterator[tuple[str, Any]]:
        import pyarrow.fs

        filesystem, root = self._location
        base = f"{root}/{folder}".rstrip("/")
        selector = pyarrow.fs.FileSelector(base, recursive=recursive, allow_not_found=True)
        try:
            found = filesystem.get_file_info(selector)
        except FileNotFoundError:  # removed between pyarrow's check and its listing
            return
        for info in found:
            yield info.path[len(root) :].strip("/"), info

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Context with a stream for writing a file, which appears if the context ends without an error. A local file is
        flushed and appears atomically. In a bucket, the part written so far may appear after an error."""
        if not self.is_local:
            filesystem, root = self._location
            with filesystem.open_output_stream(f"{root}/{name}") as stream:
                yield stream
            return
        path = Path(self.root) / name
        _make_folder(path.parent)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        try:
            with open(temporary, "xb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())  # a manifest must never refer to bytes that a power failure can undo
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)  # nor to such a name


def remove_parts(folder: str | Path) -> None:
    """Remove files left in a local folder when `Store.writing` was killed. Call it only while no process writes
    there."""
    for path in Path(folder).rglob("*.part"):
        if re.search(r"\.[0-9a-f]{8}\.part$", path.name):
            with contextlib.suppress(OSError):
                path.unlink()


def _make_folder(path: Path) -> None:
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        _sync_folder(folder.parent)


def _sync_folder(path: Path) -> None:
    with contextlib.suppress(OSError):  # some mounted filesystems do not support or need it
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
