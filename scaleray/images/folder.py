"""Files of images with a folder for each class, as rows: the name of the file and the number of its class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scaleray.data import ArraySource
from scaleray.data.source import hash_names
from scaleray.errors import DataError

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
FILE, LABELS = "file", "labels"


class ImageFolder(ArraySource):
    """Rows of a folder whose folders are the classes: `file`, the name as bytes (uint8, filled up with zeros), and
    `labels`. Hidden files, and files with other endings, are left out. Raises DataError."""

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
            raise DataError(f"the images in {folder}", "none", f"files end in {', '.join(ENDINGS)}")
        names = [file.encode() for file, _ in found]
        sizes = [(file, (Path(folder) / file).stat().st_size) for file, _ in found]
        self.num_bytes, self.names_hash = sum(size for _, size in sizes), hash_names(sizes)
        width = max(map(len, names))
        files = np.frombuffer(b"".join(name.ljust(width, b"\0") for name in names), np.uint8)
        labels = np.array([number for _, number in found], np.int64)
        super().__init__({FILE: files.reshape(len(names), width), LABELS: labels})

    def describe(self) -> dict[str, Any]:
        """Description for the record: names and sizes are hashed, as reading all files would delay every start."""
        return {
            "kind": "images",
            "rows": self.num_rows,
            "bytes": self.num_bytes,
            "sha256": self.names_hash,
            "hashed": "names and sizes",
        }


def class_names(folder: str) -> list[str]:
    """Names of the folders in a folder, sorted; numbers by their value. Raises DataError where there are none."""
    path = Path(folder)
    if not path.is_dir():
        raise DataError("the folder of images", folder, "it does not exist", "give a folder that every worker sees")
    names = [p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith(".")]
    if not names:
        raise DataError("the folder of images", folder, "it has no folders: each class needs one with its images")
    return sorted(names, key=lambda name: (0, int(name), name) if name.isdecimal() else (1, 0, name))


def file_names(column: np.ndarray) -> list[str]:
    """Names of files out of the column `file`."""
    return [bytes(row).rstrip(b"\0").decode() for row in column]


def _images(folder: Path, name: str) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix()
        for path in (folder / name).rglob("*")
        if path.suffix.lower() in ENDINGS and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
