"""Find a model's run from the user's input, and its workload from the run's config."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scaleray.checkpoints.storage import Store
from scaleray.common.parsing import inert_json, load_json
from scaleray.common.printed import printable
from scaleray.config import RunConfig
from scaleray.config.base import without_password
from scaleray.errors import TrackingError, UsageError, WorkloadError, first_line
from scaleray.models.fetched import fetch_model
from scaleray.models.packed_code import installed_module, packed_module
from scaleray.models.registry import MODEL_URI
from scaleray.recording.find_record import FoundRun, find_run, locations_of, record_of
from scaleray.recording.store import named_or_in_use, resolve_uri
from scaleray.records.run_record import RunRecord
from scaleray.workload import build_workload, load_workload

NOTE, RECORD = "run.json", "record.json"
PACKED, CODE = "packed", "code"
"""Key in run.json that marks a packed model, a folder with one model without its run; its value is the code folder."""


@dataclass(frozen=True)
class TrainedRun:
    """A training with files. folder: their location. where: location as shown to users. about: content of its run.json,
    or the same facts from its record. record: None for a run that has not ended or was killed."""

    folder: Store
    where: str
    about: dict[str, Any]
    config: RunConfig
    record: RunRecord | None

    @property
    def name(self) -> str:
        """Name of the run."""
        return printable(self.about.get("name") or self.folder.name)

    @property
    def steps(self) -> int | None:
        """Optimizer steps at the training's successful end, or None."""
        if self.about.get(PACKED):
            return self.about.get("steps")
        return self.record.steps if self.record is not None and self.record.status == "FINISHED" else None


def find_trained(run: str | Path, *, uri: str | None = None) -> TrainedRun:
    """Find a training by folder or bucket, name in the default storage path, id or name in MLflow, or as the source of
    a model in MLflow's registry, `models:/NAME@ALIAS`.

    uri: MLflow's; None: scaleray's own. Raises TrackingError."""
    run = str(run)
    if run.startswith(MODEL_URI):
        uri = resolve_uri(uri)  # the user named a model in it
        run = str(fetch_model(run, uri=uri))
    for location in locations_of(run):
        if (about := _note(location)) is not None:
            return _checked(location, _with_uri(about, uri))
    return trained_of(find_run(run, uri=uri), uri=uri)


def trained_of(found: FoundRun, *, uri: str | None = None) -> TrainedRun:
    """The training of a record. Raises TrackingError for a study or sweep."""
    record = found.record
    if not isinstance(record, RunRecord):
        raise TrackingError(
            "RUN", found.where, "it is a study or sweep, which has no model", "name one of its trainings"
        )
    if found.location is not None and (about := _note(found.location)) is not None:
        return _checked(found.location, _with_uri(about, uri), record)
    # what MLflow knows lies where the run wrote it, or among its artifacts
    folder = Store(record.run_dir)
    about = _note(folder) or {
        "name": record.name,
        "run_id": record.run_id,
        "experiment_id": record.experiment_id,
        "tracking_uri": resolve_uri(uri),
        "config": record.config,
    }
    return _checked(folder, about, record)


def workload_of(run: TrainedRun, given: Any = None) -> Any:
    """The workload of a run: a given object or class, or a name `file.py:Name`; None for the one in the run's config.
    Raises WorkloadError if it is not found."""
    settings, name, imported = run.config.workload, run.config.workload.name, None
    if run.about.get(PACKED) and given is None:
        code = Path(run.folder.root) / CODE
        imported = partial(packed_module, code) if code.is_dir() else installed_module
    base_dir = Path(run.about["base_dir"]) if run.about.get("base_dir") else None
    if isinstance(given, type):
        return build_workload(given, settings.args, name=given.__name__)
    if given is not None and not isinstance(given, str):
        return given
    try:
        return load_workload(given or name, settings.args, base_dir=base_dir, imported=imported)
    except WorkloadError as exc:
        if given is not None:
            raise
        raise WorkloadError.problem(
            f"the workload {settings.name} of {run.name}",
            f"cannot be found: {exc}",
            "name the workload: --workload path/to/file.py:Name, or from Python the class: workload=Name",
        ) from exc


def _note(location: Store) -> dict[str, Any] | None:
    """Content of a folder's run.json; None if it cannot be read."""
    try:
        about = load_json(inert_json(location.read(NOTE)))
    except (OSError, ValueError):
        return None
    return about if isinstance(about, dict) and isinstance(about.get("config"), dict) else None


def _with_uri(about: dict[str, Any], uri: str | None) -> dict[str, Any]:
    return {**about, "tracking_uri": named_or_in_use(about.get("tracking_uri"), uri)}


def _checked(folder: Store, about: dict[str, Any], record: RunRecord | None = None) -> TrainedRun:
    where = without_password(folder.root)
    try:
        config = RunConfig.model_validate(about["config"])
    except ValueError as exc:
        raise UsageError(
            f"the config of the run in {where}",
            "not valid in this version",
            first_line(exc),
            "load it with the version that trained it (see environment.yaml in its folder)",
        ) from exc
    return TrainedRun(folder, where, about, config, record or _record(folder))


def _record(folder: Store) -> RunRecord | None:
    try:
        found = record_of(folder.read(RECORD), where=f"{without_password(folder.root)}/{RECORD}")
    except (OSError, TrackingError):
        return None
    return found if isinstance(found, RunRecord) else None
