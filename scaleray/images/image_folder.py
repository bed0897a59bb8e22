"""Image files with one folder per class, as rows of file name and class number."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scaleray.common.filesystems import files_below
from scaleray.data import ArraySource
from scaleray.data.source_interface import hash_names
from scaleray.errors import DataError

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
FILE, LABELS = "file", "labels"


class ImageFiles(ArraySource):
    """Rows of image files: `file`, the name as bytes (uint8, zero-padded), and `labels` if available.

    files: names relative to `folder`. named: prefix of the names in the rows.
    """

    def __init__(self, folder: Path, files: Sequence[str], labels: Sequence[int] | None, named: str = "") -> None:
        sizes = [(file, (folder / file).stat().st_size) for file in files]
        self.num_bytes, self.names_hash = sum(size for _, size in sizes), hash_names(sizes)
        self.beside = {FILE: [f"{named}{file}" for file in files]}
        names = [os.fsencode(name) for name in self.beside[FILE]]
        width = max(map(len, names))
        padded = np.frombuffer(b"".join(name.ljust(width, b"\0") for name in names), np.uint8)
        columns = {FILE: padded.reshape(len(names), width)}
        super().__init__(columns if labels is None else {**columns, LABELS: np.array(labels, np.int64)})

    def describe(self) -> dict[str, Any]:
        """Description for the record. Names and sizes are hashed, as reading all files would delay every start."""
        return {
            "kind": "images",
            "rows": self.num_rows,
            "bytes": self.num_bytes,
            "sha256": self.names_hash,
            "hashed": "names and sizes",
        }


class ImageFolder(ImageFiles):
    """Image files in a folder with one folder per class. Hidden files, and files with other extensions, are ignored.

    Raises DataError.
    """

    def __init__(self, folder: str, classes: Sequence[str]) -> None:
        self.folder = folder
        known = class_names(folder)
        if unknown := sorted(set(known) - set(classes)):
            raise DataError(
                f"a class of {folder}", unknown[0], f"the classes are {', '.join(classes[:12])}", "see args.classes"
            )
        found: list[tuple[str, int]] = []
        for number, name in enumerate(classes):
            found += [(file, number) for file in _images(Path(folder), name)]
        if not found:
            raise DataError.problem(
                f"the folder {folder}", f"has no images: supported extensions are {', '.join(ENDINGS)}"
            )
        super().__init__(Path(folder), [file for file, _ in found], [number for _, number in found])


def images_at(path: str, classes: Sequence[str]) -> ImageFiles | None:
    """Images in and below a folder that is not a split, by full path, ordered by name, with labels if each image is in
    a folder of its class. None if there are no images."""
    folder = Path(path)
    files = _images(folder, "")
    if not files:
        return None
    numbers = {name: number for number, name in enumerate(classes)}
    labels = [numbers.get(file.split("/")[0], -1) for file in files]
    return ImageFiles(folder, files, None if min(labels) < 0 else labels, named=f"{folder.absolute()}/")


def class_names(folder: str) -> list[str]:
    """Names of the subfolders of a folder, sorted, with numbers by value. Raises DataError if there are none."""
    path = Path(folder)
    if not path.is_dir():
        raise DataError("the folder of images", folder, "it does not exist", "give a folder accessible to every worker")
    names = [p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith(".")]
    if not names:
        raise DataError("the folder of images", folder, "it has no subfolders: each class needs its own")
    return sorted(names, key=lambda name: (0, int(name), name) if name.isdecimal() else (1, 0, name))


def file_names(column: np.ndarray) -> list[str]:
    """Names of files from the column `file`."""
    return [os.fsdecode(bytes(row).rstrip(b"\0")) for row in column]


def _images(folder: Path, name: str) -> list[str]:
    """Names of images in and below a folder, including linked folders."""
    found = [path for path in files_below(folder / name) if path.suffix.lower() in ENDINGS]
    return sorted(path.relative_to(folder).as_posix() for path in found)
