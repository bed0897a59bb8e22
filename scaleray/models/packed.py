"""A trained model packed into a folder, which `load` opens without the rest of its run.

It contains the weights, the config, the code of the workload and neighbouring modules, the fitted preprocessor, the
workload's state and the columns. Nothing in it is a pickle. Loading it runs its code."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from scaleray.common.parsing import load_json
from scaleray.common.user_code import import_root, is_installed, modules_beside
from scaleray.config.base import without_password
from scaleray.data import preprocessing
from scaleray.data.as_source import reads_text
from scaleray.data.ragged import Ragged
from scaleray.data.source_interface import Columns
from scaleray.errors import DataError, ScaleRayError, WorkloadError
from scaleray.models.load import ModelParts, preprocessor_of_run
from scaleray.models.predict import collected
from scaleray.models.predictor import Predictor, PredictorParts, arrow_array
from scaleray.models.row_files import Shape, shape_of
from scaleray.models.stored_weights import write_state
from scaleray.models.trained_run import CODE, NOTE, PACKED, TrainedRun, find_trained, workload_of
from scaleray.records.json_record import jsonable
from scaleray.strategies.contract.weight_shares import Placed, WeightShare
from scaleray.training.state.final_weight_files import complete, save_weights
from scaleray.workload import name_of

if TYPE_CHECKING:
    from mlflow.models import ModelSignature

COLUMNS = "columns.json"
EXAMPLE_ROWS = 4
"""Number of rows of the training data on which a packed model is tested."""


@dataclass(frozen=True)
class Column:
    """A column of the rows. shape: shape of one row; None if rows have unequal lengths. dtype: numpy's name. needed:
    whether predictions need it."""

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    needed: bool


def pack(run: TrainedRun, parts: ModelParts, folder: Path, *, workload: Any = None) -> ModelSignature:
    """Write the model of a run to a new folder, and return its signature for MLflow. workload: the workload of `parts`.
    Raises WorkloadError for a workload whose code is not in a file, and DataError if its training data, which defines
    the columns, cannot be read."""
    file, name = _home(run, workload)
    folder.mkdir(parents=True)
    tensors = {name: value for name, value in parts.weights.tensors.items() if isinstance(value, torch.Tensor)}
    layout = {name: Placed(0, value.numel() * value.element_size()) for name, value in tensors.items()}
    save_weights(WeightShare(tensors, layout), str(folder), rank=0)
    complete(str(folder))
    if parts.weights.workload_state is not None:
        write_state(parts.weights.workload_state, folder)
    if parts.preprocessor is not None:
        preprocessing.save(parts.preprocessor, str(folder))
    about = {
        PACKED: True,
        "name": run.name,
        "run_id": run.about.get("run_id"),
        "tracking_uri": without_password(str(run.about.get("tracking_uri") or "")),
        "steps": parts.weights.step,
        "weights": parts.weights.words,
        "attributes": parts.weights.attributes,
        "config": _config(parts, _copy_code(file, name, folder / CODE)),
    }
    (folder / NOTE).write_text(json.dumps(jsonable(about), indent=1))
    packed = find_trained(folder)  # code that cannot be imported on its own is refused now
    preprocessor_of_run(packed, workload_of(packed))
    return _tried(parts, folder)


def _config(parts: ModelParts, name: str) -> dict[str, Any]:
    """The run's config for these weights, with the packed workload and without averaging."""
    values: dict[str, Any] = parts.config.model_dump(mode="json")
    values["workload"]["name"] = name
    values["averaging"]["decay"] = None
    return values


def _copy_code(file: Path | None, name: str, folder: Path) -> str:
    """Copy the user's local files, and return the workload's name among them."""
    if file is None:
        return name
    root = import_root(file)
    for source in {file.resolve(), *(Path(str(module.__file__)).resolve() for module in modules_beside(file))}:
        inside = source.relative_to(root)
        (folder / inside).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / inside)
        for package in inside.parents:
            if (marker := root / package / "__init__.py").is_file():
                shutil.copyfile(marker, folder / package / "__init__.py")
    inside = file.resolve().relative_to(root)
    target = ".".join(inside.with_suffix("").parts) if len(inside.parts) > 1 else str(inside)
    return f"{target}:{name.partition(':')[2]}"


def _home(run: TrainedRun, given: Any) -> tuple[Path | None, str]:
    """The user's file that defines the workload, None if an installed package does, and the workload's name.

    given: as for `load`. Raises WorkloadError for an object whose class is not in a file."""
    name = run.config.workload.name if given is None else given if isinstance(given, str) else name_of(given)
    target, _, attribute = name.partition(":")
    if target.endswith(".py"):
        base = Path(run.about.get("base_dir") or ".")
        file = next((place for place in (Path(target), base / target) if place.is_file()), None)
    else:
        found = getattr(sys.modules.get(target), "__file__", None)
        file = Path(found) if found else None
    if file is None or "<locals>" in attribute:
        raise WorkloadError(
            "the workload's code",
            name,
            "it is not in a file that can be packed with the model",
            "put the class into a file, and name it: --workload path/to/file.py:Name",
        )
    return (None if is_installed(str(file)) else file), name


