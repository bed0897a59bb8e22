"""Files of checkpoints, in a local folder or a bucket, through pyarrow's filesystems, which Ray Train uses too."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

PIECE_BYTES = 8 * 2**20  # read, hashed and written at once


@dataclass(frozen=True)
class Store:
    """The files under one root: an absolute path or a URI such as s3://bucket/prefix. Names are relative, with '/'."""

    root: str

    @cached_property
    def _location(self) -> tuple[Any, str]:
        import pyarrow.fs

        return pyarrow.fs.FileSystem.from_uri(self.root)

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root}  # an opened filesystem stays in its process

    def __setstate__(self, state: dict[str, Any]) -> None:
        object.__setattr__(self, "root", state["root"])

    @property
    def is_local(self) -> bool:
        """Whether the files are in a folder of this machine (or one that is mounted like it)."""
        return "://" not in self.root

    def child(self, name: str) -> Store:
        """The store of a folder below the root. A URI's query stays at its end."""
        base, mark, query = self.root.partition("?")
        return Store(f"{base.rstrip('/')}/{name}{mark}{query}")

    def path(self, name: str) -> str:
        """Where a file is, for people."""
        return self.child(name).root

    def write(self, name: str, pieces: Iterable[Any]) -> tuple[str, int]:
        """Write buffers one after another; gives (SHA-256 of the whole in hex, its bytes). Flushed to the disk at the end."""
        digest, length = hashlib.sha256(), 0
        with self._writing(name) as stream:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                for start in range(0, len(view), PIECE_BYTES):
                    part = view[start : start + PIECE_BYTES]
                    digest.update(part)
                    stream.write(part)
                length += len(view)
        return digest.hexdigest(), length

    def write_text(self, name: str, text: str) -> None:
        """Write a small file so that it is there whole or not at all."""
        if not self.is_local:
            self.write(name, [text.encode()])  # an object appears when its upload is complete
            return
        temporary = f"{name}.part"
        self.write(temporary, [text.encode()])
        os.replace(self._local(temporary), self._local(name))

    def read(self, name: str) -> bytes:
        """A whole file. Raises FileNotFoundError or another OSError."""
        with self.open(name) as stream:
            return stream.read()

    def open(self, name: str) -> Any:
        """A file to seek and read in."""
        if self.is_local:
            return open(self._local(name), "rb")
        filesystem, root = self._location
        return filesystem.open_input_file(f"{root}/{name}")

    def digest(self, name: str) -> tuple[str, int]:
        """(SHA-256 in hex, bytes) of a file as it is now."""
        digest, length = hashlib.sha256(), 0
        with self.open(name) as stream:
            while piece := stream.read(PIECE_BYTES):
                digest.update(piece)
                length += len(piece)
        return digest.hexdigest(), length

    def copy_from(self, other: Store, name: str) -> None:
        """Take a file over from another store, replacing one's own in one move where that is possible."""
        with other.open(name) as source:
            temporary = f"{name}.part" if self.is_local else name
            self.write(temporary, iter(lambda: source.read(PIECE_BYTES), b""))
        if self.is_local:
            os.replace(self._local(temporary), self._local(name))

    def names(self, folder: str = "", *, recursive: bool = False) -> list[str]:
        """Names of the files and folders below `folder`, relative to the root, sorted; none where it does not exist."""
        import pyarrow.fs

        filesystem, root = self._location
        base = f"{root}/{folder}".rstrip("/")
        selector = pyarrow.fs.FileSelector(base, recursive=recursive, allow_not_found=True)
        return sorted(str(Path(info.path).relative_to(root)) for info in filesystem.get_file_info(selector))

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""
        import pyarrow.fs

        filesystem, root = self._location
        info = filesystem.get_file_info(f"{root}/{name}")
        return info.size if info.type == pyarrow.fs.FileType.File else None

    def delete(self, name: str) -> None:
        """Remove a file; one that is gone already is no error."""
        filesystem, root = self._location
        with contextlib.suppress(FileNotFoundError):
            filesystem.delete_file(f"{root}/{name}")

    def delete_folder(self, name: str) -> None:
        """Remove a folder with all that is in it."""
        filesystem, root = self._location
        with contextlib.suppress(FileNotFoundError):
            filesystem.delete_dir(f"{root}/{name}")

    def _local(self, name: str) -> Path:
        return Path(self.root) / name

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[BinaryIO]:
        if self.is_local:
            path = self._local(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())  # a manifest must never name bytes that a power failure can take back
            return
        filesystem, root = self._location
        with filesystem.open_output_stream(f"{root}/{name}") as stream:
            yield stream
