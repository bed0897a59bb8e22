"""Find a recorded run by its folder or bucket, its name, or its id or name in MLflow."""

import contextlib
import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaleray.checkpoints.model_layout import FINAL_WEIGHTS, TRAINED_WEIGHTS
from scaleray.checkpoints.storage import Store
from scaleray.config.checkpoint import default_storage_path
from scaleray.errors import TrackingError, first_line
from scaleray.recording.store import check_reachable, open_client, resolve_uri, sqlite_path, without_password
from scaleray.records.accepted_names import acceptable_name
from scaleray.records.alert_record import ALERTS_FILE
from scaleray.records.json_record import first_problem
from scaleray.records.read import FILE, AnyRecord, parse_record
from scaleray.records.run_record import RunRecord

ARTIFACTS = {FINAL_WEIGHTS: "model", TRAINED_WEIGHTS: "trained_model"}
"""Artifact folder with the weights of each name."""


def fetch_model_files(about: Mapping[str, Any], folder: Path, name: str = FINAL_WEIGHTS) -> Path | None:
    """Download weights of a run into `folder`, and return the subfolder that contains them; None if MLflow has none.

    about: content of the run's run.json. name: FINAL_WEIGHTS or TRAINED_WEIGHTS. Raises TrackingError if MLflow cannot
    be queried."""
    run_id, uri = about.get("run_id"), about.get("tracking_uri")
    if not run_id or not uri:
        return None
    uri = resolve_uri(uri)
    if uri.startswith("sqlite:///") and not sqlite_path(uri).exists():
        return None  # looking must not make a database
    check_reachable(uri)
    try:
        client = open_client(uri)
        if not client.list_artifacts(run_id, ARTIFACTS[name]):
            return None
        client.download_artifacts(run_id, ARTIFACTS[name], str(folder))
    except Exception as exc:  # mlflow, its HTTP client and its database drivers share no base class
        shown = without_password(uri)
        raise TrackingError.problem(
            "The weights", f"of {run_id} cannot be read from MLflow at {shown}: {first_line(exc)}"
        ) from exc
    return folder / ARTIFACTS[name]


STEPS = "steps.csv"

PARENT_TAG = "mlflow.parentRunId"


@dataclass(frozen=True)
class FoundRun:
    """A record and its location. steps: text of a training's steps.csv; None if there is none.

    location: folder of the record; None for a run that is only in MLflow. evaluations: (step, value) by metric. alerts:
    text of a training's alerts.jsonl; None if there is none."""

    record: AnyRecord
    where: str
    location: Store | None = None
    steps: str | None = None
    evaluations: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    alerts: str | None = None

    @property
    def folder(self) -> Path | None:
        """Folder of the record, if it is local."""
        return Path(self.location.root) if self.location is not None and self.location.is_local else None


def find_run(run: str, *, uri: str | None = None) -> FoundRun:
    """Find the run that `run` names: a folder or bucket with a record.json, that file itself, the name of a folder in
    the default storage path, or an ID or name in MLflow.

    uri: tracking URI; None for scaleray's own. Raises TrackingError if there is no such run, or if it has no record."""
    for location in locations_of(run):
        with contextlib.suppress(OSError, ValueError):
            text, where = location.read(FILE), without_password(location.root)
            record = record_of(text, where=f"{where}/{FILE}")
            steps = text_of(location, STEPS) if isinstance(record, RunRecord) else None
            return _with_evaluations(
                FoundRun(record, where, location, steps, alerts=text_of(location, ALERTS_FILE)), uri
            )
    return _with_evaluations(_in_mlflow(run, resolve_uri(uri)), uri)


def record_of(text: str | bytes, *, where: str) -> AnyRecord:
    """The record in the text of a record.json. Raises TrackingError for anything else."""
    try:
        return parse_record(text)
    except (ValueError, TypeError) as exc:  # pydantic's errors are ValueErrors
        raise TrackingError.problem(
            "The record", f"{where} is not that of a run, study or sweep of this version: {first_problem(exc)}"
        ) from exc


def locations_of(run: str) -> list[Store]:
    """Folders to which `run` may refer: itself, the folder of a record.json, or a folder of this name in the storage
    path."""
    if "://" in run:
        return [Store(run.removesuffix(f"/{FILE}"))]
    path = Path(run).expanduser().absolute()
    found = [Store(str(path.parent if path.name == FILE else path))]
    if "/" not in run and run not in (".", ".."):
        found.append(Store(f"{default_storage_path()}/{run}"))
    return found


