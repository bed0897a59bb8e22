"""Recovery of a resumed run's points: its files and MLflow restore each other's missing points, and lost points are
reported.

steps.csv should have every step, and MLflow every point. Either may lack some because a process was killed between two
writes, a server was unreachable, or a file is damaged."""

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scaleray.checkpoints.storage import Store
from scaleray.common import metric_names as names
from scaleray.common.parsing import load_yaml
from scaleray.errors import TrackingError, first_line
from scaleray.live.steps_file import StepsFile, record_of, to_text
from scaleray.recording.spool import Spool
from scaleray.recording.store import without_password
from scaleray.records.chart_points import Point, Points
from scaleray.records.mlflow_operations import EVENT_TAG, LogMetrics, Operation
from scaleray.records.run_description import RunDescription

NEEDED = ("num_samples", "learning_rate", "step_time_s", "epoch", "world_size", "recorded_at")
"""Columns that a row needs in order to make points; rows from MLflow or from older versions lack some."""
EXACT = {
    names.LOSS.name: "loss", names.LEARNING_RATE.name: "learning_rate", names.GRAD_NORM.name: "grad_norm",
    names.EPOCH.name: "epoch", names.WORKERS.name: "world_size",
}  # fmt: skip
"""Metrics whose points are values of a single step, with their columns. Rates are means over several steps."""


@dataclass(frozen=True)
class KnownRun:
    """Points of a run in MLflow. last_steps: newest step of each metric. steps: steps whose loss is there."""

    last_steps: dict[str, int]
    steps: set[int]
    all_tags: dict[str, str]

    def tags(self, prefix: str) -> list[str]:
        """Values of the tags whose names begin with `prefix`, in the order of their names."""
        return [text for name, text in sorted(self.all_tags.items()) if name.startswith(prefix)]

    def events(self) -> list[str]:
        """Texts of the run's events, in order."""
        return [text.partition(" | ")[2] for text in self.tags(EVENT_TAG)]


