"""Stored checkpoints of a run, and operations on them: the commands of `scaleray checkpoint`. Each function returns
what its command prints with `--json`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleray.errors import CheckpointError, StorageError, UsageError, first_line

if TYPE_CHECKING:
    from scaleray.checkpoints.catalog import Catalog
    from scaleray.checkpoints.damage import Damage
    from scaleray.checkpoints.manifest import Manifest
    from scaleray.checkpoints.memory_store import Generations
    from scaleray.checkpoints.retention import Retention

MEMORY = "memory"
"""Folder name of states in memory."""
LEFTOVER_S = 3600.0
"""Seconds for which files without a manifest are kept, as an active training may be writing them."""


def list_checkpoints(run: str | Path, *, copy_path: str | None = None) -> list[dict[str, Any]]:
    """Stored checkpoints of a run: a mapping for each, with the reason if it is not usable.

    With RAY_ADDRESS, also those in the memory of that cluster's nodes. run: its folder, local or s3://, its name in the
    storage path, or one checkpoint's folder. copy_path: location of second copies; None: the run's own setting. Raises
    CheckpointError if there are none."""
    with opened(str(run), copy_path) as (catalog, only):
        folder = catalog.stores[0].root
        rows = [{**_row(catalog, step), "folder": folder} for step in catalog.steps() if only in (None, step)]
        with _in_memory(catalog) as held:
            rows += [{**_row(held, m.step), "folder": MEMORY} for m in held.found()[0] if only in (None, m.step)]
        if not rows:
            raise empty(str(run))
        return rows


def verify_checkpoints(
    run: str | Path, *, step: int | None = None, copy_path: str | None = None, heal: bool = False
) -> dict[str, Any]:
    """Read every file of a run's checkpoints and compare it with its SHA-256; `["good"]`: whether all are intact.

    run, copy_path: as for `list_checkpoints`. step: only this checkpoint. heal: replace a lost or damaged file by its
    second copy.
    """
    from scaleray.checkpoints.catalog import require
    from scaleray.checkpoints.damage import Damage
    from scaleray.checkpoints.manifest import FILE_NAME, Damaged, Incomplete, folder_name, step_of
    from scaleray.checkpoints.weight_sums import check_manifest

    checked: list[dict[str, Any]] = []
    unfinished: list[str] = []
    with opened(str(run), copy_path) as (catalog, only):
        step = only if step is None else step
        manifests: list[Manifest] = []
        if step is not None:
            manifests = [require(catalog, step, where=str(run))]
        else:
            for number in catalog.steps():
                try:
                    manifests.append(catalog.read(number))
                except Damaged as exc:
                    damage = Damage(catalog.stores[0].path(f"{folder_name(number)}/{FILE_NAME}"), str(exc))
                    checked.append({"step": number, "files": 0, "good": False, "damages": [_told(damage)]})
                except Incomplete as exc:
                    unfinished.append(str(exc))
        for manifest in manifests:
            damages = catalog.check(manifest, heal=heal)
            try:
                check_manifest(catalog.stores[0], manifest)
            except CheckpointError as exc:
                damages.append(Damage(str(exc.what), f"{exc.found}: {exc.allowed}"))
            checked.append(_checked(manifest, damages))
        with _in_memory(catalog) as held:
            found, damages = held.found()
            for manifest in [m for m in found if step in (None, m.step)]:
                checked.append({**_checked(manifest, held.check(manifest)), "folder": MEMORY})
            for damage in damages:
                at = step_of(damage.file.split("/")[-2])
                checked.append({"step": at, "files": 0, "good": False, "damages": [_told(damage)], "folder": MEMORY})
        if not checked:
            require(catalog, None, where=str(run))
    return {"good": all(one["good"] for one in checked), "checkpoints": checked, "unfinished": unfinished}


def prune_checkpoints(
    run: str | Path,
    *,
    keep_last: int = 2,
    keep_best: int = 1,
    best: str | None = None,
    keep_every: int | None = None,
    dry_run: bool = False,
    copy_path: str | None = None,
) -> dict[str, Any]:
    """Remove superfluous checkpoints, except files that a remaining checkpoint needs.

    run, copy_path: as for `list_checkpoints`. keep_last: number of newest checkpoints to keep. keep_best: number of
    best checkpoints to keep in addition, by `best`, a metric and its direction such as `val/loss min`. keep_every: also
    keep one every this many steps. dry_run: only report."""
    retention = _retention(keep_last, keep_best, best, keep_every)
    with opened(str(run), copy_path) as (catalog, only):
        if only is not None:
            raise CheckpointError("the folder to prune", str(run), "it is a single checkpoint", "name the run folder")
        complete = list(catalog.complete())
        if not complete:
            raise empty(str(run))
        _require_measured(retention.best, complete)
        done = catalog.prune(retention, spared_s=LEFTOVER_S, is_dry_run=dry_run)
    kept = [m.step for m in complete if m.step not in done.steps]
    return {"removed": done.steps, "kept": kept, "bytes": done.num_bytes, "dry_run": dry_run}


def rebuild_checkpoint(run: str | Path, *, step: int | None = None, copy_path: str | None = None) -> dict[str, Any]:
    """Rewrite an incremental checkpoint as a full one, which does not depend on others.

    run, copy_path: as for `list_checkpoints`. step: None is the newest. `["checkpoint"]` is None if it was already
    full."""
    from scaleray.checkpoints.weight_sums import check_manifest

    with chosen(str(run), step, copy_path) as (catalog, manifest):
        is_new = bool(manifest.chain) or any(not name.startswith(f"{manifest.name}/") for name in manifest.files)
        if is_new and check_manifest(catalog.stores[0], manifest):
            raise CheckpointError.problem(
                f"the checkpoint of step {manifest.step}",
                "cannot be rebuilt: the run has finished, so its record has the checkpoint's hash",
                f"to write only its weights: scaleray export {run} --step {manifest.step} --out weights.safetensors",
            )
        full = catalog.rebuild(manifest) if is_new else manifest
    place = f"{catalog.stores[0].root}/{full.name}" if is_new else None
    return {"step": full.step, "bytes_written": full.bytes_written if is_new else 0, "checkpoint": place}


def import_weights(file: str | Path, folder: str | Path) -> dict[str, Any]:
    """Make a checkpoint from a plain file of weights, with which `workload.weights` can start a training.

    file: a .pt file of torch.save with tensors only, or a .safetensors file. folder: a new folder, local or s3://.
    """
    from scaleray.checkpoints.consolidated import import_weights as read
    from scaleray.config.base import absolute_path

    target = absolute_path(str(folder))
    with written(str(folder)):
        manifest = read(absolute_path(str(file)), target)
    return {"path": target, "tensors": len(manifest.tensors), "bytes": manifest.total_bytes}


def _row(catalog: Catalog, step: int) -> dict[str, Any]:
    from scaleray.checkpoints.manifest import Incomplete

    try:
        found = catalog.read(step)
    except Incomplete as exc:
        return {"step": step, "complete": False, "reason": str(exc)}
    except CheckpointError as exc:
        return {"step": step, "complete": False, "reason": first_line(exc)}
    return {
        "step": step,
        "complete": True,
        "created_at": found.created_at,
        "world_size": found.world_size,
        "strategy": found.strategy,
        "bytes_written": found.bytes_written,
        "total_bytes": found.total_bytes,
        "chain": found.chain,
        "metrics": found.metrics,
        "evaluated_at": found.evaluated_at,
    }


def _checked(manifest: Manifest, damages: list[Damage]) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "files": len(manifest.files),
        "good": all(damage.healed_from is not None for damage in damages),
        "damages": [_told(damage) for damage in damages],
    }


@contextlib.contextmanager
def _in_memory(catalog: Catalog) -> Iterator[Generations]:
    """States of a run in the memory of the cluster at RAY_ADDRESS; none without an address."""
    from scaleray.checkpoints.memory_store import Generations

    address = os.environ.get("RAY_ADDRESS")
    if not address:
        yield Generations([])
        return
    from scaleray.launch.cluster.connection import joined
    from scaleray.training.recovery.node_holders import stores_of

    with joined(address, name="RAY_ADDRESS"):
        yield Generations(stores_of(catalog.stores[0].parent.root))


def _told(damage: Damage) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(damage)


def _retention(keep_last: int, keep_best: int, best: str | None, keep_every: int | None) -> Retention:
    """Checkpoints that prune keeps. Raises UsageError for an invalid request."""
    from scaleray.checkpoints.retention import Retention

    metric, direction = _best(best)
    for option, value, least in (
        ("--keep-last", keep_last, 1),
        ("--keep-best", keep_best, 0),
        ("--keep-every", keep_every, 1),
    ):
        if value is not None and value < least:
            raise UsageError(option, value, f"it must be at least {least}")
    return Retention(keep_last, keep_best, metric, direction == "max", keep_every)


def _require_measured(metric: str | None, complete: list[Manifest]) -> None:
    """Refuse a metric without a value at any checkpoint's own step, as a typo would remove the best checkpoints."""
    measured = {name for manifest in complete for name in manifest.own_metrics}
    if metric is not None and metric not in measured:
        known = f"there are: {', '.join(sorted(measured)) or 'none'}"
        raise UsageError("--best", metric, "no checkpoint has an evaluation of this metric at its step", known)


