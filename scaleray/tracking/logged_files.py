"""Files that callbacks have logged, on the recorder's side: written to the run's folder and to MLflow's artifacts."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from scaleray.checkpoints.storage import Store
from scaleray.filesystems import write_whole
from scaleray.records.run import LoggedFile
from scaleray.tracking.operations import LogArtifact

FOLDER = "logged"


class LoggedFiles:
    """Writes them under `logged/` of `work_dir`, and of `elsewhere`, the run's folder where that is a bucket.

    upload: takes what MLflow is to have. A file that is there with the same bytes is not uploaded again.
    """

    def __init__(self, work_dir: Path, elsewhere: Store | None, upload: Callable[[LogArtifact], None]) -> None:
        self.work_dir, self.elsewhere, self.upload = work_dir, elsewhere, upload

    def add(self, file: LoggedFile) -> None:
        """Write a file. Raises OSError where the disk does not take it."""
        content = file.data if file.shape is None else as_png(file.data, file.shape)
        path = self.work_dir / FOLDER / file.path
        if path.exists() and path.read_bytes() == content:
            return  # a step that was taken again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
        if self.elsewhere is not None:
            self.elsewhere.write(f"{FOLDER}/{file.path}", [content])
        self.upload(LogArtifact(str(path), str(Path(FOLDER) / Path(file.path).parent)))


def as_png(pixels: bytes, shape: tuple[int, ...]) -> bytes:
    """An image (height, width) or (height, width, channels) of bytes as PNG."""
    from PIL import Image  # matplotlib brings it

    mode = {(): "L", (3,): "RGB", (4,): "RGBA"}[tuple(shape[2:])]
    content = io.BytesIO()
    Image.frombytes(mode, (shape[1], shape[0]), pixels).save(content, format="PNG")
    return content.getvalue()
