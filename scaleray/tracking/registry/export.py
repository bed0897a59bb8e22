"""The registry for other programs: a Parquet table of all experiments, and what the planner learns from."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from scaleray.errors import ConfigError, StorageError, UsageError, first_line
from scaleray.planner.answers.team_points import TeamPoints, points_of
from scaleray.records.experiment import COLUMNS, Experiment
from scaleray.records.printed import quantity
from scaleray.records.read import FILE, AnyRecord, parse_record
from scaleray.records.study import StudyRecord
from scaleray.tracking.find_record import reading_mlflow
from scaleray.tracking.registry.choose import ALL_KINDS, list_experiments
from scaleray.tracking.store import open_client, resolve_uri

TABLE, POINTS = ".parquet", ".json"
NUMBERS = (
    "gpus", "global_batch", "worker_hours", "cost", "samples_per_s", "step_time_s", "efficiency", "speedup", "mfu",
)  # fmt: skip


def export_experiments(
    out: str | Path,
    *,
    model: str | None = None,
    gpus: int | None = None,
    since: str | None = None,
    where: str | None = None,
    kinds: Sequence[str] = (),
    uri: str | None = None,
) -> list[str]:
    """Write experiments to a file and return lines on what it holds: `scaleray registry export`.

    out: a .parquet file with a row for each experiment, trials too, its fields as columns and every metric under its
    name in MLflow; or a .json file of measured points for `scaleray plan --learn`. The others choose as those of
    `list_experiments`. Invalid and changed experiments are in the table with the reason, and not among the points.
    """
    path = Path(out)
    if path.suffix not in (TABLE, POINTS):
        raise ConfigError("--out", str(out), "it must end in .parquet, or in .json for plan --learn")
    is_table = path.suffix == TABLE
    chosen = kinds or (ALL_KINDS if is_table else ("study",))
    found = list_experiments(model=model, gpus=gpus, since=since, where=where, kinds=chosen, uri=uri)
    try:
        if is_table:
            _write_table(path, found)
            return [f"{len(found)} experiments: {path}"]
        points = team_points([one for one in found if one.kind == "study"], uri=uri)
        if not points.points:
            raise UsageError(
                "the points to learn from", None, "; ".join(points.skipped[:3]) or "no study is among the experiments"
            )
        path.write_text(points.to_json())
    except OSError as exc:
        raise StorageError("--out", str(out), f"it cannot be written: {exc.strerror or first_line(exc)}") from exc
    return [
        f"{quantity(len(points.points), 'point')} of {quantity(len(points.models), 'model')}: {path}",
        *(f"left out: {reason}" for reason in points.skipped),
        f"learn from them: scaleray plan -c FILE --cluster ... --learn {path}",
    ]


def team_points(studies: Sequence[Experiment], *, uri: str | None) -> TeamPoints:
    """What these studies teach the planner, by their records in MLflow; single points that are invalid or changed do
    not."""
    store = resolve_uri(uri)
    unusable = {one.run_id: one for one in list_experiments(kinds=["point"], uri=uri) if not one.is_usable}
    records: list[StudyRecord] = []
    skipped: list[str] = []
    for one in studies:
        name = str(one.values.get("name"))
        if not one.is_usable:
            skipped.append(f"{name}: {one.values.get('invalid') or one.problem}")
            continue
        record = _record_of(one, store)
        if isinstance(record, StudyRecord):
            records.append(_without(record, unusable))
            own = [point for point in unusable.values() if point.parent_id == one.run_id]
            skipped += [f"{name}, {p.values.get('name')}: {p.values.get('invalid') or p.problem}" for p in own]
        else:
            skipped.append(f"{name}: it has no {FILE} of a study; its status is {one.values['status']}")
    known = points_of(records)
    return TeamPoints(known.points, known.models, (*skipped, *known.skipped))


def points_in_mlflow(uri: str | None = None) -> TeamPoints:
    """What all studies in MLflow teach the planner."""
    return team_points(list_experiments(kinds=["study"], uri=uri), uri=uri)


def _record_of(one: Experiment, store: str) -> AnyRecord | None:
    with reading_mlflow(one.run_id, store), tempfile.TemporaryDirectory() as folder:
        client = open_client(store)
        if FILE not in {file.path for file in client.list_artifacts(one.run_id)}:
            return None
        return parse_record(Path(client.download_artifacts(one.run_id, FILE, folder)).read_bytes())


def _without(record: StudyRecord, unusable: Collection[str]) -> StudyRecord:
    curves = [
        dataclasses.replace(curve, points=[at for at in curve.points if at.point.run_id not in unusable])
        for curve in record.curves
    ]
    return dataclasses.replace(record, curves=curves)


def _write_table(path: Path, found: Sequence[Experiment]) -> None:
    import pyarrow
    import pyarrow.parquet

    metrics = sorted({name for one in found for name in one.metrics})
    columns: dict[str, pyarrow.Array] = {
        name: pyarrow.array([getattr(one, name) for one in found], pyarrow.string())
        for name in ("run_id", "parent_id", "problem")
    }
    for name in COLUMNS:
        values = [one.values.get(name) for one in found]
        if name in NUMBERS:
            columns[name] = pyarrow.array([None if v is None else float(v) for v in values], pyarrow.float64())
        else:
            columns[name] = pyarrow.array([None if v is None else str(v) for v in values], pyarrow.string())
    for name in metrics:
        columns.setdefault(name, pyarrow.array([one.metrics.get(name) for one in found], pyarrow.float64()))
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
