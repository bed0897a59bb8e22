"""`scaleray export`: write a run's model to a file or folder for other programs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.model_layout import TRAINED
from scaleray.checkpoints.peft_adapter import write_adapter
from scaleray.common.filesystems import set_aside
from scaleray.common.options import takes
from scaleray.common.progress import stage
from scaleray.data.source_interface import Columns, rows_in
from scaleray.errors import CheckpointError, DataError, StorageError, UsageError, WorkloadError, first_line
from scaleray.models import export_formats as formats
from scaleray.models.load import ModelParts, TrainedModel, find_parts
from scaleray.models.model_call import ModelCall, distance
from scaleray.models.model_options import DType, ExportOptions, Format, ModelChoice
from scaleray.models.row_files import Files, columns_of, shape_of
from scaleray.models.stored_weights import Weights, read_adapters, read_run_weights
from scaleray.models.trained_run import TrainedRun, find_trained, workload_of
from scaleray.records.json_record import JsonRecord
from scaleray.records.statement import file_digest
from scaleray.training.setup import fine_tuning
from scaleray.workload import call_user_code, own_method

DTYPES: dict[DType, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROWS, FEWER = 8, 5
"""Number of rows on which outputs are compared, and another number that a program should also accept."""
TOLERANCES: dict[Format, float] = {"safetensors": 0.0, "torch.export": 1e-5, "onnx": 1e-4}
"""Largest relative difference of outputs for weights in their trained type, by format: the same kernels give the same
bits, while others round differently."""
OF_DTYPE: dict[DType, float] = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
"""Largest relative difference from the trained model for weights in another type."""


@dataclass(frozen=True)
class _Kind:
    ending: str
    write: Callable[[nn.Module, ModelCall, Path, dict[str, str]], None]
    open: Callable[[Path, Callable[[], nn.Module]], formats.Opened]


KINDS: dict[Format, _Kind] = {
    "safetensors": _Kind(".safetensors", formats.write_safetensors, formats.open_safetensors),
    "torch.export": _Kind(".pt2", formats.write_program, formats.open_program),
    "onnx": _Kind(".onnx", formats.write_onnx, formats.open_onnx),
}
"""Formats whose files are loaded back and compared with the model."""
ENDINGS: dict[Format, str] = {
    **{name: kind.ending for name, kind in KINDS.items()},
    "pt": ".pt",
    "folder": "",
    "adapter": "",
}


@dataclass(frozen=True, kw_only=True)
class ExportedModel(JsonRecord):
    """A model exported to a file or folder. sha256: None for a folder. former: new name of a previous folder.
    difference: largest relative difference between its outputs and the model's, on `rows` rows; None if not compared.
    any_rows: whether it accepts other numbers of rows."""

    file: str
    format: Format
    weights: str
    step: int | None
    num_bytes: int
    sha256: str | None = None
    former: str | None = None
    dtype: DType | None = None
    rows: int = 0
    any_rows: bool = False
    difference: float | None = None
    tolerance: float | None = None

    def lines(self) -> list[str]:
        """Description of the file, and of the difference between its outputs and the model's."""
        written = f"{self.weights} -> {self.file} ({self.num_bytes:,} bytes, {self.format}"
        if self.former is not None:
            return [f"{written})", f"the previous folder is now {self.former}"]
        if self.difference is None:
            return [f"{written})"]
        many = "any number of rows" if self.any_rows else f"exactly {self.rows} rows"
        return [
            f"{written}, takes {many})",
            f"loaded back, its outputs for {self.rows} rows differ by {self.difference:.2g} of the largest output (at "
            f"most {self.tolerance:g} is allowed)",
        ]


