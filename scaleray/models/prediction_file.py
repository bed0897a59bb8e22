"""The file of predictions: Parquet or JSON lines, written in the order of the rows."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scaleray.checkpoints.storage import Store
from scaleray.config.base import absolute_path, without_password
from scaleray.errors import StorageError, UsageError, first_line
from scaleray.records.json_record import jsonable

ENDINGS = (".parquet", ".jsonl")


class AnswersFile:
    """Writes Arrow tables of one schema, with rows in the given order."""

    def __init__(self, stream: Any, ending: str) -> None:
        self._stream, self._ending = stream, ending
        self._parquet: Any = None

    def write(self, table: Any) -> None:
        """Add the rows of a table."""
        if self._ending == ".jsonl":
            lines = "".join(json.dumps(jsonable(row)) + "\n" for row in table.to_pylist())
            self._stream.write(lines.encode())
            return
        import pyarrow.parquet

        if self._parquet is None:
            self._parquet = pyarrow.parquet.ParquetWriter(self._stream, table.schema)
        self._parquet.write_table(table.cast(self._parquet.schema))

    def close(self) -> None:
        """Complete the file."""
        if self._parquet is not None:
            self._parquet.close()


def check_out(out: str | Path, *, overwrite: bool) -> str:
    """The absolute path or URI of the file to write. Raises UsageError for an unknown ending, or an existing file."""
    path = absolute_path(str(out))
    if _ending(path) not in ENDINGS:
        raise UsageError("--out", without_password(path), f"its name must end in {' or '.join(ENDINGS)}")
    place = Store(path)
    try:
        exists = place.parent.size(place.name) is not None
    except (OSError, ValueError) as exc:
        raise StorageError("--out", without_password(path), f"it cannot be reached: {first_line(exc)}") from exc
    if exists and not overwrite:
        raise UsageError("--out", without_password(path), "it already exists", "name another, or add --overwrite")
    return path


@contextlib.contextmanager
def opened(path: str) -> Iterator[AnswersFile]:
    """The file to write, at a path from `check_out`. Raises StorageError; after an error, an existing local file is
    unchanged."""
    place = Store(path)
    try:
        with place.parent.writing(place.name) as stream:
            file = AnswersFile(stream, _ending(path))
            try:
                yield file
            finally:
                file.close()  # after an error too, or pyarrow would close it when the stream is gone
    except OSError as exc:
        raise StorageError("--out", without_password(path), f"it cannot be written: {first_line(exc)}") from exc


def _ending(path: str) -> str:
    return Path(Store(path).name).suffix.lower()
