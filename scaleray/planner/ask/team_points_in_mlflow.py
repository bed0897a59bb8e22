"""Measured points of a team's studies in MLflow, for corrections of the planner."""

import dataclasses
import tempfile
from collections.abc import Collection
from pathlib import Path

from scaleray.planner.answers.team_points import TeamPoints, points_of
from scaleray.recording.experiments import read_experiments
from scaleray.recording.find_record import reading_mlflow
from scaleray.recording.store import open_client, resolve_uri
from scaleray.records.experiment import Experiment
from scaleray.records.read import FILE, AnyRecord, parse_record
from scaleray.records.study_record import StudyRecord


def points_in_mlflow(uri: str | None = None) -> TeamPoints:
    """Return the points of all studies in MLflow from their records, except invalid or changed studies."""
    store = resolve_uri(uri)
    found = read_experiments(uri, kinds=["study", "point"])
    unusable = {one.run_id: one for one in found if one.kind == "point" and not one.is_usable}
    records: list[StudyRecord] = []
    skipped: list[str] = []
    for one in (one for one in found if one.kind == "study"):
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
