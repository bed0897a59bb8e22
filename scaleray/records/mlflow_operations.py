"""Write operations on MLflow as values. A writer queues them, a store executes them, and an outbox keeps those that
MLflow does not accept."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaleray.records.chart_points import Point
from scaleray.records.run_record import EventRecord

EVENT_TAG = "scaleray.event."


@dataclass(frozen=True)
class LogMetrics:
    """Points of metrics: (name, value, wall clock in ms since 1970, step)."""

    points: list[Point]

    def after(self, known: Mapping[str, int]) -> LogMetrics:
        """The operation without the points that MLflow already has. known: newest step of each metric there."""
        return LogMetrics([point for point in self.points if point[3] > known.get(point[0], -1)])


@dataclass(frozen=True)
class LogParams:
    """Params of the run, which are written once and cannot change."""

    values: Mapping[str, Any]


@dataclass(frozen=True)
class SetTags:
    """Tags of the run; the last value of each counts."""

    values: Mapping[str, Any]

    @classmethod
    def of_event(cls, number: int, event: EventRecord) -> SetTags:
        """Tag of a run's nth event, counted from 1."""
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.recorded_at))
        return cls({f"{EVENT_TAG}{number:03d}": f"{at} | {event.text}"[:4000]})


@dataclass(frozen=True)
class LogArtifact:
    """A local file or folder to upload. folder: its folder among the artifacts; None: at their root."""

    path: str
    folder: str | None = None


@dataclass(frozen=True)
class LogDataset:
    """A data set that the run reads. context: its split. source and profile: as JSON values."""

    name: str
    digest: str
    source: Any
    profile: Any
    context: str


@dataclass(frozen=True)
class EndRun:
    """End of the run. status: FINISHED, FAILED or KILLED. end_time: in ms since 1970."""

    status: str
    end_time: int


@dataclass(frozen=True)
class LogChild:
    """A finished child run, written as a whole. key: of its point or trial. Times are in ms since 1970."""

    key: str
    name: str
    tags: Mapping[str, str]
    params: Mapping[str, Any]
    points: Sequence[Point]
    started_at: int
    ended_at: int
    status: str = "FINISHED"


@dataclass(frozen=True)
class LogToChildren:
    """Points of metrics for child runs, by key; children that MLflow lacks are skipped."""

    points: Mapping[str, Sequence[Point]]


@dataclass(frozen=True)
class LearnChildren:
    """Load the children of a resumed run; incomplete ones are removed."""


@dataclass(frozen=True)
class RemoveHalfWritten:
    """Remove empty children left by a request that MLflow's client gave up on and repeated."""


@dataclass(frozen=True)
class SaveView:
    """A tag of the experiment that holds a chart page. Skipped if MLflow refuses it."""

    key: str
    value: str


Operation = LogMetrics | LogParams | SetTags | LogArtifact | LogDataset | EndRun
StudyOperation = Operation | LogChild | LogToChildren | LearnChildren | RemoveHalfWritten | SaveView
"""Operations on a study or a sweep. They are not stored in files, since its record contains everything."""
KINDS: dict[str, type[Any]] = {
    "metrics": LogMetrics, "params": LogParams, "tags": SetTags, "artifact": LogArtifact, "dataset": LogDataset,
    "status": EndRun,
}  # fmt: skip
"""Names of the operations, as used in files."""
_NAMES = {kind: name for name, kind in KINDS.items()}


def pieces_of(operation: Operation) -> list[Operation]:
    """Split the operation into one per point, param or tag, if it has several."""
    if isinstance(operation, LogMetrics):
        return [LogMetrics([point]) for point in operation.points]
    if isinstance(operation, LogParams | SetTags):
        return [type(operation)({name: value}) for name, value in operation.values.items()]
    return [operation]


def shown(operation: Operation) -> str:
    """Short description of the operation."""
    if isinstance(operation, LogMetrics):
        return f"a point of the metric {operation.points[0][0]!r}" if operation.points else "points of metrics"
    if isinstance(operation, LogArtifact):
        return f"the file {operation.path}"
    values = getattr(operation, "values", None)
    return f"the {_NAMES[type(operation)].removesuffix('s')} {next(iter(values), '')!r}" if values else "an operation"


def to_json(operation: Operation) -> str:
    """The operation as one line of unsent.jsonl."""
    return json.dumps({"op": _NAMES[type(operation)], **vars(operation)})


def from_json(value: Any) -> Operation | None:
    """Parse an operation from a JSON value; None if it cannot be sent to a run."""
    if not isinstance(value, Mapping) or not isinstance(name := value.get("op"), str) or name not in KINDS:
        return None
    fields = dataclasses.fields(KINDS[name])
    needed = [field.name for field in fields if field.default is dataclasses.MISSING]
    if any(key not in value for key in needed):
        return None
    if name == "metrics" and not (isinstance(value["points"], list) and all(map(_is_point, value["points"]))):
        return None
    if "values" in value and not isinstance(value["values"], Mapping):
        return None
    found: Operation = KINDS[name](**{field.name: value[field.name] for field in fields if field.name in value})
    return LogMetrics([(n, v, at, step) for n, v, at, step in found.points]) if isinstance(found, LogMetrics) else found


def _is_point(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 4
        and isinstance(value[0], str)
        and all(isinstance(number, (int, float)) for number in value[1:])
    )
