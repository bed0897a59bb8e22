"""Stored checkpoints of a path: a run folder, a run's name, or one checkpoint's folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleray.errors import CheckpointError, StorageError, first_line

if TYPE_CHECKING:
    from scaleray.checkpoints.catalog import Catalog
    from scaleray.checkpoints.manifest import Manifest


@contextlib.contextmanager
def opened(path: str, copy_path: str | None) -> Iterator[tuple[Catalog, int | None]]:
    """The catalog of a path, and the step if the path names one. Unreachable storage is reported as one
    error."""
    from pyarrow import ArrowInvalid

    from scaleray.checkpoints.catalog import FOLDER, Catalog
    from scaleray.config.base import absolute_path
    from scaleray.config.checkpoint import default_storage_path

    where = _meant(path)
    if "://" not in where and not _exists(where):
        raise CheckpointError("the path", path, "it does not exist", f"folders of runs are in {default_storage_path()}")
    try:
        catalog, step = Catalog.at(where)
        if copy_path is None and catalog.stores[0].name == FOLDER:
            copy_path = _copy_path_of(catalog.stores[0].parent)
        if copy_path:
            catalog, step = Catalog.at(where, absolute_path(copy_path))
        if step is not None and step not in catalog.steps():
            raise CheckpointError(
                "the path", path, "no such checkpoint exists", "scaleray checkpoint list RUN shows the existing ones"
            )
        yield catalog, step
    except (OSError, ArrowInvalid) as exc:  # ArrowInvalid for a bad URI
        raise StorageError("the path", path, f"it cannot be read or written: {first_line(exc)}") from exc


@contextlib.contextmanager
def chosen(path: str, step: int | None, copy_path: str | None) -> Iterator[tuple[Catalog, Manifest]]:
    """Catalog and one checkpoint of a path, by default the newest complete one. Damage is reported in one message."""
    from scaleray.checkpoints.catalog import require
    from scaleray.checkpoints.manifest import Incomplete

    with opened(path, copy_path) as (catalog, only):
        manifest = require(catalog, only if step is None else step, where=path)
        try:
            yield catalog, manifest
        except Incomplete as exc:
            raise CheckpointError(
                f"the checkpoint of step {manifest.step}",
                "damaged",
                str(exc),
                f"scaleray checkpoint verify {path} looks for copies",
            ) from exc


@contextlib.contextmanager
def written(path: str) -> Iterator[None]:
    """Context for writing to a path. Unreachable storage is reported as one
    error."""
    from pyarrow import ArrowInvalid

    try:
        yield
    except (OSError, ArrowInvalid) as exc:
        raise StorageError("the path", path, f"it cannot be written: {first_line(exc)}") from exc


def empty(path: str) -> CheckpointError:
    """The error for a path under which no checkpoint is stored."""
    return CheckpointError(
        "the path",
        path,
        "it holds no complete checkpoint",
        "name a run folder, or one checkpoint in it; scaleray export takes final weights without one",
    )


def _meant(path: str) -> str:
    """Absolute path or URI; a bare name that is not a local path is a run folder in the default storage path."""
    from scaleray.config.base import absolute_path
    from scaleray.config.checkpoint import default_storage_path

    where = absolute_path(path)
    return f"{default_storage_path()}/{path}" if "/" not in path and not Path(where).exists() else where


def _exists(where: str) -> bool:
    try:
        return Path(where).exists()
    except OSError:  # a folder above that may not be entered: reading it says so
        return True


def _copy_path_of(run: Any) -> str | None:
    from scaleray.common.parsing import load_json

    try:
        found = load_json(run.read("run.json"))["config"]["checkpoint"]["copy_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None
