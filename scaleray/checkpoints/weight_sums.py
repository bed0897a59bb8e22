"""SHA-256 of the files of final weights and of checkpoint manifests, written at the end of a run and checked before
every load.

The list is next to the files: `weights.sha256.json` next to `weights.pt`, `sha256.json` in a folder such as `weights`.
record.json also contains it, with the hashes of the manifests; MLflow has a copy of both."""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleray.checkpoints.damage import problem_of
from scaleray.checkpoints.manifest import FILE_NAME, Manifest, StoredFile
from scaleray.checkpoints.model_layout import ADAPTERS, FINAL_WEIGHTS, TRAINED_WEIGHTS, plain_file
from scaleray.checkpoints.storage import Store
from scaleray.common.parsing import load_json
from scaleray.errors import CheckpointError, first_line

SUMS, RECORD, NOTE = "sha256.json", "record.json", "run.json"
CHANGED = "files of a finished run must not change: copy it again, or choose a checkpoint (--step best or --step N)"


def sums_name(file: str) -> str:
    """Name of the list with a file's hash. file: relative to the run's folder."""
    folder, _, name = file.rpartition("/")
    return f"{folder}/{SUMS}" if folder else f"{name.removesuffix('.pt')}.{SUMS}"


def write_sums(run: Store, files: Sequence[str]) -> dict[str, StoredFile]:
    """Write and return the list for the files of one set of weights, named relative to the run's folder."""
    found = {file: StoredFile(*run.digest(file)) for file in files}
    values = {file.rpartition("/")[2]: dataclasses.asdict(stored) for file, stored in found.items()}
    run.write_text(sums_name(files[0]), json.dumps(values, indent=1))
    return found


def check_weights(run: Store, files: Sequence[str], *, recorded: Mapping[str, Any] | None = None) -> None:
    """Compare files of one set of final weights with the hashes that the run recorded.

    files: names relative to the run's folder. recorded: `weights` of the run's record; None reads it from the folder.
    Logs a warning if the run recorded no hash. Raises CheckpointError if a file or one of the lists differs."""
    folder = files[0].rpartition("/")[0]
    listed = _parsed(run, name := sums_name(files[0]), _values(run, name), prefix=f"{folder}/" if folder else "")
    stated = _parsed(run, RECORD, _recorded(run, "weights") if recorded is None else recorded)
    if not listed and not stated:
        if _is_training(run):
            text = "%s recorded no hash of its final weights (an older version, or an unsuccessful end): not checked"
            logging.getLogger(__name__).warning(text, run.path("").rstrip("/"))
        return
    for file in files:
        expected = [known.get(file) for known in (listed, stated) if known]
        if len(set(expected)) > 1:
            raise _changed(run, file, f"different in {name} and {RECORD}", "one of them was changed")
        problem = "not among the run's files" if expected[0] is None else problem_of(run, file, expected[0])
        if problem is not None:
            raise _changed(run, file, f"changed or damaged ({problem})", f"{name if listed else RECORD} has its hash")


def check_manifest(folder: Store, manifest: Manifest, recorded: Mapping[str, Any] | None = None) -> bool:
    """Whether the run's record has the hash of this checkpoint, as records of finished runs do. folder: checkpoints
    folder of the run. recorded: `checkpoints` in the record; None reads it from the record. Raises CheckpointError if
    the hash differs."""
    stated = _recorded(folder.parent, "checkpoints") if recorded is None else recorded
    known = stated.get(manifest.name) if isinstance(stated, Mapping) else None
    if known not in (None, manifest.sha256):
        name, found = f"{manifest.name}/{FILE_NAME}", "not the file written by the run"
        raise _changed(folder, name, found, f"{RECORD} has its hash")
    return known is not None


def check_file(path: str) -> None:
    """Check the hash of a local file if it contains final weights. Raises CheckpointError, see `check_weights`."""
    file = Path(path).absolute()
    if (file.parent / SUMS).is_file():
        check_weights(Store(str(file.parent.parent)), [f"{file.parent.name}/{file.name}"])
    elif file.name in map(plain_file, (FINAL_WEIGHTS, TRAINED_WEIGHTS, ADAPTERS)):
        check_weights(Store(str(file.parent)), [file.name])


def _values(run: Store, name: str) -> Any:
    try:
        return load_json(run.read(name))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise _changed(run, name, f"damaged ({first_line(exc)})", "it has the hashes of the final weights") from exc


def _recorded(run: Store, key: str) -> Mapping[str, Any]:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a run that has not ended, or a torn record
        return load_json(run.read(RECORD)).get(key) or {}
    return {}


def _parsed(run: Store, name: str, values: Any, prefix: str = "") -> dict[str, StoredFile]:
    try:
        return {f"{prefix}{file}": StoredFile(one["sha256"], one["num_bytes"]) for file, one in values.items()}
    except (AttributeError, KeyError, TypeError) as exc:
        raise _changed(
            run, name, "damaged (no list of hashes)", "it has the hash of each file of the final weights"
        ) from exc


def _is_training(run: Store) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return not load_json(run.read(NOTE)).get("packed")
    return False


def _changed(run: Store, file: str, found: str, allowed: str) -> CheckpointError:
    return CheckpointError(run.path(file), found, allowed, CHANGED)
