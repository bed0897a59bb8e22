"""`checkpoint export` to a folder: the trained model as its own library reads it, or its adapters as peft does."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.model_layout import TRAINED
from scaleray.checkpoints.peft_adapter import write_adapter
from scaleray.errors import CheckpointError, StorageError, WorkloadError
from scaleray.filesystems import set_aside
from scaleray.launch.model.trained_run import TrainedRun, find_trained, workload_of
from scaleray.launch.model.weights import Weights, read_adapters, read_run_weights
from scaleray.progress import stage
from scaleray.training.setup import fine_tuning
from scaleray.workload import call_user_code, own_method


@dataclass(frozen=True)
class Exported:
    """A folder that was written. words: which weights are in it; num_bytes: of all its files."""

    folder: str
    words: str
    step: int | None
    num_bytes: int


def export_folder(
    run: str | Path,
    folder: str | Path,
    *,
    step: int | None = None,
    weights: str | None = None,
    adapter: bool = False,
    overwrite: bool = False,
) -> Exported:
    """Write the model of a run as the workload's `export(weights, folder)` does: for models of transformers a folder
    that `from_pretrained` reads.

    step: of a checkpoint; None is the final weights, or else the newest checkpoint's. weights: `averaged` or `trained`,
    of a run with `averaging`; None is the average. adapter: write the low-rank
    adapters alone, as `PeftModel.from_pretrained` reads them. The folder appears when it is whole. Raises
    CheckpointError, WorkloadError and StorageError.

    overwrite: rename a folder that exists to `FOLDER.before-1` or the next free number.
    """
    target = Path(folder).expanduser().absolute()
    if target.exists() and not overwrite:
        raise CheckpointError(
            "the folder to export to", str(folder), "it exists already", "name another, or --overwrite"
        )
    trained = find_trained(run)
    workload, settings = workload_of(trained), trained.config.fine_tuning
    if adapter and settings.lora_rank:
        chosen = _with_adapters(trained, step, weights)
        base = getattr(workload, "folder", None)
        write: Callable[[Path], None] = lambda place: write_adapter(
            chosen.tensors, place, alpha=settings.lora_alpha, base=base
        )
    else:
        with stage("reading the weights"):
            chosen = read_run_weights(trained, step, weights)
        has_adapters = bool(settings.lora_rank) and fine_tuning.has_adapters(chosen.tensors)
        tensors = fine_tuning.merged(chosen.tensors, settings) if has_adapters else chosen.tensors
        method = _export_of(workload)
        more = {"adapter": True} if adapter else {}
        write = lambda place: method(tensors, place, **more)
    former = _write(write, target)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    words = f"{chosen.words} of {trained.name}" + (f"; what was there is in {former}" if former else "")
    return Exported(str(target), words, chosen.step, size)


def _export_of(workload: Any) -> Callable[..., None]:
    found: Callable[..., None] | None = own_method(workload, "export")
    if found is None:
        raise WorkloadError(
            "the workload",
            "without export()",
            "what belongs beside the weights in a folder is the workload's to say",
            "export to a .safetensors or .pt file, or add export(self, weights, folder) to the workload",
        )
    return found


def _with_adapters(trained: TrainedRun, step: int | None, which: str | None) -> Weights:
    """Weights that have adapters apart: the final ones add them to their layers, unless fine_tuning.merge is off."""
    weights = read_run_weights(trained, step, which)
    if fine_tuning.has_adapters(weights.tensors):
        return weights
    newest = Catalog.of_run(trained.folder.root, trained.config.checkpoint.copy_path).newest()
    if newest is None and which != TRAINED and (adapters := read_adapters(trained)) is not None:
        return dataclasses.replace(weights, tensors=adapters)
    if newest is None:
        raise CheckpointError(
            f"the adapters of {trained.name}",
            "added to the final weights",
            "no checkpoint has them apart",
            "train with --no-fine-tuning.merge, or with checkpoints",
        )
    return read_run_weights(trained, newest.step, which)


def _write(write: Callable[[Path], None], target: Path) -> Path | None:
    """Write the folder and set a former one aside, whose files may be others than an export's: returns its new name."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as place:
            made = Path(place) / "new"
            with stage("writing the folder"):
                call_user_code(lambda: write(made), what="export()", doing="writing the folder")
            former = set_aside(target)
            made.rename(target)
            return former
    except OSError as exc:
        raise StorageError("the folder to export to", str(target), f"it cannot be written: {exc}") from exc
