"""`scaleray checkpoint export` to a folder, as another library reads it."""

from __future__ import annotations

from pathlib import Path

from scaleray.cli.output import print_json
from scaleray.errors import UsageError
from scaleray.text.units import disk_space


def is_folder(file: str) -> bool:
    """Whether a name on the command line means a folder: it has no ending and is no URI."""
    return "://" not in file and not Path(file).suffix


def export(
    path: str, folder: str, *, step: int | None, weights: str | None, adapter: bool, overwrite: bool, json: bool
) -> int:
    """Write the folder, and say what is in it."""
    from scaleray.launch.model.export import export_folder

    done = export_folder(path, folder, step=step, weights=weights, adapter=adapter, overwrite=overwrite)
    if json:
        print_json({"step": done.step, "folder": folder, "bytes": done.num_bytes}, written={"folder": done.folder})
    else:
        print(f"wrote {'the adapters of ' if adapter else ''}{done.words}, {disk_space(done.num_bytes)}, to {folder}")
    return 0


def no_adapter(file: str) -> UsageError:
    """The refusal of --adapter for a file."""
    return UsageError("--adapter", file, "an adapter is a folder, so its name has no ending")
