"""Output that user code logs during training: images, text, tables and figures, as files of the run.

Each file is named after its step, so that a step that is repeated after an interruption writes the same file. The
recorder encodes images and writes the files, concurrently with the training."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from scaleray.errors import WorkloadError
from scaleray.records.run_record import Emit, EventRecord, LoggedFile, LoggedMetrics

LARGEST_BYTES = 2**24
"""Maximum size of a file; larger files are left out."""
MOST_BYTES = 2**29
"""Maximum size of all files of a run together; files beyond it are left out."""
_NAME = re.compile(r"[\w.() -]+(/[\w.() -]+)*")


class Logger:
    """Logs files of a run through `emit`. is_kept: whether the files of this rank are stored; those of other ranks are
    dropped. step: number of the last step. logged_bytes: bytes of all files so far."""

    def __init__(self, emit: Emit, *, is_kept: bool) -> None:
        self._emit, self._is_kept = emit, is_kept
        self.step = 0
        self.logged_bytes = 0
        self._warned: set[str] = set()

    def log_metrics(self, values: Mapping[str, float]) -> None:
        """Log numbers by name, as metrics of the run."""
        if self._is_kept:
            self._emit(LoggedMetrics(self.step, {name: float(value) for name, value in values.items()}))

    def warn(self, text: str) -> None:
        """Log a warning, which is stored in the run's record."""
        if self._is_kept:
            self._emit(EventRecord(text, kind="warning", step=self.step or None))

    def log_image(self, name: str, image: Any) -> None:
        """Log an image as PNG: an array (height, width, channels), a tensor (channels, height, width), either without
        channels, or several images, which become a grid. Floating-point values range from 0 to 1, others are bytes."""
        if self._is_kept:
            pixels = as_pixels(name, image)
            self._log(name, "png", pixels.tobytes(), shape=pixels.shape)

    def log_text(self, name: str, text: str) -> None:
        """Log a text."""
        if self._is_kept:
            self._log(name, "txt", str(text).encode())

    def log_table(self, name: str, rows: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]) -> None:
        """Log a table as CSV: columns by name, or rows that are mappings."""
        if not self._is_kept:
            return
        if isinstance(rows, Mapping):
            columns = {str(column): _listed(values) for column, values in rows.items()}
            if len({len(values) for values in columns.values()}) > 1:
                found = ", ".join(f"{column} {len(values)}" for column, values in columns.items())
                raise WorkloadError.problem(f"the table {name}", f"has columns of unequal length ({found})")
            header, lines = list(columns), [list(line) for line in zip(*columns.values(), strict=True)]
        else:
            header = list(dict.fromkeys(str(column) for row in rows for column in row))
            lines = [[row.get(column, "") for column in header] for row in rows]
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows([header, *lines])
        self._log(name, "csv", text.getvalue().encode())

    def log_figure(self, name: str, figure: Any) -> None:
        """Log a matplotlib figure as PNG. It is drawn immediately, which delays the training."""
        if not self._is_kept:
            return
        if not callable(getattr(figure, "savefig", None)):
            raise WorkloadError(f"the figure {name}", type(figure).__name__, "log_figure takes a matplotlib Figure")
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", bbox_inches="tight")
        self._log(name, "png", drawn.getvalue())

    def _log(self, name: str, ending: str, data: bytes, *, shape: tuple[int, ...] | None = None) -> None:
        if _NAME.fullmatch(name) is None or ".." in name:
            raise WorkloadError(
                "the name of a logged file",
                name,
                "it may contain letters, digits, . _ - ( ) and spaces, with / between folders",
                "leave the step out of the name: it is appended",
            )
        if len(data) > LARGEST_BYTES:
            self._warn(f"{name}, with {len(data) / 2**20:.0f} MiB,", f"{LARGEST_BYTES // 2**20} MiB per file")
        elif self.logged_bytes + len(data) > MOST_BYTES:
            self._warn("the output of callbacks", f"{MOST_BYTES // 2**20} MiB per run")
        else:
            self.logged_bytes += len(data)
            self._emit(LoggedFile(self.step, f"{name}/step-{self.step:08d}.{ending}", data, shape))

    def _warn(self, what: str, limit: str) -> None:
        if limit not in self._warned:
            self._warned.add(limit)
            self.warn(f"{what} exceeds {limit}: it is left out, as are all further files above the limit")


def as_pixels(name: str, image: Any) -> np.ndarray:
    """An image, or a grid of several, as bytes (height, width) or (height, width, channels)."""
    is_tensor = isinstance(image, torch.Tensor)
    if is_tensor:
        image = image.detach().float().cpu() if image.is_floating_point() else image.detach().cpu()
    array = np.asarray(image)
    if array.dtype.kind == "f":
        array = (np.clip(np.nan_to_num(array), 0, 1) * 255 + 0.5).astype(np.uint8)
    elif array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    elif array.dtype.kind in "iu" and array.size and array.min() >= 0 and array.max() <= 255:
        array = array.astype(np.uint8)
    fits = array.dtype == np.uint8 and array.size > 0
    if fits and array.ndim == 2:
        return array
    if fits and array.ndim in (3, 4):
        # where both may be the channels, tensors have them first, as torch does, and arrays last
        if array.shape[-3] in (1, 3, 4) and (is_tensor or array.shape[-1] not in (1, 3, 4)):
            array = np.moveaxis(array, -3, -1)
        if array.shape[-1] in (1, 3, 4):
            whole = _grid(array) if array.ndim == 4 else array
            return np.ascontiguousarray(whole[..., 0] if whole.shape[-1] == 1 else whole)
    raise WorkloadError(
        f"the image {name}",
        f"an array {list(np.shape(image))} of {array.dtype}",
        "log_image takes (height, width), (height, width, channels) or (channels, height, width) with 1, 3 or 4 "
        "channels, or several of the latter, with floats from 0 to 1 or bytes",
    )


def _grid(images: np.ndarray) -> np.ndarray:
    """Arrange images (n, height, width, channels) row by row in a grid that is about square."""
    num, height, width, channels = images.shape
    across = int(np.ceil(np.sqrt(num)))
    down = -(-num // across)
    grid = np.zeros((down * across, height, width, channels), np.uint8)
    grid[:num] = images
    grid = grid.reshape(down, across, height, width, channels).transpose(0, 2, 1, 3, 4)
    return grid.reshape(down * height, across * width, channels)


def _listed(values: Any) -> list[Any]:
    found: list[Any] = values.tolist() if isinstance(values, (torch.Tensor, np.ndarray)) else list(values)
    return found