def _best(text: str | None) -> tuple[str | None, str]:
    if text is None:
        return None, "min"
    metric, _, direction = text.rpartition(" ")
    if not metric or direction not in ("min", "max"):
        raise UsageError("--best", text, "it must be a metric and min or max", 'for example "val/loss min"')
    return metric, direction


@contextlib.contextmanager
def opened(path: str, copy_path: str | None) -> Iterator[tuple[Catalog, int | None]]:
    """Open the catalog of a path; also returns the step if the path names one. Unreachable storage raises one error."""
    from pyarrow import ArrowInvalid

    from scaleray.checkpoints.catalog import FOLDER, Catalog
    from scaleray.config.base import absolute_path
    from scaleray.config.checkpoint import default_storage_path

    where = _meant(path)
    if "://" not in where and not _exists(where):
        raise CheckpointError("the path", path, "it does not exist", f"run folders are in {default_storage_path()}")
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
    """Catalog and one checkpoint of a path, by default the newest complete one. Damage raises a single error."""
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
                f"scaleray checkpoint verify {shlex.quote(path)} searches for copies",
            ) from exc


@contextlib.contextmanager
def written(path: str) -> Iterator[None]:
    """Context for writing to a path, in which unreachable storage raises a single error."""
    from pyarrow import ArrowInvalid

    try:
        yield
    except (OSError, ArrowInvalid) as exc:
        raise StorageError("the path", path, f"it cannot be written: {first_line(exc)}") from exc


def empty(path: str) -> CheckpointError:
    """The error for a path without stored checkpoints."""
    return CheckpointError(
        "the path",
        path,
        "it contains no complete checkpoint",
        "name a run folder, or a checkpoint in it; scaleray export can use final weights without a checkpoint",
    )


def _meant(path: str) -> str:
    """Absolute path or URI. A bare name that is not a local path is taken for a run folder in the default storage
    path."""
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