class Recovery:
    """Restores the recorder's own files and points, in the recorder's thread. say: receives sentences about damaged or
    lost data."""

    def __init__(
        self, description: RunDescription, steps: StepsFile, points: Points, spool: Spool, *, say: Callable[[str], None]
    ) -> None:
        self.description, self.steps, self.points, self.spool, self._say = description, steps, points, spool, say

    def ask_mlflow(self) -> KnownRun:
        """Points of this run in MLflow. Raises TrackingError if MLflow does not return them, since points would
        otherwise be sent twice."""
        store = self.spool.store
        assert store is not None, "the run is open"
        try:
            steps = {step for *_, step in store.history(names.LOSS.name)}
            return KnownRun(store.last_steps(), steps, store.tags("scaleray."))
        except Exception as exc:  # mlflow, its HTTP client and its database drivers share no base class
            raise TrackingError.problem(
                "The points",
                f"of run {store.run_id} cannot be read from MLflow at {without_password(store.uri)}: {first_line(exc)}",
                "resume once it answers",
            ) from exc

    def send_what_mlflow_lacks(self, known: KnownRun) -> list[Operation]:
        """Take over the unsent operations of the interrupted process. Returns the points in its other files that MLflow
        lacks."""
        d = self.description
        self.points.known = dict(known.last_steps)
        if self.steps.damage:
            self._say(f"{self.steps.path.name} was damaged: {self.steps.damage}{self._kept_as()}")
        self._mend_small_files()
        self.spool.take_over(d.run_path if d.run_path != d.work_dir else None, self.points.known)
        kept = {step for name, *_, step in self.spool.points() if name == names.LOSS.name}
        lacking = points_of(
            self.steps.rows(), known.steps | kept, every_steps=d.every_steps, tokens_per_sample=d.tokens_per_sample
        )
        if not lacking:
            return []
        for name, *_, step in lacking:
            self.points.known[name] = max(step, self.points.known.get(name, -1))
        steps = sorted({step for *_, step in lacking})
        self._say(
            f"MLflow lacked {len(steps)} of the steps {steps[0]} to {steps[-1]}, "
            f"which {self.steps.path.name} has: sent again"
        )
        return [LogMetrics(lacking)]

    def go_on_after(self, step: int, *, flush: Callable[[], None]) -> None:
        """Repair steps.csv up to this step, after which training begins or continues; nothing more will be learnt about
        earlier steps. flush: writes pending rows before the file is read."""
        if self.steps.lacks(max(step, self.steps.last_step)):
            flush()
            self.mend_steps(step)

    def mend_steps(self, after: int) -> None:
        """Restore rows of steps.csv from MLflow if they are missing, up to the step after which training continues."""
        lacks = self.steps.lacks(after)
        wanted = {step for first, last in lacks for step in range(first, last + 1)}
        points, problem = self.spool.points(), ""
        try:
            if wanted and self.spool.store is not None:
                points += [point for name in EXACT for point in self.spool.store.history(name)]
        except Exception as exc:  # whatever MLflow raises, training goes on
            problem = f"MLflow could not be queried for them ({type(exc).__name__})"
        found = rows_of(points, wanted)
        if found and self.steps.kept_as is None:
            self.steps.keep_damaged()
        self.steps.mend(after, found)
        if lacks:
            outcome = problem or f"MLflow had {len(found) or 'none'} of them"
            outcome += ", which are restored without the values that it does not store" if found else ""
            left = self.steps.lacks(after)
            outcome += f"; steps {to_text(left)} are lost" if left else ""
            self._say(f"{self.steps.path.name} lacked steps {to_text(lacks)}: {outcome}{self._kept_as()}")

    def _mend_small_files(self) -> None:
        """Write config.yaml and derived.yaml again if they cannot be read."""
        d = self.description
        place, here = Store(d.run_path or d.work_dir), Store(d.work_dir)
        for name, text in d.files.items():
            content = b""
            with contextlib.suppress(OSError):
                content = place.read(name)
            if _is_yaml_mapping(content):
                continue
            if content:
                here.write(f"{name}.damaged", [content])
                self._say(f"{name} was damaged and has been rewritten; the old one is kept as {name}.damaged")
            here.write_text(name, text)

    def _kept_as(self) -> str:
        return f"; it is kept as {self.steps.kept_as.name}" if self.steps.kept_as is not None else ""


def rows_of(points: Iterable[Point], steps: Collection[int]) -> dict[int, dict[str, Any]]:
    """Rows of steps.csv by step, from points in MLflow. Columns that MLflow does not store stay empty."""
    rows: dict[int, dict[str, Any]] = {}
    for name, value, timestamp, step in points:
        if step in steps and name in EXACT:
            row = rows.setdefault(step, {"step": step, "is_finite": True, "recorded_at": timestamp / 1000})
            row[EXACT[name]] = int(value) if name == names.WORKERS.name else value
            if name == names.LOSS.name:
                row["is_finite"] = math.isfinite(value)
    return {step: row for step, row in rows.items() if "loss" in row}


def points_of(
    rows: Iterable[Mapping[str, str]], logged: Collection[int], *, every_steps: int, tokens_per_sample: int | None
) -> list[Point]:
    """Points from rows of steps.csv, without those of the steps in `logged`, whose loss is already in MLflow."""
    found: list[Point] = []
    points = Points(every_steps=every_steps, tokens_per_sample=tokens_per_sample)
    num_nonfinite = 0
    for row in rows:
        if all(row[column] for column in NEEDED) and float(row["step_time_s"]) > 0:
            record = record_of(row)
            num_nonfinite += not record.is_finite
            points.add_step(record, num_nonfinite=num_nonfinite)
            new = points.take()
            found += new if record.step not in logged else []
    return found


def _is_yaml_mapping(content: bytes) -> bool:
    try:
        return isinstance(load_yaml(content.decode()), dict)
    except ValueError:
        return False
