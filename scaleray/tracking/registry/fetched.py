"""The files of a promoted version on this machine, as they were when it was promoted."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from scaleray.errors import TrackingError
from scaleray.gates.statement import STATEMENT, digests, file_digest, subjects
from scaleray.own_folder import own_folder
from scaleray.parsing import load_json
from scaleray.tracking.registry.models import STATEMENT_TAG, ModelRegistry, ModelVersion, Named

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


def changes(folder: Path, version: ModelVersion) -> list[str]:
    """What differs from the statement, or the statement from the version's tag, in words; none where all is whole."""
    if not (folder / STATEMENT).is_file():
        return [f"{STATEMENT} is missing"]
    if file_digest(folder / STATEMENT) != version.tags.get(STATEMENT_TAG):
        return [f"{STATEMENT} is not the one that the version was made with"]
    expected, found = subjects(load_json((folder / STATEMENT).read_bytes())), digests(folder)
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    wrong += [f"{name} was changed" for name in sorted(expected) if name in found and found[name] != expected[name]]
    return wrong + [f"{name} was added" for name in sorted(found.keys() - expected.keys())]
