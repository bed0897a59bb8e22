"""steps.csv: one row per step of a run, independent of the points sent to MLflow."""

import contextlib
import csv
import io
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scaleray.checkpoints.storage import Store
from scaleray.common.filesystems import write_whole
from scaleray.errors import TrackingError
from scaleray.live.published_steps import read
from scaleray.records.mlflow_operations import LogArtifact
from scaleray.records.run_record import LoggedFile, StepRecord

FOLDER = "logged"


class LoggedFiles:
    """Writes files to `logged/` in `work_dir` and in `elsewhere`, the run folder if that is a bucket. upload: receives
    the files for MLflow. An existing file with the same bytes is not uploaded again."""

    def __init__(self, work_dir: Path, elsewhere: Store | None, upload: Callable[[LogArtifact], None]) -> None:
        self.work_dir, self.elsewhere, self.upload = work_dir, elsewhere, upload

    def add(self, file: LoggedFile) -> None:
        """Write a file. Raises OSError if the disk rejects it."""
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
    """Encode an image of bytes, (height, width) or (height, width, channels), as PNG."""
    from PIL import Image  # matplotlib brings it

    mode = {(): "L", (3,): "RGB", (4,): "RGBA"}[tuple(shape[2:])]
    content = io.BytesIO()
    Image.frombytes(mode, (shape[1], shape[0]), pixels).save(content, format="PNG")
    return content.getvalue()


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
    "recorded_at",
    "losses",
)
OLD_COLUMNS = (STEP_COLUMNS[:-1], STEP_COLUMNS[:-2])
"""Columns of older files, which lack several losses or the time; after a resume, these are empty in old rows."""

_NUMBER = r"(?:[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|inf|nan))"
_OPTIONAL = rf"{_NUMBER}?"
_LOSSES = rf"(?:[^,\n]+={_NUMBER})?"
_PATTERNS = {"step": r"([1-9]\d*)", "loss": _NUMBER, "is_finite": "(True|False)", "losses": _LOSSES}
_ROW = re.compile(",".join(_PATTERNS.get(column, _OPTIONAL) for column in STEP_COLUMNS))

Range = tuple[int, int]
"""Steps from the first to the second, inclusive."""


class StepsFile:
    """A new steps.csv, or that of the interrupted run. Rows stay in memory until `write`.

    run_path: other location of the interrupted run's file. last_step, last_loss, num_nonfinite: values after the rows
    so far. damage: fault of the interrupted run's file, whose copy is `kept_as`; "" if there is none, or only a
    truncated last line, as after a kill. version: changes whenever written rows change."""

    def __init__(self, path: Path, *, is_continued: bool, run_path: str | None) -> None:
        self.path, self.version = path, 0
        self.damage = ""
        self.kept_as: Path | None = None
        if is_continued and not path.exists() and run_path:
            with contextlib.suppress(FileNotFoundError):
                path.write_bytes(read(Store(run_path), path.name))
        content = path.read_bytes() if is_continued and path.exists() else b""
        self._cut = b""
        rows, self.damage = parse(content)
        if self.damage:
            self.keep_damaged()
        self._written_bytes = 0
        self._put(rows)
        self._cut = content[content.rfind(b"\n") + 1 :]  # no longer in the file, but a copy of it is kept whole
        self._rows = io.StringIO(newline="")
        self._csv = csv.writer(self._rows, lineterminator="\n")

    def add(self, record: StepRecord) -> None:
        """Add a row after the last one."""
        self._count(record.step, record.loss, record.is_finite)
        values = {**vars(record), "losses": ";".join(f"{name}={value!r}" for name, value in record.losses.items())}
        self._csv.writerow([repr(values[c]) if isinstance(values[c], float) else values[c] for c in STEP_COLUMNS])

    def write(self) -> None:
        """Append new rows. If the disk is full, raises OSError and keeps them until there is space again."""
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
        """Whether rows in memory have not been written."""
        return bool(self._rows.tell())

    def lacks(self, up_to: int) -> list[Range]:
        """Ranges of steps from 1 to `up_to` that have no row."""
        holes = [(first, min(last, up_to)) for first, last in self._holes if first <= up_to]
        start = max(self.last_step, 0) + 1
        return holes + ([(start, up_to)] if start <= up_to else [])

    def rows(self) -> Iterator[dict[str, str]]:
        """Rows on the disk, by column."""
        with open(self.path, newline="") as file:
            yield from csv.DictReader(file)

    def mend(self, after: int, found: Mapping[int, Mapping[str, Any]]) -> None:
        """Insert missing rows, given by step, up to the step after which training continues.

        Later rows stay if none of them is missing, as their steps will be repeated. Raises OSError."""
        self.write()
        rows, _ = parse(self.path.read_bytes())
        if any(last > after for _, last in self._holes):
            rows = {step: row for step, row in rows.items() if step <= after}
        for step, values in found.items():
            rows.setdefault(step, ",".join(str(values.get(column, "")) for column in STEP_COLUMNS))
        self._put(rows)

    def keep_damaged(self) -> None:
        """Copy the file to an unused name in the same folder."""
        names = [f"{self.path.name}.damaged", *(f"{self.path.name}.damaged-{n}" for n in range(2, 100))]
        self.kept_as = next((path for name in names if not (path := self.path.with_name(name)).exists()), None)
        if self.kept_as is not None:
            shutil.copyfile(self.path, self.kept_as)
            with open(self.kept_as, "ab") as file:
                file.write(self._cut)

    def _put(self, rows: Mapping[int, str]) -> None:
        """Replace the file's rows with these, ordered by step."""
        self.last_step, self.num_nonfinite = -1, 0
        self.last_loss: float | None = None
        self._holes: list[Range] = []
        lines = [f"{row}\n" for _, row in sorted(rows.items())]
        for line in lines:
            values = line.split(",")
            self._count(int(values[0]), float(values[1]), values[STEP_COLUMNS.index("is_finite")] == "True")
        write_whole(self.path, "".join([",".join(STEP_COLUMNS) + "\n", *lines]))
        self.version += 1
        self._written_bytes = self.path.stat().st_size

    def _count(self, step: int, loss: float, is_finite: bool) -> None:
        start = max(self.last_step, 0) + 1
        if step > start:
            self._holes.append((start, step - 1))
        self.last_step, self.last_loss = step, loss
        self.num_nonfinite += not is_finite


