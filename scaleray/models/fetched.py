"""The files of a promoted version on this machine, unchanged since its promotion."""

import contextlib
import logging
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from scaleray.common.own_folder import cache_folder
from scaleray.common.parsing import load_json, load_yaml
from scaleray.errors import TrackingError, first_line
from scaleray.models.registry import STATEMENT_TAG, ModelRegistry, ModelVersion, Named
from scaleray.records.statement import STATEMENT, digests, file_digest, subjects

NAMED_BY_MLFLOW = "registered_model_meta"
"""File in which MLflow notes the name and number of a version that it has downloaded, in the version's own folder if
that is local."""
MODEL = Path("data/packed")
"""Folder of the packed model among the files of a version."""
KEPT = 3
"""Number of fetched versions that are retained, no matter when they were last used."""
UNUSED_S = 86400.0
"""Seconds after its last use before another version may be removed, as a process may still be reading it."""


def fetch_model(name: str, *, uri: str | None = None) -> Path:
    """Fetch the packed model named by `models:/NAME@ALIAS` or `models:/NAME/3` to this user's cache folder.

    Every file is compared with the statement of its promotion. Raises TrackingError for a version that is missing, was
    not promoted by scaleray, or has changed since."""
    named = Named.parse(name)
    registry = ModelRegistry(uri)
    version = registry.find(named)
    if not version.tags.get(STATEMENT_TAG):
        allowed = "it was not created by scaleray promote and does not state its source"
        raise TrackingError("the model", str(named), allowed, "load it with MLflow itself: mlflow.pyfunc.load_model")
    models = cache_folder("models")
    if (copy := _whole(models, version)) is not None:
        return copy / MODEL
    with tempfile.TemporaryDirectory(dir=models) as folder:
        found = registry.download(version, Path(folder))
        if wrong := changes(found, version):
            text = f"has files that changed since its promotion: {'; '.join(wrong[:3])}"
            raise TrackingError.problem(f"the model {named}", text, f"scaleray promote --verify {named}")
        # another process may have fetched it meanwhile, and reads it: nothing is replaced
        copy = _whole(models, version) or found.rename(models / f"{_digest(version)}-{Path(folder).name}")
    _remove_unused(models)
    return copy / MODEL


def check_served(packed: Path, *, uri: str | None) -> None:
    """Refuse a changed packed model in an MLflow folder before loading anything. Its files must match the statement. If
    MLflow noted the version's name in the folder, as it does for `models:/NAME@ALIAS`, the statement must match that of
    the version in the registry. uri: address of the registry. Logs a message if the registry cannot be reached. Raises
    TrackingError."""
    folder, version = packed.parents[len(MODEL.parts) - 1], None
    try:
        named = load_yaml((folder / NAMED_BY_MLFLOW).read_text())
        version = ModelRegistry(uri).find(Named(str(named["model_name"]), number=int(named["model_version"])))
    except (OSError, ValueError, KeyError, TypeError, TrackingError) as exc:
        text = "the model in %s is not compared with MLflow's registry: %s"
        logging.getLogger(__name__).warning(text, folder, first_line(exc))
    if wrong := changes(folder, version):
        text = f"has files that changed since its promotion: {'; '.join(wrong[:3])}"
        raise TrackingError.problem(f"the model in {folder}", text, "download it again")


def _digest(version: ModelVersion) -> str:
    """Hash of the statement in the version's tag; empty if the tag has another value, such as a path."""
    tag = version.tags.get(STATEMENT_TAG, "")
    return tag[:32] if re.fullmatch("[0-9a-f]{64}", tag) else ""


def _whole(models: Path, version: ModelVersion) -> Path | None:
    """A complete folder with a version's files, now marked as used; None if there is none."""
    for copy in sorted(models.glob(f"{_digest(version)}-*")) if _digest(version) else ():
        if not changes(copy, version):
            os.utime(copy)
            return copy
    return None


def _remove_unused(models: Path) -> None:
    """Remove models and interrupted downloads that were not used for a day, except the newest ones."""
    with contextlib.suppress(FileNotFoundError):  # another process removes them
        used = sorted((copy.stat().st_mtime, copy) for copy in models.iterdir())
        for at, copy in used[:-KEPT]:
            if time.time() - at > UNUSED_S:
                shutil.rmtree(copy, ignore_errors=True)


def changes(folder: Path, version: ModelVersion | None) -> list[str]:
    """Differences between files and statement, or statement and version tag, as text; empty if there are none. version:
    None compares only with the statement."""
    if not (folder / STATEMENT).is_file():
        return [f"{STATEMENT} is missing"]
    if version is not None and file_digest(folder / STATEMENT) != version.tags.get(STATEMENT_TAG):
        return [f"{STATEMENT} does not belong to the version"]
    expected, found = subjects(load_json((folder / STATEMENT).read_bytes())), digests(folder)
    found.pop(NAMED_BY_MLFLOW, None)
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    wrong += [f"{name} was changed" for name in sorted(expected) if name in found and found[name] != expected[name]]
    return wrong + [f"{name} was added" for name in sorted(found.keys() - expected.keys())]
