"""Weights of a trained run as a plain state dict: the final ones, or those of a checkpoint.

Read without a pickle: safetensors, checkpoints' own tensor files, and `torch.load` with `weights_only`.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from scaleray.checkpoints.catalog import Catalog, require
from scaleray.checkpoints.consolidated import check_fit, model_tensors, with_a_source
from scaleray.checkpoints.manifest import Incomplete, Manifest, Tensor
from scaleray.checkpoints.model_layout import FINAL_WEIGHTS, INDEX
from scaleray.checkpoints.storage import Store
from scaleray.checkpoints.tensor_files import read_tensor
from scaleray.errors import CheckpointError, UsageError
from scaleray.launch.model.trained_run import TrainedRun
from scaleray.tracking.model_files import fetch_model_files
from scaleray.training.state.weights import PLAIN, read_weights

BEST = "best"


@dataclass(frozen=True)
class Weights:
    """Tensors by the names of the model's state dict, on the CPU. step: optimizer steps after which they were so; None
    where nobody knows. words: which ones they are, for people."""

    tensors: dict[str, torch.Tensor]
    step: int | None
    words: str


def read_run_weights(run: TrainedRun, step: int | str | None = None) -> Weights:
    """The final weights of a run, or those of a checkpoint.

    step: None is the final ones, or where the run has none the newest checkpoint's; a number is that checkpoint's;
    `best` is that of `checkpoint.best`, and a metric with its direction, such as `val/loss min`, the best by it.
    Raises CheckpointError.
    """
    if step is None:
        final = _final(run)
        if final is not None:
            return Weights(final, run.steps, "the final weights")
    return _of_checkpoint(run, step)


def fill(module: nn.Module, weights: Weights, *, where: str) -> None:
    """Copy weights into a model, sharded or not, which must have the same tensors. Raises CheckpointError with the
    first that does not fit."""
    own = {name: tensor for name, tensor in module.state_dict().items() if isinstance(tensor, torch.Tensor)}
    saved = {
        name: Tensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), ())
        for name, tensor in weights.tensors.items()
    }
    wanted = with_a_source(own, saved)
    check_fit(wanted, saved, where)
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(weights.tensors[name])


def _final(run: TrainedRun) -> dict[str, torch.Tensor] | None:
    """The final weights in the run's folder, or else in MLflow; None where there are none."""
    folder = run.folder
    names = _final_files(folder)
    if names and folder.is_local:
        return read_weights(folder.root)
    if names:
        with tempfile.TemporaryDirectory() as copy:
            for name in names:
                Store(copy).copy_from(folder, name)
            return read_weights(copy)
    if _has_checkpoints(run):
        return None
    with tempfile.TemporaryDirectory() as copy:
        if not fetch_model_files(run.about, Path(copy)):
            return None
        inside = Path(copy) / "model"
        if not (inside / PLAIN).exists():
            inside.rename(Path(copy) / FINAL_WEIGHTS)
            inside = Path(copy)
        return read_weights(inside)


def _final_files(folder: Store) -> list[str]:
    try:
        if folder.size(f"{FINAL_WEIGHTS}/{INDEX}") is not None:
            return [f"{FINAL_WEIGHTS}/{Path(name).name}" for name in folder.names(FINAL_WEIGHTS)]
        return [PLAIN] if folder.size(PLAIN) is not None else []
    except OSError:
        return []


def _catalog(run: TrainedRun) -> Catalog:
    return Catalog.of_run(run.folder.root, run.config.checkpoint.copy_path)


def _has_checkpoints(run: TrainedRun) -> bool:
    try:
        return _catalog(run).newest() is not None
    except OSError:
        return False


def _of_checkpoint(run: TrainedRun, step: int | str | None) -> Weights:
    catalog = _catalog(run)
    if step is None and not _has_checkpoints(run):
        raise CheckpointError(
            f"the weights of {run.name}",
            "not there",
            f"neither {run.where} nor MLflow has final weights or a checkpoint",
            "a run writes them when it ends well, unless checkpoint.save_final is off",
        )
    manifest = _best(run, catalog, step) if isinstance(step, str) else require(catalog, step, where=run.where)
    try:
        tensors = {
            name: read_tensor(catalog.stores, tensor).clone() for name, tensor in model_tensors(manifest).items()
        }
    except Incomplete as exc:
        raise CheckpointError(
            f"the checkpoint of step {manifest.step}",
            "damaged",
            str(exc),
            f"scaleray checkpoint verify {run.where} looks for copies",
        ) from exc
    return Weights(tensors, manifest.step, f"the weights after step {manifest.step}")


def _best(run: TrainedRun, catalog: Catalog, text: str) -> Manifest:
    """The best checkpoint by a metric that was measured at its own step."""
    wanted = run.config.checkpoint.best if text == BEST else text
    if wanted is None:
        raise UsageError(
            "--step", BEST, "the run has no checkpoint.best", 'name a metric and direction: --step "val/loss min"'
        )
    metric, _, direction = wanted.rpartition(" ")
    if not metric or direction not in ("min", "max"):
        raise UsageError("--step", text, "it must be a number, best, or a metric and min or max", '"val/loss min"')
    measured = [manifest for manifest in catalog.complete() if metric in manifest.own_metrics]
    if not measured:
        known = sorted({name for manifest in catalog.complete() for name in manifest.own_metrics})
        raise UsageError(
            "--step", wanted, "no checkpoint was evaluated with it at its own step", f"there are: {_named(known)}"
        )
    chosen: Manifest = (min if direction == "min" else max)(measured, key=lambda m: m.own_metrics[metric])
    return chosen


def _named(names: list[str]) -> str:
    return ", ".join(names) or "none"
