"""`scaleray checkpoint`: look at stored checkpoints, prove and mend them, and carry weights out and in."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from cyclopts import App

from scaleray.cli import checkpoint_files
from scaleray.cli.checkpoint_options import CopyPath, Json, Step, Where
from scaleray.cli.checkpoint_path import chosen, empty, opened
from scaleray.cli.output import print_json
from scaleray.errors import CheckpointError, UsageError
from scaleray.text.units import disk_space

if TYPE_CHECKING:
    from scaleray.checkpoints.catalog import Catalog
    from scaleray.checkpoints.damage import Damage
    from scaleray.checkpoints.manifest import Manifest
    from scaleray.checkpoints.retention import Retention

checkpoint_app = App(
    name="checkpoint", help="Look at stored checkpoints, prove and mend them.", help_format="plaintext"
)

LEFTOVER_S = 3600.0
"""Seconds for which files that no manifest names stay: a run that is under way may be writing them."""


@checkpoint_app.command(name="list")
def list_(path: Where, *, copy_path: CopyPath = None, json: Json = False) -> int:
    """List what is stored: complete checkpoints, and what is left of others with the reason."""
    with opened(path, copy_path) as (catalog, only):
        rows = [_row(catalog, step) for step in catalog.steps() if only in (None, step)]
        if not rows:
            raise empty(path)
    if json:
        print_json({"checkpoints": rows})
        return 0
    table = [["step", "written at", "workers", "strategy", "written", "total", "chain", "metrics"]]
    for row in rows:
        if row["complete"]:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["created_at"]))
            metrics = ", ".join(f"{name} {value:.4g}" for name, value in sorted(row["metrics"].items()))
            if metrics and (of := row["evaluated_at"]) != row["step"]:
                metrics += " (of an unknown step)" if of is None else f" (of step {of})"
            sizes = [disk_space(row["bytes_written"]), disk_space(row["total_bytes"]), str(row["chain"] or "full")]
            table.append([str(row["step"]), at, str(row["world_size"]), row["strategy"], *sizes, metrics])
        else:
            table.append([str(row["step"]), f"not usable: {row['reason']}"])
    _print_table(table)
    print(f"{sum(row['complete'] for row in rows)} complete of {len(rows)} in {catalog.stores[0].root}")
    return 0


@checkpoint_app.command
def verify(
    path: Where, *, step: Step = None, copy_path: CopyPath = None, heal: bool = False, json: Json = False
) -> int:
    """Read every file again and compare it with its SHA-256. Exit code 0 when all is good, 1 when damage is left.

    Parameters
    ----------
    step
        Only this checkpoint; by default all.
    heal
        Replace a lost or damaged file by its second copy.
    """
    from scaleray.checkpoints.catalog import require
    from scaleray.checkpoints.manifest import Incomplete

    checked: list[dict[str, Any]] = []
    unfinished: list[str] = []
    with opened(path, copy_path) as (catalog, only):
        step = only if step is None else step
        manifests: list[Manifest] = []
        if step is not None:
            manifests = [require(catalog, step, where=path)]
        else:
            for number in catalog.steps():
                try:
                    manifests.append(catalog.read(number))
                except Incomplete as exc:
                    unfinished.append(str(exc))
            if not manifests:
                require(catalog, None, where=path)
        for manifest in manifests:
            damages = catalog.check(manifest, heal=heal)
            left = [damage for damage in damages if damage.healed_from is None]
            checked.append(
                {
                    "step": manifest.step,
                    "files": len(manifest.files),
                    "good": not left,
                    "damages": [_told(d) for d in damages],
                }
            )
    is_good = all(one["good"] for one in checked)
    if json:
        print_json({"good": is_good, "checkpoints": checked, "unfinished": unfinished})
        return 0 if is_good else 1
    for one in checked:
        print(f"step {one['step']}: {'good' if one['good'] else 'DAMAGED'}, {one['files']} files")
        for damage in one["damages"]:
            outcome = "healed from" if damage["healed_from"] else "a good copy is" if damage["good_at"] else ""
            end = f"; {outcome} {damage['good_at']}" if outcome else "; there is no good copy"
            print(f"  {damage['file']}: {damage['problem']}{end}")
    for reason in unfinished:
        print(f"not a checkpoint: {reason}")
    if not is_good and not heal and any(d["good_at"] for one in checked for d in one["damages"]):
        print("to take the copies: the same command with --heal")
    return 0 if is_good else 1


@checkpoint_app.command
def prune(
    path: Where,
    *,
    keep_last: int = 2,
    keep_best: int = 1,
    best: str | None = None,
    keep_every: int | None = None,
    dry_run: bool = False,
    copy_path: CopyPath = None,
    json: Json = False,
) -> int:
    """Remove checkpoints that are not worth their place. Files that a kept checkpoint builds on stay.

    Parameters
    ----------
    keep_last
        Newest that stay, at least 1.
    keep_best
        Best that stay as well, by --best.
    best
        Metric and direction, such as "val/loss min"; it counts for a checkpoint only if it was measured at its step.
    keep_every
        One every so many steps stays.
    dry_run
        Say what would go, and remove nothing.
    """
    retention = _retention(keep_last, keep_best, best, keep_every)
    with opened(path, copy_path) as (catalog, only):
        if only is not None:
            raise CheckpointError("the folder to prune", path, "it is a single checkpoint", "name the run folder")
        complete = list(catalog.complete())
        if not complete:
            raise empty(path)
        _require_measured(retention.best, complete)
        done = catalog.prune(retention, spared_s=LEFTOVER_S, is_dry_run=dry_run)
    kept = [m.step for m in complete if m.step not in done.steps]
    if json:
        print_json({"removed": done.steps, "kept": kept, "bytes": done.num_bytes, "dry_run": dry_run})
        return 0
    verb = "would remove" if dry_run else "removed"
    print(f"{verb} {len(done.steps)} checkpoints, {disk_space(done.num_bytes)}: steps {_numbers(done.steps)}")
    print(f"kept: steps {_numbers(kept)}")
    return 0


@checkpoint_app.command
def rebuild(path: Where, *, step: Step = None, copy_path: CopyPath = None, json: Json = False) -> int:
    """Write an incremental checkpoint anew as a full one, which depends on no other."""
    with chosen(path, step, copy_path) as (catalog, manifest):
        full = catalog.rebuild(manifest) if manifest.chain or _borrows(manifest) else manifest
    if json:
        is_new = full is not manifest
        print_json(
            {"step": full.step, "bytes_written": full.bytes_written if is_new else 0},
            written={"checkpoint": f"{catalog.stores[0].root}/{full.name}"} if is_new else {},
        )
    elif full is manifest:
        print(f"step {full.step} holds every byte itself already")
    else:
        print(f"step {full.step} depends on no other now: {disk_space(full.bytes_written)} written")
    return 0


checkpoint_app.command(checkpoint_files.export)
checkpoint_app.command(checkpoint_files.import_, name="import")


def _row(catalog: Catalog, step: int) -> dict[str, Any]:
    from scaleray.checkpoints.manifest import Incomplete

    try:
        found = catalog.read(step)
    except Incomplete as exc:
        return {"step": step, "complete": False, "reason": str(exc)}
    except CheckpointError as exc:
        return {"step": step, "complete": False, "reason": f"{exc.what} is {exc.found}, but {exc.allowed}"}
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


def _told(damage: Damage) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(damage)


def _borrows(manifest: Manifest) -> bool:
    return any(not name.startswith(f"{manifest.name}/") for name in manifest.files)


def _retention(keep_last: int, keep_best: int, best: str | None, keep_every: int | None) -> Retention:
    """What prune keeps. Raises UsageError for what cannot be meant."""
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
    """Refuse a metric that no checkpoint has of its own step: a slip would remove what it was meant to keep."""
    measured = {name for manifest in complete for name in manifest.own_metrics}
    if metric is not None and metric not in measured:
        known = f"there are: {', '.join(sorted(measured)) or 'none'}"
        raise UsageError("--best", metric, "no checkpoint was evaluated at its own step with that metric", known)


def _best(text: str | None) -> tuple[str | None, str]:
    if text is None:
        return None, "min"
    metric, _, direction = text.rpartition(" ")
    if not metric or direction not in ("min", "max"):
        raise UsageError("--best", text, "it must be a metric and min or max", 'for example "val/loss min"')
    return metric, direction


def _numbers(steps: list[int]) -> str:
    return ", ".join(map(str, sorted(steps))) or "none"


def _print_table(rows: list[list[str]]) -> None:
    columns = max(map(len, rows))
    full = [row for row in rows if len(row) == columns]
    widths = [max(len(row[i]) for row in full) for i in range(columns)]
    widths[0] = max(len(row[0]) for row in rows)
    for row in rows:
        print(
            "  ".join(
                cell.rjust(width) if cell[:1].isdigit() and i != 1 else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=False))
            ).rstrip()
        )