def _tried(parts: ModelParts, folder: Path) -> ModelSignature:
    """Write the columns, marking those that the model needs, which are found by omitting each one."""
    shape, tuples = shape_of(parts.workload, wide=parts.config.precision.dtype == "fp64", fitted=parts.preprocessor)
    if not shape.columns:
        raise DataError(
            "the training data",
            "not readable here",
            "the columns of a packed model are read from it",
            "pack it on a machine with the data",
        )
    answer = RowAnswers(parts, shape, tuples)
    rows = {name: values[:EXAMPLE_ROWS] for name, values in shape.examples.items()}
    every = answer(rows)
    needed = {name for name in rows if not _answers_without(answer, rows, name, every)}
    columns = tuple(
        Column(name, None if own is None else tuple(own), str(dtype), name in needed)
        for name, (own, dtype) in shape.columns.items()
    )
    others = {name: _two_of(values) for name, values in shape.examples.items() if name not in needed}
    about = [{**vars(column), "examples": others.get(column.name)} for column in columns]
    (folder / COLUMNS).write_text(json.dumps(jsonable({"wide": shape.wide, "tuples": tuples, "columns": about})))
    return signature_of([column for column in columns if column.needed], rows, every)


def signature_of(needed: Sequence[Column], rows: Columns, answers: Mapping[str, Any]) -> ModelSignature:
    """The model's inputs and outputs as an MLflow signature: tensors if all rows have the same shape, otherwise columns
    of a table. rows: examples; answers: the model's predictions for them, by name."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema, TensorSpec

    if all(column.shape is not None and np.dtype(column.dtype).kind in "biuf" for column in needed):
        specs: list[Any] = [
            TensorSpec(np.dtype(column.dtype), (-1, *(column.shape or ())), column.name) for column in needed
        ]
    else:
        specs = [ColSpec(_column_type(rows[column.name]), column.name) for column in needed]
    found: list[Any] = [
        TensorSpec(values.dtype, (-1, *values.shape[1:]), name)
        for name, values in answers.items()
        if isinstance(values, np.ndarray) and values.dtype.kind in "biuf"
    ]
    # MLflow has no word for texts among tensors: without a schema of the answers anything may be answered
    outputs = Schema(found) if len(found) == len(answers) else None
    return ModelSignature(inputs=Schema(specs), outputs=outputs)


def _column_type(values: Any) -> Any:
    """MLflow's type of a value in a row of this column."""
    from mlflow.types import DataType
    from mlflow.types.schema import Array

    kinds = {"b": DataType.boolean, "i": DataType.long, "u": DataType.long, "f": DataType.double}
    found: Any = kinds.get(values.dtype.kind, DataType.string)
    for _ in range(np.asarray(values[0]).ndim):
        found = Array(found)
    return found


def _answers_without(answer: RowAnswers, rows: Columns, name: str, every: Mapping[str, Any]) -> bool:
    """Whether predictions are the same without a column."""
    left = {other: values for other, values in rows.items() if other != name}
    if not left:
        return False
    try:
        found = answer(left)
    except ScaleRayError:
        return False
    return found.keys() == every.keys() and all(np.array_equal(found[key], every[key]) for key in every)


def _two_of(values: Any) -> list[Any]:
    """The first example of a column, and a different one if there is any, to serve as labels."""
    first = values[0]
    other = next((values[at] for at in range(len(values)) if not np.array_equal(values[at], first)), first)
    return [np.asarray(one).tolist() for one in (first, other)]


def read_shape(folder: Path, workload: Any) -> tuple[Shape, bool]:
    """Read the columns written by `pack`: their shapes, and whether the workload's rows are tuples."""
    about = load_json((folder / COLUMNS).read_bytes())
    columns: dict[str, tuple[tuple[int, ...] | None, np.dtype]] = {}
    examples: Columns = {}
    for one in about["columns"]:
        name, dtype = one["name"], np.dtype(one["dtype"])
        columns[name] = (None if one["shape"] is None else tuple(one["shape"]), dtype)
        if (rows := one["examples"]) is not None:
            is_ragged = one["shape"] is None
            examples[name] = (
                Ragged.of([np.asarray(row, dtype) for row in rows]) if is_ragged else np.asarray(rows, dtype)
            )
    return Shape(columns, bool(about["wide"]), examples, reads_text(workload)), bool(about["tuples"])


class RowAnswers:
    """Function from rows, given as values by column, to predictions by name: arrays or lists of texts with one element
    per row."""

    def __init__(self, parts: ModelParts, shape: Shape, gives_tuples: bool) -> None:
        self.name = parts.name
        self.predictor = Predictor(PredictorParts(parts, shape, gives_tuples, where="the rows"))

    def __call__(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Raise DataError with the numbers of failing rows, or WorkloadError if all fail."""
        import pyarrow as pa

        table = pa.table({name: _as_arrow(values) for name, values in rows.items()})
        return dict(collected(iter([self.predictor(table)]), None, self.name, skip_failed=False).columns)


def _as_arrow(values: Any) -> Any:
    is_ragged = isinstance(values, Ragged) or (isinstance(values, np.ndarray) and values.dtype.kind == "O")
    return arrow_array(list(values) if is_ragged else values)
