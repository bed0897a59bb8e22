"""Weights of a trained run as a plain state dict: the final weights, or those of a checkpoint.

Read without pickle: safetensors, checkpoints' own tensor files, and `torch.load` with `weights_only`."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scaleray.checkpoints.catalog import Catalog, require
from scaleray.checkpoints.consolidated import check_fit, model_tensors, reshape_buffers, with_a_source
from scaleray.checkpoints.manifest import Incomplete, Manifest, Tensor
from scaleray.checkpoints.model_layout import (
    ADAPTERS,
    AVERAGED,
    FINAL_WEIGHTS,
    INDEX,
    TRAINED,
    TRAINED_WEIGHTS,
    check_which,
    plain_file,
)
from scaleray.checkpoints.storage import Store
from scaleray.checkpoints.tensor_files import read_tensor
from scaleray.checkpoints.weight_sums import check_manifest, sums_name
from scaleray.common.own_folder import cache_folder
from scaleray.common.parsing import load_json
from scaleray.config.averaging_pruning_fine_tuning import FineTuningSettings
from scaleray.errors import CheckpointError, UsageError
from scaleray.models.trained_run import PACKED, TrainedRun
from scaleray.recording.find_record import fetch_model_files
from scaleray.training.health.attributes import common_attributes, set_plain_attributes
from scaleray.training.setup import fine_tuning
from scaleray.training.state.final_weight_files import read_weights
from scaleray.training.state.items import ATTRIBUTES, WORKLOAD, as_json, flattened, nested, tensors_of

VALUES, TENSORS = "workload_state.json", "workload_state.safetensors"


def write_state(state: Mapping[str, Any], folder: Path) -> None:
    """Write the result of a workload's `state_dict`. Raises WorkloadError for values that a checkpoint cannot
    contain."""
    flat = flattened(state)
    tensors = {name: value.contiguous() for name, value in flat.items() if isinstance(value, torch.Tensor)}
    values = {name: as_json(WORKLOAD, value) for name, value in flat.items() if name not in tensors}
    (folder / VALUES).write_text(json.dumps(values))
    if tensors:
        from safetensors.torch import save_file

        save_file(tensors, folder / TENSORS)


def read_state(folder: Store) -> dict[str, Any] | None:
    """Read the state in a local folder; None if there is none. Raises OSError or ValueError if it is damaged."""
    if not folder.is_local or folder.size(VALUES) is None:
        return None
    flat: dict[str, Any] = dict(load_json(folder.read(VALUES)))
    if folder.size(TENSORS) is not None:
        from safetensors.torch import load_file

        flat.update(load_file(Path(folder.root) / TENSORS))
    return nested(flat)


BEST = "best"


@dataclass(frozen=True)
class Weights:
    """Tensors by the names of the model's state dict, on the CPU. step: number of optimizer steps; None if unknown.
    words: description for readers. workload_state: result of the workload's `state_dict`; None if there is none or it
    was not stored. has_hash: whether the run's record has the SHA-256 of their files, or of the checkpoint's manifest.
    attributes: module attributes that the training changed."""

    tensors: dict[str, torch.Tensor]
    step: int | None
    words: str
    workload_state: dict[str, Any] | None = None
    has_hash: bool = True
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def merged(self, settings: FineTuningSettings) -> Weights:
        """The weights in the form of final weights, with adapters merged unless `fine_tuning.merge` is off."""
        if settings.lora_rank and settings.merge and fine_tuning.has_adapters(self.tensors):
            return replace(self, tensors=fine_tuning.merged(self.tensors, settings))
        return self


def read_run_weights(run: TrainedRun, step: int | str | None = None, which: str | None = None) -> Weights:
    """Read the final weights of a run, or those of a checkpoint.

    step: None for the final weights, or else the newest checkpoint's; a number for that checkpoint's; `best` for the
    best by `checkpoint.best`; a metric with its direction, such as `val/loss min`, for the best by that metric. which:
    AVERAGED or TRAINED; None: the average if the run has one. Raises CheckpointError and UsageError."""
    has_average = run.config.averaging.decay is not None
    check_which(which, has_average=has_average, where=run.name)
    kind = f"{which or AVERAGED} " if has_average else ""
    is_trained = has_average and which == TRAINED
    if step is None:
        final = _final(run, TRAINED_WEIGHTS if is_trained else FINAL_WEIGHTS)
        if final is not None:
            words = run.about["weights"] if run.about.get(PACKED) else f"the final {kind}weights"
            has_hash = bool(run.about.get(PACKED) or _recorded(run))
            attributes = run.record.attributes if run.record is not None else run.about.get("attributes", {})
            return Weights(final, run.steps, words, _state_beside_final(run), has_hash, attributes)
        if _recorded(run):
            raise CheckpointError.problem(
                f"the final weights of {run.name}",
                f"are missing: its record names {', '.join(_recorded(run))}",
                "copy them again, or name a checkpoint: --step best or --step N",
            )
    return _of_checkpoint(run, step, averaged=not is_trained, kind=kind)


def fill(module: nn.Module, weights: Weights, *, where: str) -> None:
    """Copy weights and attributes into a model, sharded or not, which must have the same tensors. Raises
    CheckpointError with the first tensor that does not fit."""
    saved = {
        name: Tensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), ())
        for name, tensor in weights.tensors.items()
        if tensor.layout == torch.strided
    }
    reshape_buffers(module, saved)
    own = {name: tensor for name, tensor in module.state_dict().items() if isinstance(tensor, torch.Tensor)}
    wanted = with_a_source(own, saved)
    check_fit(wanted, saved, where)
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(weights.tensors[name])
    set_plain_attributes(module, weights.attributes)


def _final(run: TrainedRun, name: str) -> dict[str, torch.Tensor] | None:
    """Weights with this name in the run folder, or else in MLflow; None if there are none."""
    if (found := _in_folder(run, name)) is not None:
        return found
    if _has_checkpoints(run):
        return None
    with tempfile.TemporaryDirectory(dir=cache_folder("models")) as copy:
        inside = fetch_model_files(run.about, Path(copy), name)
        if inside is None:
            return None
        if not (inside / plain_file(name)).exists():
            inside.rename(Path(copy) / name)
            inside = Path(copy)
        return read_weights(inside, name, recorded=_recorded(run))


def read_adapters(run: TrainedRun) -> dict[str, torch.Tensor] | None:
    """The low-rank adapters of a run with merged final weights; None if its folder has none."""
    return _in_folder(run, ADAPTERS)


def _in_folder(run: TrainedRun, name: str) -> dict[str, torch.Tensor] | None:
    folder = run.folder
    files = _final_files(folder, name)
    if not files or folder.is_local:
        return read_weights(folder.root, name, recorded=_recorded(run)) if files else None
    with tempfile.TemporaryDirectory(dir=cache_folder("models")) as copy:
        for file in files:
            Store(copy).copy_from(folder, file)
        return read_weights(copy, name, recorded=_recorded(run))


def _final_files(folder: Store, name: str) -> list[str]:
    try:
        if folder.size(f"{name}/{INDEX}") is not None:
            return [f"{name}/{Path(file).name}" for file in folder.names(name)]
        plain = plain_file(name)
        files = [file for file in folder.names() if file in (plain, sums_name(plain))]
        return files if plain in files else []
    except OSError:
        return []


def _recorded(run: TrainedRun) -> dict[str, Any]:
    """Hashes of the final weights in the run's record; empty for a record of an older version."""
    return run.record.weights if run.record is not None else {}


