"""`scaleray checkpoint`: list, verify and repair stored checkpoints, and import weights as one."""

from __future__ import annotations

import time
from typing import Annotated

from cyclopts import App, Parameter

from scaleray.cli.options import Json
from scaleray.cli.output import print_json, with_stages
from scaleray.common.printed import printable, quantity
from scaleray.records.text.units import disk_space

Where = Annotated[
    str, Parameter(help="A run folder, local or s3://; a run's name in the storage path; or one checkpoint's folder.")
]
Step = Annotated[int | None, Parameter(help="Step of the checkpoint; by default the newest complete one.")]
CopyPath = Annotated[
    str | None, Parameter(help="Path of the second copies, as in checkpoint.copy_path; by default that of the run.")
]

checkpoint_app = App(name="checkpoint", help="List, verify and repair stored checkpoints.", help_format="plaintext")


@checkpoint_app.command(name="list")
def list_(path: Where, *, copy_path: CopyPath = None, json: Json = False) -> int:
    """List the stored checkpoints: complete ones, and the remains of others with the reason.

    If RAY_ADDRESS is set, states in the memory of that cluster's nodes are listed as well."""
    from scaleray.models.stored_checkpoints import MEMORY, list_checkpoints

    with with_stages():
        rows = list_checkpoints(path, copy_path=copy_path)
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
            chain = "in memory" if row["folder"] == MEMORY else str(row["chain"] or "full")
            sizes = [disk_space(row["bytes_written"]), disk_space(row["total_bytes"]), chain]
            table.append([str(row["step"]), at, str(row["world_size"]), row["strategy"], *sizes, metrics])
        else:
            table.append([str(row["step"]), f"not usable: {row['reason']}"])
    _print_table(table)
    print(f"{sum(row['complete'] for row in rows)} complete of {len(rows)} in {rows[0]['folder']}")
    return 0


@checkpoint_app.command
def verify(
    path: Where, *, step: Step = None, copy_path: CopyPath = None, heal: bool = False, json: Json = False
) -> int:
    """Read all files and compare them with their SHA-256. Exit code 0 if all are good, 1 if damage remains.

    Parameters
    ----------
    step
        Verify only this checkpoint; by default all.
    heal
        Replace lost or damaged files by their second copies.
    """
    from scaleray.models.stored_checkpoints import MEMORY, verify_checkpoints

    with with_stages():
        found = verify_checkpoints(path, step=step, copy_path=copy_path, heal=heal)
    is_good, checked = found["good"], found["checkpoints"]
    if json:
        print_json(found)
        return 0 if is_good else 1
    for one in checked:
        place = " in memory" if one.get("folder") == MEMORY else ""
        print(f"step {one['step']}{place}: {'good' if one['good'] else 'DAMAGED'}, {quantity(one['files'], 'file')}")
        for damage in one["damages"]:
            outcome = "healed from" if damage["healed_from"] else "a good copy is" if damage["good_at"] else ""
            end = f"; {outcome} {damage['good_at']}" if outcome else "; there is no good copy"
            print(f"  {damage['file']}: {damage['problem']}{end}")
    for reason in found["unfinished"]:
        print(f"not a checkpoint: {reason}")
    if not is_good and not heal and any(d["good_at"] for one in checked for d in one["damages"]):
        print("to use the copies, add --heal")
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
    """Remove superfluous checkpoints. Files needed by a retained checkpoint stay.

    Parameters
    ----------
    keep_last
        Number of newest checkpoints to retain, at least 1.
    keep_best
        Number of best checkpoints to retain as well, by --best.
    best
        Metric and direction, such as "val/loss min"; only checkpoints at whose step it was measured are ranked.
    keep_every
        Interval in steps between checkpoints to retain.
    dry_run
        Print what would be removed, and remove nothing.
    """
    from scaleray.models.stored_checkpoints import prune_checkpoints

    with with_stages():
        done = prune_checkpoints(
            path,
            keep_last=keep_last,
            keep_best=keep_best,
            best=best,
            keep_every=keep_every,
            dry_run=dry_run,
            copy_path=copy_path,
        )
    if json:
        print_json(done)
        return 0
    verb = "would remove" if dry_run else "removed"
    removed = quantity(len(done["removed"]), "checkpoint")
    print(f"{verb} {removed}, {disk_space(done['bytes'])}: steps {_numbers(done['removed'])}")
    print(f"kept: steps {_numbers(done['kept'])}")
    return 0


@checkpoint_app.command
def rebuild(path: Where, *, step: Step = None, copy_path: CopyPath = None, json: Json = False) -> int:
    """Rewrite an incremental checkpoint as a full one that does not depend on others."""
    from scaleray.models.stored_checkpoints import rebuild_checkpoint

    with with_stages():
        done = rebuild_checkpoint(path, step=step, copy_path=copy_path)
    place = done.pop("checkpoint")
    if json:
        print_json(done, written={"checkpoint": place} if place else {})
    elif place is None:
        print(f"step {done['step']} already holds every byte itself")
    else:
        print(f"step {done['step']} no longer depends on others: {disk_space(done['bytes_written'])} written")
    return 0


@checkpoint_app.command(name="import")
def import_(file: str, path: str, *, json: Json = False) -> int:
    """Convert a weights file to a checkpoint from which a training can start (--workload.weights PATH).

    Parameters
    ----------
    file
        A .pt file written by torch.save with tensors only, or a .safetensors file.
    path
        New folder, local or s3://.
    """
    from scaleray.models.stored_checkpoints import import_weights

    with with_stages():
        done = import_weights(file, path)
    if json:
        print_json(done, written={"checkpoint": done["path"]})
    else:
        print(
            f"imported {done['tensors']} tensors, {disk_space(done['bytes'])}; "
            f"start from them with --workload.weights {path}"
        )
    return 0


def _numbers(steps: list[int]) -> str:
    return ", ".join(map(str, sorted(steps))) or "none"


def _print_table(rows: list[list[str]]) -> None:
    rows = [[printable(cell) for cell in row] for row in rows]
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