@takes(ExportOptions)
def export_model(
    run: str | Path, out: str | Path, *, options: ExportOptions, data: str | Path | None = None
) -> ExportedModel:
    """Write a run's model to a file or folder for other programs, which appears only when it is complete.

    run: as for `load`, or `models:/NAME@ALIAS`. Formats: `safetensors` (weights), `torch.export` and `onnx` (weights
    and the computation of the model's forward) are opened again, and their outputs on real rows compared with the
    model's. `pt` is the state dict as torch saves it, without the workload or data; `folder` is the result of the
    workload's `export`, for example for `from_pretrained`; `adapter` is a folder with only the low-rank adapters, for
    peft. data: a file of rows to compare on; None takes rows of the training's data.

    Raises UsageError, DataError, CheckpointError, WorkloadError and StorageError."""
    dtype, tolerance = options.dtype, options.tolerance
    out = Path(out)
    chosen = _format_of(out) if options.format is None else options.format
    _check(chosen, out, dtype=dtype, tolerance=tolerance, data=data, overwrite=options.overwrite)
    if chosen in KINDS:
        parts = find_parts(run, options=options)
        return _compared(parts, out, chosen, data, dtype, tolerance)
    trained = find_trained(run, uri=options.uri)
    if chosen == "pt":
        return _plain(
            trained,
            out,
            read_run_weights(trained, options.which_step, options.weights).merged(trained.config.fine_tuning),
        )
    target, is_adapter = out.expanduser().absolute(), chosen == "adapter"
    found, former = write_folder(trained, target, options, adapter=is_adapter)
    return ExportedModel(
        file=str(out), format=chosen, step=found.step,
        weights=f"{'the adapters of ' if is_adapter else ''}{found.words} of {trained.name}",
        num_bytes=sum(path.stat().st_size for path in target.rglob("*") if path.is_file()),
        former=None if former is None else str(former),
    )  # fmt: skip


def _plain(trained: TrainedRun, out: Path, weights: Weights) -> ExportedModel:
    """Write the weights with `torch.save`, by the names in the model's state dict."""
    with _place(out) as file:
        with stage("writing pt"):
            torch.save(weights.tensors, file)
        made = ExportedModel(
            file=str(out), format="pt", weights=f"{weights.words} of {trained.name}", step=weights.step,
            num_bytes=file.stat().st_size, sha256=file_digest(file),
        )  # fmt: skip
    return made


def _compared(
    parts: ModelParts, out: Path, format: Format, data: str | Path | None, dtype: DType | None, tolerance: float | None
) -> ExportedModel:
    """Write the model to a file, whose outputs must equal the model's within the tolerance."""
    model = parts.build()
    model, rows = _with_rows(model, parts, data)
    call = ModelCall.of(model, rows)
    expected = call(model.module)
    fewer = ModelCall.of(model, {name: values[:FEWER] for name, values in rows.items()})
    fewer_expected = fewer(model.module)
    if dtype is not None:
        model.module.to(DTYPES[dtype])
        call, fewer = (one.of_dtype(DTYPES[dtype]) for one in (call, fewer))

    def fresh() -> nn.Module:
        module = parts.build().module
        for tensor in module.state_dict().values():
            tensor.zero_()
        return module if dtype is None else module.to(DTYPES[dtype])

    allowed = tolerance if tolerance is not None else OF_DTYPE[dtype] if dtype else TOLERANCES[format]
    about = {"run": parts.name, "weights": parts.weights.words, "step": str(parts.weights.step)}
    with _place(out) as file:
        with stage(f"writing {format}"):
            KINDS[format].write(model.module, call, file, about)
        with stage("loading it back"):
            opened = KINDS[format].open(file, fresh)
            found = distance(opened(call), expected)
            any_rows = _takes(opened, fewer, fewer_expected, allowed)
        if found > allowed:
            raise CheckpointError.problem(
                "The exported model",
                f"differs in its outputs by {found:.3g} of the largest output: at most {allowed:g} is allowed. Nothing "
                f"was written",
                "--tolerance allows more; --dtype fp32 rounds less",
            )
        made = ExportedModel(
            file=str(out), format=format, weights=f"{parts.weights.words} of {parts.name}", step=parts.weights.step,
            dtype=dtype, num_bytes=file.stat().st_size, sha256=file_digest(file), rows=call.num_rows, any_rows=any_rows,
            difference=found, tolerance=allowed,
        )  # fmt: skip
    return made


def _format_of(out: Path) -> Format:
    """The format for the extension of a file name."""
    found: Format | None = next((name for name, ending in ENDINGS.items() if ending == out.suffix), None)
    if found is None:
        known = ", ".join(filter(None, ENDINGS.values()))
        raise UsageError("--out", str(out), f"endings are {known}", "for a folder, use --format folder")
    return found


