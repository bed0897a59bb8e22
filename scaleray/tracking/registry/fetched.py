"""The files of a promoted version on this machine, as they were when it was promoted."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

from scaleray.errors import TrackingError, first_line
from scaleray.gates.statement import STATEMENT, digests, file_digest, subjects
from scaleray.own_folder import own_folder
from scaleray.parsing import load_json, load_yaml
from scaleray.tracking.registry.models import STATEMENT_TAG, ModelRegistry, ModelVersion, Named

NAMED_BY_MLFLOW = "registered_model_meta"
"""File in which MLflow notes the name and number of a version that it has downloaded; in the version's own folder where
that is local."""
MODEL = Path("data/packed")
"""Folder of the packed model among the files of a version."""


def fetch_model(name: str, *, uri: str | None = None) -> Path:
    """The packed model that `models:/NAME@ALIAS` or `models:/NAME/3` names, in a folder of this user's.

    Every file is compared with the statement of its promotion. Raises TrackingError for a version that is not there,
    was not promoted by scaleray, or has been changed since.
    """
    named = Named.parse(name)
    registry = ModelRegistry(uri)
    version = registry.find(named)
    if not version.tags.get(STATEMENT_TAG):
        allowed = "it was not made by scaleray promote, and says not what it was made from"
        raise TrackingError("the model", str(named), allowed, "MLflow itself loads it: mlflow.pyfunc.load_model")
    place = own_folder() / "models" / version.tags[STATEMENT_TAG][:32]
    if place.is_dir() and not changes(place, version):
        return place / MODEL
    place.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        found = registry.download(version, Path(folder))
        if wrong := changes(found, version):
            allowed = "its files must be those of its promotion"
            check = f"scaleray promote --verify {named}"
            raise TrackingError(f"the model {named}", f"changed: {'; '.join(wrong[:3])}", allowed, check)
        shutil.rmtree(place, ignore_errors=True)
        found.rename(place)
    return place / MODEL


def check_served(packed: Path, *, uri: str | None) -> None:
    """Refuse a packed model in a folder of MLflow's that is not as it was promoted, before anything of it is loaded.

    Its files must be those of the statement. Where MLflow noted the version's name in the folder, as it does for
    `models:/NAME@ALIAS`, the statement must be that of the version in the registry. uri: the registry's. Logs that it
    could not be asked. Raises TrackingError.
    """
    folder, version = packed.parents[len(MODEL.parts) - 1], None
    try:
        named = load_yaml((folder / NAMED_BY_MLFLOW).read_text())
        version = ModelRegistry(uri).find(Named(str(named["model_name"]), number=int(named["model_version"])))
    except (OSError, ValueError, KeyError, TypeError, TrackingError) as exc:
        text = "the model in %s is not compared with MLflow's registry: %s"
        logging.getLogger(__name__).warning(text, folder, first_line(exc))
    if wrong := changes(folder, version):
        allowed = "its files must be those of its promotion"
        raise TrackingError(f"the model in {folder}", f"changed: {'; '.join(wrong[:3])}", allowed, "download it again")


def changes(folder: Path, version: ModelVersion | None) -> list[str]:
    """What differs from the statement, or the statement from the version's tag, in words; none where all is whole.
    version: None compares with the statement alone."""
    if not (folder / STATEMENT).is_file():
        return [f"{STATEMENT} is missing"]
    if version is not None and file_digest(folder / STATEMENT) != version.tags.get(STATEMENT_TAG):
        return [f"{STATEMENT} is not the one that the version was made with"]
    expected, found = subjects(load_json((folder / STATEMENT).read_bytes())), digests(folder)
    found.pop(NAMED_BY_MLFLOW, None)
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    wrong += [f"{name} was changed" for name in sorted(expected) if name in found and found[name] != expected[name]]
    return wrong + [f"{name} was added" for name in sorted(found.keys() - expected.keys())]
