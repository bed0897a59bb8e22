"""Rows of WebDataset tar shards, read by index: the files of a row share a name up to its first dot.

The shards are indexed once, at the start, from their headers. Any worker can then read rows in any order, and the order
of samples is exact, as for every source that is read by index."""

import io
import json
import posixpath
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scaleray.common.filesystems import open_filesystem
from scaleray.common.installed import install_command
from scaleray.data.source_interface import hash_names
from scaleray.data.sources import DatasetSource
from scaleray.errors import DataError, text_of

IMAGES = ("jpg", "jpeg", "png", "webp")


class TarSource(DatasetSource):
    """Tar shards, local or s3://: a file, a folder of .tar files, or a list of them.

    Each file of a row is a column, named and decoded by its extension: .npy array, .cls and .id integer, .jpg, .png and
    .webp image as uint8 (height, width, channels), .txt text, .json numbers by key, as columns `json.key`, .bin bytes.
    columns: extensions to read; None reads all. decoders: functions of the bytes, by extension, that replace these."""

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        *,
        columns: Sequence[str] | None = None,
        decoders: Mapping[str, Callable[[bytes], Any]] | None = None,
    ) -> None:
        self.shards = Shards(path, columns, dict(decoders or {}))
        super().__init__(self.shards, allows_text=True)

    def describe(self) -> dict[str, Any]:
        sizes = self.shards.sizes
        return {
            "kind": "tar shards",
            "rows": self.num_rows,
            "bytes": sum(size for _, size in sizes),
            "files": len(sizes),
            "sha256": hash_names(sizes),
            "hashed": "names and sizes",
        }


class Shards:
    """Rows of tar files by index, as dicts of their columns."""

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        columns: Sequence[str] | None,
        decoders: dict[str, Callable[[bytes], Any]],
    ) -> None:
        self.decoders = decoders
        given = [path] if isinstance(path, str | Path) else list(path)
        self.uris = [uri for one in given for uri in _tar_files(one)]
        self._open: dict[int, Any] = {}
        self.sizes: list[tuple[str, int]] = []
        self.rows: list[tuple[int, str, dict[str, tuple[int, int]]]] = []
        for number, uri in enumerate(self.uris):
            self._index(number, uri)
        endings = list(dict.fromkeys(ending for _, _, files in self.rows for ending in files))
        missing = [name for name in columns or () if name not in endings]
        if missing or not self.rows:
            text = f"have no {', '.join(missing) or 'rows'}: they have the extensions {', '.join(endings)}"
            raise DataError.problem("the tar shards", text)
        self.columns = list(columns) if columns is not None else endings
        for number, key, files in self.rows:
            if lacking := [ending for ending in self.columns if ending not in files]:
                raise DataError.problem(
                    f"row {key} of {self.uris[number]}",
                    f"lacks .{lacking[0]}: every row needs the same files",
                    "write it again, or set columns to those that all rows have",
                )
        known = {*IMAGES, "json", "txt", "cls", "id", "npy", "bin"}
        for ending in self.columns:
            if ending not in decoders and ending.rpartition(".")[2] not in known:
                raise DataError(
                    f"the ending .{ending}",
                    "not known",
                    f"known endings are {', '.join(sorted(known))}",
                    f"give decoders={{{ending!r}: function of the bytes}}, or omit it from columns",
                )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, key, files = self.rows[index]
        row: dict[str, Any] = {}
        for ending in self.columns:
            offset, size = files[ending]
            file = self._file(number)
            file.seek(offset)
            content = file.read(size)
            if len(content) != size:
                raise DataError(f"row {key} of {self.uris[number]}", "cut short", "the shard changed after the start")
            try:
                row.update(_decoded(ending, content, self.decoders.get(ending)))
            except DataError:
                raise
            except Exception as exc:
                raise DataError(
                    f"{key}.{ending} of {self.uris[number]}", "damaged", f"it cannot be decoded: {text_of(exc)}"
                ) from exc
        return row

    def _file(self, number: int) -> Any:
        if number not in self._open:
            if len(self._open) >= 64:
                self._open.pop(next(iter(self._open))).close()
            filesystem, path = open_filesystem(self.uris[number])
            self._open[number] = filesystem.open_input_file(path)
        return self._open[number]

    def _index(self, number: int, uri: str) -> None:
        file = self._file(number)
        self.sizes.append((uri, int(file.size())))
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for member in tar:
                    folder, name = posixpath.split(member.name)
                    stem, _, ending = name.partition(".")
                    if not (member.isreg() and stem and ending):
                        continue
                    key = posixpath.join(folder, stem)
                    if not self.rows or self.rows[-1][:2] != (number, key):
                        self.rows.append((number, key, {}))
                    self.rows[-1][2][ending.lower()] = (member.offset_data, member.size)
        except tarfile.TarError as exc:
            raise DataError(
                "a tar shard", uri, f"it cannot be read: {exc}", "shards are plain .tar files, not compressed"
            ) from exc

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}


def _tar_files(given: str | Path) -> list[str]:
    import pyarrow.fs

    uri = str(given) if "://" in str(given) else str(Path(given).expanduser().absolute())
    try:
        filesystem, root = open_filesystem(uri)
        info = filesystem.get_file_info(root)
        if info.type == pyarrow.fs.FileType.NotFound:
            raise DataError("the path of tar shards", uri, "it does not exist")
        if info.is_file:
            return [uri]
        found = filesystem.get_file_info(pyarrow.fs.FileSelector(root, recursive=True))
    except (OSError, ValueError) as exc:
        raise DataError("the path of tar shards", uri, f"it cannot be opened: {exc}") from exc
    names = sorted(file.path for file in found if file.is_file and file.path.endswith(".tar"))
    if not names:
        raise DataError("the path of tar shards", uri, "it contains no .tar file")
    return [uri.rstrip("/") + name[len(root.rstrip("/")) :] for name in names]


def _decoded(ending: str, content: bytes, decoder: Callable[[bytes], Any] | None) -> dict[str, Any]:
    if decoder is not None:
        return {ending: decoder(content)}
    kind = ending.rpartition(".")[2]
    if kind in IMAGES:
        try:
            from PIL import Image
        except ImportError as exc:
            raise DataError(
                f"the ending .{ending}", "an image", "decoding needs Pillow", install_command("images")
            ) from exc
        return {ending: np.array(Image.open(io.BytesIO(content)))}
    if kind == "json":
        found = json.loads(content)
        return {f"{ending}.{k}": value for k, value in found.items()} if isinstance(found, dict) else {ending: found}
    if kind == "txt":
        return {ending: content.decode()}
    if kind in ("cls", "id"):
        return {ending: int(content)}
    if kind == "npy":
        return {ending: np.load(io.BytesIO(content), allow_pickle=False)}
    return {ending: np.frombuffer(content, np.uint8)}