def _catalog(run: TrainedRun) -> Catalog:
    return Catalog.of_run(run.folder.root, run.config.checkpoint.copy_path)


def _has_checkpoints(run: TrainedRun) -> bool:
    try:
        return _catalog(run).newest() is not None
    except OSError:
        return False


def _of_checkpoint(run: TrainedRun, step: int | str | None, *, averaged: bool, kind: str) -> Weights:
    catalog = _catalog(run)
    if step is None and not _has_checkpoints(run):
        absent = f"are missing: neither {run.where} nor MLflow has final weights or a checkpoint"
        hint = "a run writes them when it ends successfully, unless checkpoint.save_final is off"
        raise CheckpointError.problem(f"the weights of {run.name}", absent, hint)
    manifest = _best(run, catalog, step) if isinstance(step, str) else require(catalog, step, where=run.where)
    with _damage_text(run, manifest):
        stores, has_hash = _proven(run, catalog, manifest)
        tensors = {
            name: read_tensor(stores, tensor).clone()
            for name, tensor in model_tensors(manifest, averaged=averaged).items()
        }
        state = _workload_state(stores, manifest)
    attributes = common_attributes(manifest.values.get(ATTRIBUTES, []))
    words = f"the {kind}weights after step {manifest.step}"
    return Weights(tensors, manifest.step, words, state, has_hash, attributes)