def text_of(location: Store, name: str) -> str | None:
    """Text of a file, in which readers skip damaged lines; None if there is no file."""
    with contextlib.suppress(OSError):
        return location.read(name).decode(errors="replace")
    return None


def _in_mlflow(run: str, uri: str) -> FoundRun:
    with reading_mlflow(run, uri):
        client, found = runs_in_mlflow(run, uri)
        chosen = found[0].info.run_id
        with tempfile.TemporaryDirectory() as folder:
            names = {file.path for file in client.list_artifacts(chosen)}
            if FILE not in names:
                status = found[0].info.status
                raise TrackingError.problem(
                    "The MLflow run",
                    f"{chosen} has no {FILE}; its status is {status}",
                    "a run has one once it has ended",
                )
            text = Path(client.download_artifacts(chosen, FILE, folder)).read_bytes()
            steps, alerts = (
                Path(client.download_artifacts(chosen, name, folder)).read_text(errors="replace")
                if name in names
                else None
                for name in (STEPS, ALERTS_FILE)
            )
    where = f"MLflow run {chosen}" + (f", the newest of {len(found)} with this name" if len(found) > 1 else "")
    return FoundRun(record_of(text, where=where), where, None, steps, alerts=alerts)


@contextlib.contextmanager
def reading_mlflow(run: str, uri: str) -> Iterator[None]:
    """Context in which MLflow's errors become TrackingErrors that name the run."""
    try:
        yield
    except (TrackingError, ModuleNotFoundError):  # without MLflow the command says what to install
        raise
    except Exception as exc:  # mlflow, its HTTP client and its database drivers share no base class
        shown = without_password(uri)
        raise TrackingError.problem(
            "The run", f"{run} cannot be read from MLflow at {shown}: {first_line(exc)}"
        ) from exc


def runs_in_mlflow(run: str, uri: str) -> tuple[Any, list[Any]]:
    """MLflow's client, and the runs with this ID or name, newest first: at least one. Raises TrackingError."""
    unknown = TrackingError.problem(
        "RUN",
        f"{run} was not found: there is no folder with a {FILE} and no run of this id or name in MLflow at "
        f"{without_password(uri)}",
        "give a run's folder, or its database with --uri",
    )
    if uri.startswith("sqlite:///") and not sqlite_path(uri).exists():
        raise unknown  # looking must not make a database
    check_reachable(uri)
    client = open_client(uri)
    known = _candidates(client, run)
    found = [one for one in known if PARENT_TAG not in one.data.tags]
    if not found:
        raise _part_of_another(client, run, known[0]) if known else unknown
    return client, found


def _candidates(client: Any, run: str) -> Sequence[Any]:
    """Runs with this ID or name, newest first."""
    if re.fullmatch(r"[0-9a-f]{32}", run):
        with contextlib.suppress(Exception):
            return [client.get_run(run)]
    if "'" in run or len(run) > 250:  # no name that scaleray gives
        return []
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    query = f"attributes.run_name = '{run}'"
    found: Sequence[Any] = client.search_runs(
        experiments, query, order_by=["attributes.start_time DESC"], max_results=100
    )
    return found


def _part_of_another(client: Any, run: str, child: Any) -> TrackingError:
    """Error for a point of a study or a trial of a sweep, whose record is part of its parent's."""
    parent = child.data.tags[PARENT_TAG]
    with contextlib.suppress(Exception):
        parent = client.get_run(parent).info.run_name
    kind = child.data.tags.get("scaleray.kind", "part")
    return TrackingError.problem("RUN", f"{run} is a {kind} of {parent}, which holds its record", f"give {parent}")


def _with_evaluations(found: FoundRun, uri: str | None) -> FoundRun:
    """Add the history of evaluations to a run. Values that its record lacks, such as metrics of user code or those of
    an older record, are read from MLflow at `uri`, never from an address in the record; without MLflow they are left
    out."""
    record = found.record
    if not isinstance(record, RunRecord):
        return found
    for name, points in record.evaluations.items():
        found.evaluations[name] = [(int(step or 0), math.nan if value is None else value) for step, value in points]
    lacking = sorted(record.metrics.keys() - record.evaluations.keys())
    if not lacking or not record.run_id:
        return found
    with contextlib.suppress(Exception):
        uri = resolve_uri(uri)
        if uri.startswith("sqlite:///") and not sqlite_path(uri).exists():
            return found
        check_reachable(uri, timeout_s=2.0)
        client = open_client(uri)
        for name in lacking:
            history = client.get_metric_history(record.run_id, acceptable_name(name))
            found.evaluations[name] = sorted((metric.step, metric.value) for metric in history)
    return found
