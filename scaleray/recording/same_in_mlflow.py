"""Compare the files of a folder with MLflow's copy: a training's record and alerts, a study with its points, or a
certificate. Each function returns None if MLflow cannot be reached or has no copy.

The MLflow used is always the reader's, never the one named in the record, since a changed record could name another
store."""

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from scaleray.live.run_alerts import ALERT_TAG
from scaleray.recording.seal import last_values, problem_of
from scaleray.recording.store import check_reachable, open_client, resolve_uri, sqlite_path
from scaleray.recording.study_values import as_points, point_name, point_values, relative_values
from scaleray.records.accepted_names import acceptable_name
from scaleray.records.experiment import CERTIFICATE_SHA256, INVALID
from scaleray.records.json_record import JsonRecord, leaves
from scaleray.records.read import FILE
from scaleray.records.run_record import RunRecord
from scaleray.records.study_record import CurvePoint, StudyRecord

CERTIFICATE = "certificate.json"


def differences_from_mlflow(
    record: RunRecord, *, alerts: Sequence[str] | None = None, uri: str | None = None
) -> list[str] | None:
    """Keys in which a training's record differs from MLflow's copy or from the last values of MLflow's metrics, alerts
    that only MLflow has, and a mark there that the run is invalid. alerts: names in its alerts.jsonl; None if there is
    no such file. uri: tracking URI; None for scaleray's own."""

    def differing(client: Any) -> list[str]:
        stored = client.get_run(record.run_id)
        run, found = stored.data, _withdrawn(stored) + _other_keys(record, _kept(client, record.run_id, FILE))
        found += [
            f"metrics.{name}"
            for name, value in sorted(record.metrics.items())
            if value is not None and run.metrics.get(acceptable_name(name), value) != value
        ]
        if alerts is not None:
            recorded = {key.removeprefix(ALERT_TAG) for key in run.tags if key.startswith(ALERT_TAG)}
            found += [f"alert {name}" for name in sorted(recorded - {*alerts})]
        return found

    return _asked(record.run_id, uri, differing)


def study_differences(study: StudyRecord, *, uri: str | None = None) -> list[str] | None:
    """Keys in which a study's record differs from MLflow's copy, and faults of its points there: invalid, deleted, or
    different from their seals or from the record."""

    def differing(client: Any) -> list[str]:
        found = _withdrawn(client.get_run(study.run_id))
        found += _other_keys(study, _kept(client, study.run_id, FILE))
        for curve in study.curves:
            for at in curve.points:
                found += [f"{point_name(at.point)}: {problem}" for problem in _of_point(client, at)]
        return found

    return _asked(study.run_id, uri, differing)


def certificate_differences(run_id: str, sha256: str, *, uri: str | None = None) -> list[str] | None:
    """Text about how a certificate.json with this SHA-256 differs from the one that `scaleray verify` recorded, and
    about a mark there that the run is invalid."""

    def differing(client: Any) -> list[str]:
        stored = client.get_run(run_id)
        tags = stored.data.tags
        recorded = {hashlib.sha256(_kept(client, run_id, CERTIFICATE)).hexdigest()}
        recorded |= {tags[CERTIFICATE_SHA256]} if CERTIFICATE_SHA256 in tags else set()
        return _withdrawn(stored) + ([] if recorded == {sha256} else ["its content is not what was recorded"])

    return _asked(run_id, uri, differing)


def _asked(run_id: str, uri: str | None, differing: Callable[[Any], list[str]]) -> list[str] | None:
    with contextlib.suppress(Exception):  # mlflow, its HTTP client and its database drivers share no base class
        store = resolve_uri(uri)
        if not run_id or (store.startswith("sqlite:///") and not sqlite_path(store).exists()):
            return None
        check_reachable(store, timeout_s=2.0)
        return differing(open_client(store))
    return None


def _kept(client: Any, run_id: str, name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return Path(client.download_artifacts(run_id, name, folder)).read_bytes()


def _withdrawn(run: Any) -> list[str]:
    """Text about a run that was deleted in MLflow or marked as invalid there; empty for any other run."""
    tags = run.data.tags
    found = ["it was deleted"] if run.info.lifecycle_stage == "deleted" else []
    return found + ([f"it is invalid there: {tags[INVALID]}"] if INVALID in tags else [])


def _other_keys(record: JsonRecord, kept: bytes) -> list[str]:
    """Keys that differ between two records, both read by this version."""
    mine, theirs = (dict(leaves(one.to_dict())) for one in (record, type(record).from_json(kept)))
    missing = object()
    return [key for key in sorted({*mine, *theirs}) if mine.get(key, missing) != theirs.get(key, missing)]


def _of_point(client: Any, at: CurvePoint) -> Iterator[str]:
    """Differences of a point from its copy in MLflow. Raises an error if it is not there."""
    run = client.get_run(at.point.run_id)
    tags, metrics = run.data.tags, run.data.metrics
    yield from _withdrawn(run)
    if problem := problem_of(tags, run.data.params, metrics):
        yield problem
    relative = [] if at.point.reused_from else relative_values(at)  # of another curve, where another study measured it
    recorded = last_values(as_points([*point_values(at.point), *relative]))
    yield from (name for name, value in sorted(recorded.items()) if name in metrics and metrics[name] != value)
