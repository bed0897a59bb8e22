"""steps.csv: a row for every step of a run, whatever MLflow is given of them."""

from __future__ import annotations

import contextlib
import csv
import io
from dataclasses import asdict
from pathlib import Path

from scaleray.checkpoints.storage import Store
from scaleray.records import StepRecord

STEP_COLUMNS = (
    "step",
    "loss",
    "count",
    "num_samples",
    "learning_rate",
    "grad_norm",
    "step_time_s",
    "input_wait_s",
    "epoch",
    "is_finite",
    "world_size",
)


class StepsFile:
    """A new file, or that of the interrupted run, without a last line that was cut; rows wait in memory for `write`.

    run_path: where else the interrupted run's file may be. last_step, last_loss, num_nonfinite: of the rows so far.
    """

    def __init__(self, path: Path, *, is_continued: bool, run_path: str | None) -> None:
        self.path = path
        self.last_step, self.num_nonfinite = -1, 0
        self.last_loss: float | None = None
        if is_continued and not path.exists() and run_path:
            with contextlib.suppress(FileNotFoundError):
                path.write_bytes(Store(run_path).read(path.name))
        lines = path.read_text().splitlines(keepends=True) if is_continued and path.exists() else []
        whole = [line for line in lines if line.endswith("\n") and line.count(",") == len(STEP_COLUMNS) - 1]
        if len(whole) > 1:
            values = whole[-1].split(",")
            self.last_step, self.last_loss = int(values[0]), float(values[1])
            finite = STEP_COLUMNS.index("is_finite")
            self.num_nonfinite = sum(line.split(",")[finite].strip() == "False" for line in whole)
        temporary = path.with_suffix(".part")  # a kill in between must not cost the steps so far
        temporary.write_text("".join(whole))
        temporary.replace(path)
        self._rows = io.StringIO(newline="")
        self._written_bytes = path.stat().st_size
        self._csv = csv.writer(self._rows, lineterminator="\n")
        if not whole:
            self._csv.writerow(STEP_COLUMNS)

    def add(self, record: StepRecord) -> None:
        """A row after the last one."""
        self.last_step, self.last_loss = record.step, record.loss
        self.num_nonfinite += not record.is_finite
        values = asdict(record)
        self._csv.writerow([repr(values[c]) if isinstance(values[c], float) else values[c] for c in STEP_COLUMNS])

    def write(self) -> None:
        """Append new rows. On a full disk, OSError, they wait until there is room again."""
        if not self.is_behind:
            return
        with open(self.path, "r+b") as file:
            file.seek(self._written_bytes)
            file.write(self._rows.getvalue().encode())
            file.truncate()
            self._written_bytes = file.tell()
        self._rows.seek(0)
        self._rows.truncate()

    @property
    def is_behind(self) -> bool:
        """Whether rows wait in memory."""
        return bool(self._rows.tell())
