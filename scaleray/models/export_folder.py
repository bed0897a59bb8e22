"""`export` to a folder: the trained model for its own library, or its adapters for peft."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.model_layout import TRAINED
from scaleray.checkpoints.peft_adapter import write_adapter
from scaleray.common.filesystems import set_aside
from scaleray.common.progress import stage
from scaleray.errors import CheckpointError, StorageError, WorkloadError
from scaleray.models.model_options import ModelChoice
from scaleray.models.stored_weights import Weights, read_adapters, read_run_weights
from scaleray.models.trained_run import TrainedRun, workload_of
from scaleray.training.setup import fine_tuning
from scaleray.workload import call_user_code, own_method


def write_folder(
    trained: TrainedRun, target: Path, choice: ModelChoice, *, adapter: bool = False
) -> tuple[Weights, Path | None]:
    """Write the model of a run by the workload's `export(weights, folder)`: for models of transformers, a folder for
    `from_pretrained`. Returns its weights, and the new name of a previous folder.

    adapter: write the low-rank adapters and other trained modules, for `PeftModel.from_pretrained`. The folder appears
    when it is complete; a previous one is renamed to `FOLDER.before-1` or the next free number. Raises CheckpointError,
    WorkloadError and StorageError."""
    made, settings = workload_of(trained, choice.workload), trained.config.fine_tuning
    if adapter and settings.lora_rank:
        chosen = _with_adapters(trained, choice)
        base = getattr(made, "folder", None)
        write: Callable[[Path], None] = lambda place: write_adapter(
            chosen.tensors, place, alpha=settings.lora_alpha, whole=settings.trained_whole, base=base
        )
    else:
        with stage("reading the weights"):
            chosen = read_run_weights(trained, choice.which_step, choice.weights)
        has_adapters = bool(settings.lora_rank) and fine_tuning.has_adapters(chosen.tensors)
        tensors = fine_tuning.merged(chosen.tensors, settings) if has_adapters else chosen.tensors
        method = _export_of(made)
        more = {"adapter": True} if adapter else {}
        write = lambda place: method(tensors, place, **more)
    return chosen, _write(write, target)


def _export_of(workload: Any) -> Callable[..., None]:
    found: Callable[..., None] | None = own_method(workload, "export")
    if found is None:
        raise WorkloadError.problem(
            "the workload",
            "lacks export(): only the workload can write the files next to the weights",
            "export to a .safetensors or .pt file, or add export(self, weights, folder) to the workload",
        )
    return found


def _with_adapters(trained: TrainedRun, choice: ModelChoice) -> Weights:
    """Weights with separate adapters: the final weights have them added to their layers, unless fine_tuning.merge is
    off."""
    weights = read_run_weights(trained, choice.which_step, choice.weights)
    if fine_tuning.has_adapters(weights.tensors):
        return weights
    newest = Catalog.of_run(trained.folder.root, trained.config.checkpoint.copy_path).newest()
    if newest is None and choice.weights != TRAINED and (adapters := read_adapters(trained)) is not None:
        return dataclasses.replace(weights, tensors={**weights.tensors, **adapters})
    if newest is None:
        raise CheckpointError.problem(
            f"the adapters of {trained.name}",
            "were merged into the final weights, and no checkpoint has them separately",
            "train with --no-fine-tuning.merge, or with checkpoints",
        )
    return read_run_weights(trained, newest.step, choice.weights)


def _write(write: Callable[[Path], None], target: Path) -> Path | None:
    """Write the folder and rename a previous one, which may have other files than an export: returns its new name."""
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