def _check(
    format: str, out: Path, *, dtype: str | None, tolerance: float | None, data: str | Path | None, overwrite: bool
) -> None:
    """Refuse options that cannot be combined, before anything is read."""
    if format not in ENDINGS:
        raise UsageError("--format", format, f"formats are {', '.join(ENDINGS)}")
    for option, value in (("--dtype", dtype), ("--tolerance", tolerance), ("--data", data)):
        if value is not None and format not in KINDS:
            why = f"{format} has unchanged weights, which are not compared"
            raise UsageError(option, str(value), why, f"omit it, or use --format {', '.join(KINDS)}")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError("--dtype", dtype, f"types are {', '.join(DTYPES)}")
    if format == "onnx":
        formats.check_onnx()
        if dtype == "bf16":
            allowed = "onnxruntime lacks bf16 operations on the CPU, so the export cannot be verified"
            raise UsageError("--dtype", dtype, allowed, "--dtype fp16, or --format torch.export")
    if tolerance is not None and not tolerance >= 0:
        raise UsageError("--tolerance", tolerance, "it must be at least 0")
    if ENDINGS[format] and out.suffix != ENDINGS[format]:
        raise UsageError("--out", str(out), f"a file of {format} ends in {ENDINGS[format]}")
    if not ENDINGS[format] and out.suffix in ENDINGS.values() and out.suffix:
        raise UsageError("--out", str(out), f"{format} is a folder, whose name does not end in {out.suffix}")
    if out.exists() and not overwrite:
        raise CheckpointError("--out", str(out), "it already exists", "name another, or --overwrite")


def _with_rows(model: TrainedModel, parts: ModelParts, data: str | Path | None) -> tuple[TrainedModel, Columns]:
    """The model with the known facts about its rows, and some rows."""
    wide = parts.config.precision.dtype == "fp64"
    shape, tuples = shape_of(parts.workload, wide=wide, fitted=parts.preprocessor)
    model = dataclasses.replace(model, gives_tuples=tuples)
    rows: Columns = {name: values[:ROWS] for name, values in shape.examples.items()}
    if data is not None:  # of files, labels may be missing
        table = next(Files.at(data).tables(ROWS), None)
        found = columns_of(table, str(data), allows_text=shape.allows_text)[0] if table is not None else {}
        rows = shape.fit(found)
    if not rows or not rows_in(rows):
        allowed = "outputs are compared on real rows"
        raise DataError("the training data", "not readable here", allowed, "give a file of rows with --data")
    return model, rows


def _takes(opened: formats.Opened, call: ModelCall, expected: list[torch.Tensor], allowed: float) -> bool:
    """Whether a file accepts another number of rows with the same outputs."""
    try:
        return distance(opened(call), expected) <= allowed
    except Exception:  # each runtime has errors of its own for another shape
        return False


@contextlib.contextmanager
def _place(out: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `out` on success."""
    target = out.expanduser().absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
            yield Path(folder) / target.name
            os.replace(Path(folder) / target.name, target)
    except OSError as exc:
        raise StorageError("--out", str(out), f"it cannot be written: {first_line(exc)}") from exc


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
        write: Callable[[Path], None] = lambda target_folder: write_adapter(
            chosen.tensors, target_folder, alpha=settings.lora_alpha, whole=settings.trained_whole, base=base
        )
    else:
        with stage("reading the weights"):
            chosen = read_run_weights(trained, choice.which_step, choice.weights)
        has_adapters = bool(settings.lora_rank) and fine_tuning.has_adapters(chosen.tensors)
        tensors = fine_tuning.merged(chosen.tensors, settings) if has_adapters else chosen.tensors
        method = _export_of(made)
        more = {"adapter": True} if adapter else {}
        write = lambda target_folder: method(tensors, target_folder, **more)
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
    """Write the folder, and rename an existing one, which may have other files. Returns the latter's new name."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as parent:
            made = Path(parent) / "new"
            with stage("writing the folder"):
                call_user_code(lambda: write(made), what="export()", doing="writing the folder")
            former = set_aside(target)
            made.rename(target)
            return former
    except OSError as exc:
        raise StorageError("the folder to export to", str(target), f"it cannot be written: {exc}") from exc