def parse(content: bytes) -> tuple[dict[int, str], str]:
    """Rows of a file by step, each a line of STEP_COLUMNS, and a text about its damage, "" if there is none."""
    *lines, _ = content.decode(errors="replace").split("\n")  # after the last end of line is what a kill cut
    if not lines:
        return {}, "it has no complete line" if content else ""
    header = lines[0].strip()
    before = {",".join(columns): "," * (len(STEP_COLUMNS) - len(columns)) for columns in OLD_COLUMNS}
    missing = {",".join(STEP_COLUMNS): "", **before}.get(header)
    if missing is None:
        return {}, f"its first line is {header[:60]!r} instead of the columns"
    rows: dict[int, str] = {}
    num_unreadable = num_again = 0
    last, is_in_order = 0, True
    for line in lines[1:]:
        row = line.rstrip("\r") + missing
        if _ROW.fullmatch(row) is None:
            num_unreadable += 1
            continue
        step = int(row.partition(",")[0])
        num_again += step in rows
        is_in_order = is_in_order and step >= last
        last = step
        rows.setdefault(step, row)
    problems = [f"{num_unreadable} lines are not steps"] if num_unreadable else []
    problems += [f"{num_again} steps are repeated"] if num_again else []
    problems += [] if is_in_order else ["the steps are not in order"]
    return rows, ", ".join(problems)


def step_rows(text: str | None) -> list[dict[str, float]]:
    """Rows of steps.csv as numbers. Empty fields are NaN; the columns of several losses are named `loss_NAME`. A
    truncated line is omitted. Raises TrackingError if a column is missing."""
    rows = []
    reader = csv.DictReader(io.StringIO(text or ""))
    if text and (missing := [name for name in OLD_COLUMNS[-1] if name not in (reader.fieldnames or ())]):
        raise TrackingError.problem(
            "steps.csv of the run",
            f"lacks the required column {missing[0]}",
            "restore the copy from MLflow or the run's bucket, or move the file away; only the curves need it",
        )
    for row in reader:
        several = [each.rpartition("=") for each in (row.pop("losses", None) or "").split(";") if each]
        row.update({f"loss_{name}": value for name, _, value in several})
        try:
            values = {
                name: math.nan
                if value in ("", "None")
                else float(value == "True")
                if value in ("True", "False")
                else float(value)
                for name, value in row.items()
            }
        except (TypeError, ValueError):
            continue
        rows.append(values)
    return rows


def record_of(row: Mapping[str, str]) -> StepRecord:
    """Record of a row, given by column. Values missing in rows from MLflow and older versions are 0 or NaN. Raises
    ValueError."""
    return StepRecord(
        step=int(row["step"]),
        loss=float(row["loss"]),
        count=float(row["count"] or math.nan),
        num_samples=int(float(row["num_samples"] or 0)),
        learning_rate=float(row["learning_rate"] or math.nan),
        grad_norm=float(row["grad_norm"]) if row["grad_norm"] else None,
        step_time_s=float(row["step_time_s"] or 0.0),
        input_wait_s=float(row["input_wait_s"] or 0.0),
        epoch=float(row["epoch"] or math.nan),
        is_finite=row["is_finite"] == "True",
        world_size=int(float(row["world_size"] or 1)),
        recorded_at=float(row.get("recorded_at") or 0.0),
    )


def to_text(ranges: Iterable[Range]) -> str:
    """Ranges of steps as part of a sentence."""
    words = [f"{first}" if first == last else f"{first} to {last}" for first, last in ranges]
    return ", ".join(words[:5]) + (f" and {len(words) - 5} more ranges" if len(words) > 5 else "")
