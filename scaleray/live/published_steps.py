"""steps.csv as parts of bounded size in a run's remote folder, such as a bucket, whose files cannot be appended to.

Each checkpoint sends the last part again, and all newer ones. The first part is steps.csv itself, the only part of a
short run. When a run ends, the whole file replaces the parts."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path, PurePath

from scaleray.checkpoints.storage import Store

PART_BYTES = 2**18
"""Size in bytes at which a part is complete: the most that a checkpoint sends again, about two thousand steps."""


class PublishedSteps:
    """Sends the rows of a file to storage. Raises OSError."""

    def __init__(self, path: Path, store: Store) -> None:
        self._store, self._path = store, path
        self._ends: list[int] = []
        """End position in the file of each part that was sent."""
        self._version = -1

    def send(self, version: int) -> None:
        """Send the rows missing in storage. version: differs from the last call's if earlier rows have changed."""
        is_known = self._version == version
        kept = self._ends[:-1] if is_known else []
        with open(self._path, "rb") as file:
            file.seek(kept[-1] if kept else 0)
            pieces = list(_pieces(file.read()))
        ends = list(kept)
        for piece in pieces:
            ends.append((ends[-1] if ends else 0) + len(piece))
        if is_known and ends == self._ends:
            return
        numbered = list(enumerate(pieces, start=len(kept)))
        # rows come after those before them, for a kill in between; but a whole file that another process left must not
        # become its first part before the others are there
        for number, piece in numbered if is_known else reversed(numbered):
            self._store.write(_part(self._path.name, number), [piece])
        if not is_known:
            self._remove_parts(after=len(pieces) - 1)
        self._ends, self._version = ends, version

    def join(self) -> None:
        """Replace the parts, if any, with the whole file."""
        if _parts(self._store, self._path.name):
            self._store.write(self._path.name, [self._path.read_bytes()])
            self._remove_parts(after=0)
            self._version = -1

    def send_file(self, path: Path) -> None:
        """Send another whole file of the run to storage, or remove it there if it no longer exists here."""
        if path.exists():
            self._store.write(path.name, [path.read_bytes()])
        else:
            self._store.delete(path.name)

    def _remove_parts(self, *, after: int) -> None:
        for number, name in _parts(self._store, self._path.name):
            if number > after:
                self._store.delete(name)


def read(store: Store, name: str) -> bytes:
    """Read all rows of a steps.csv in storage from its parts. Raises FileNotFoundError if there is none."""
    content, last = [], 0
    for part in (name, *(part for _, part in _parts(store, name))):
        # rows that come again were left by a kill beside a whole file, and are no damage
        lines = [
            line for line in store.read(part).splitlines(keepends=True) if part == name or not 0 < _step(line) <= last
        ]
        last = max([last, *map(_step, lines)])
        content += lines
    return b"".join(content)


def _pieces(content: bytes) -> Iterator[bytes]:
    start = 0
    while len(content) - start > PART_BYTES and (end := content.find(b"\n", start + PART_BYTES) + 1):
        yield content[start:end]
        start = end
    yield content[start:]


def _part(name: str, number: int) -> str:
    path = PurePath(name)
    return f"{path.stem}-{number:05d}{path.suffix}" if number else name


def _parts(store: Store, name: str) -> list[tuple[int, str]]:
    """Parts after the first one, in order."""
    path = PurePath(name)
    pattern = re.compile(rf"{re.escape(path.stem)}-(\d+){re.escape(path.suffix)}")
    return sorted((int(found[1]), one) for one in store.names() if (found := pattern.fullmatch(one)))


def _step(line: bytes) -> int:
    with contextlib.suppress(ValueError):
        return int(line.partition(b",")[0])
    return 0