@contextlib.contextmanager
def _damage_text(run: TrainedRun, manifest: Manifest) -> Iterator[None]:
    try:
        yield
    except Incomplete as exc:
        raise CheckpointError(
            f"the checkpoint of step {manifest.step}",
            "damaged",
            str(exc),
            f"scaleray checkpoint verify {run.where} looks for copies",
        ) from exc


def _proven(run: TrainedRun, catalog: Catalog, manifest: Manifest) -> tuple[list[Store], bool]:
    """Stores from which a checkpoint can be read, and whether the run's record has its hash; if so, only stores in
    which each file matches its SHA-256. Raises Incomplete if there is none, CheckpointError for another manifest."""
    recorded = run.record.checkpoints if run.record is not None else {}
    if not check_manifest(catalog.stores[0], manifest, recorded):
        return catalog.stores, False
    damaged = {damage.file: damage for damage in catalog.check(manifest, manifest.files, heal=False)}
    good = [store for store in catalog.stores if damaged.keys().isdisjoint(map(store.path, manifest.files))]
    if not good:
        raise Incomplete(f"{min(damaged)}: {damaged[min(damaged)].problem}")
    return good, True


def _state_beside_final(run: TrainedRun) -> dict[str, Any] | None:
    """The workload's state in the checkpoint of the last step, if there is one, or the state stored with a packed
    model's weights."""
    try:
        if run.about.get(PACKED):
            return read_state(run.folder)
        if run.steps is None:
            return None
        catalog = _catalog(run)
        manifest = catalog.read(run.steps)
    except (OSError, Incomplete, CheckpointError):
        return None
    if not (tensors_of(manifest, WORKLOAD) or manifest.values.get(WORKLOAD)):
        return None
    with _damage_text(run, manifest):
        return _workload_state(_proven(run, catalog, manifest)[0], manifest)


def _workload_state(stores: list[Store], manifest: Manifest) -> dict[str, Any] | None:
    """Result of the workload's `state_dict` stored in a checkpoint."""
    tensors = {
        name.removeprefix(f"{WORKLOAD}."): read_tensor(stores, tensor).clone()
        for name, tensor in tensors_of(manifest, WORKLOAD).items()
    }
    values = manifest.values.get(WORKLOAD)
    return nested({**(values or {}), **tensors}) if values or tensors else None


def _best(run: TrainedRun, catalog: Catalog, text: str) -> Manifest:
    """The best checkpoint by a metric that was measured at its step."""
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
            "--step",
            wanted,
            f"no checkpoint has a value of {metric} measured at its step",
            f"measured: {_named(known)}",
        )
    chosen: Manifest = (min if direction == "min" else max)(measured, key=lambda m: m.own_metrics[metric])
    return chosen


def _named(names: list[str]) -> str:
    return ", ".join(names) or "none"
