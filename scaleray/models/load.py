"""`load`: the model of a run with its weights, ready for use, and the parts for building it on another machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from scaleray.common.options import takes
from scaleray.common.seeding import same_random_numbers
from scaleray.config import RunConfig
from scaleray.data import preprocessing
from scaleray.data.as_source import reads_text
from scaleray.data.preprocessing import Preprocess
from scaleray.data.ragged import Ragged
from scaleray.data.row_random import RowRandom
from scaleray.data.sample_order import mixed
from scaleray.data.source_interface import Columns, as_column, rows_in
from scaleray.data.transformed import Transform
from scaleray.models.batch_predictions import Answers
from scaleray.models.model_options import ModelChoice
from scaleray.models.packed_code import own_name
from scaleray.models.stored_weights import Weights, fill, read_run_weights
from scaleray.models.trained_run import TrainedRun, find_trained, workload_of
from scaleray.training.setup import fine_tuning, precision
from scaleray.training.setup.model_setup import check_model
from scaleray.training.step.micro_batches import user_batch
from scaleray.workload import built_model, call_user_code

PREDICT = "predict"
"""Split name passed to a transform for rows that are not part of a split."""


@dataclass(frozen=True)
class TrainedModel:
    """The model of a run, in evaluation mode, with the requested weights."""

    module: nn.Module
    """Result of the workload's `build_model`, with the weights loaded."""
    workload: Any
    config: RunConfig
    """Config of the run."""
    step: int | None
    """Optimizer steps of the weights; None if unknown."""
    words: str
    """Description of these weights and their run, for readers."""
    device: torch.device
    precision: precision.Precision
    preprocessor: Any = None
    """The run's fitted preprocessor, or None."""
    gives_tuples: bool = False
    """Whether the workload's rows are tuples instead of named columns."""

    def predict(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Predict some rows; returns arrays by name, with one element per row.

        rows: arrays by column, as in the workload's `datasets()`; labels are not needed. Predictions come from the
        workload's `predict(model, batch)`, or else from the model's output in the loss. Raises WorkloadError."""
        columns = {
            name: as_column(name, values, allows_text=reads_text(self.workload)) for name, values in rows.items()
        }
        return self.answers()(self.changed(columns))

    def changed(self, rows: Columns) -> Columns:
        """Apply the preprocessor, and the workload's `transform` for a split named `predict`, to rows as from
        `datasets()`."""
        transform = Transform.of(self.workload, PREDICT)
        steps: list[Any] = [] if transform is None else [transform]
        if self.preprocessor is not None:
            steps.insert(0, Preprocess(self.preprocessor, allows_text=transform is not None))
        for step in steps:
            rows = step(rows, RowRandom(mixed(np.arange(rows_in(rows), dtype=np.uint64))))
        return rows

    def answers(self) -> Answers:
        """Function from rows to predictions, for many batches."""
        return Answers(self.workload, self.module, self._batch, self.precision.autocast)

    def _batch(self, columns: Columns) -> Any:
        dtype = self.precision.input_dtype
        rows = {name: _writable(values) for name, values in columns.items()}
        return user_batch(self.workload, rows, self.device, dtype, gives_tuples=self.gives_tuples)


@dataclass(frozen=True)
class ModelParts:
    """Parts from which a process builds the model of a run. They can be sent to processes without access to the run's
    files."""

    name: str
    config: RunConfig
    workload: Any
    weights: Weights
    preprocessor: Any = None

    def build(self, device: torch.device | str = "cpu") -> TrainedModel:
        """Build the model, load the weights, and set evaluation mode. Raises CheckpointError or WorkloadError."""
        device = torch.device(device)
        with same_random_numbers(device):  # what a model draws is replaced by the weights
            module = built_model(self.workload, doing="building the model")
        check_model(module)
        if self.keeps_adapters:
            fine_tuning.adapt(module, self.config.fine_tuning)
        module.to(device)
        arithmetic = precision.prepare(module, device, self.config.precision)
        fill(module, self.weights, where=f"{self.weights.words} of {self.name}")
        module.eval()
        words = f"{self.weights.words} of {self.name}"
        return TrainedModel(
            module=module,
            workload=self.workload,
            config=self.config,
            step=self.weights.step,
            words=words,
            device=device,
            precision=arithmetic,
            preprocessor=self.preprocessor,
        )

    @property
    def keeps_adapters(self) -> bool:
        """Whether the weights have adapters that are separate from their layers."""
        return bool(self.config.fine_tuning.lora_rank) and fine_tuning.has_adapters(self.weights.tensors)


@takes(ModelChoice)
def load(run: str | Path, *, options: ModelChoice, device: torch.device | str = "cpu") -> TrainedModel:
    """Load the model of a run with its final weights, in evaluation mode: `load(run).module`.

    run: its folder or s3:// URI, its name in the storage path, or its id or name in MLflow. device: the model's device.
    `workload` may also be a class or object. Without final weights, those of the run's newest checkpoint are used. The
    state of a workload with a `state_dict` is restored from the checkpoint or, for final weights, from the last step's
    checkpoint. Nothing is unpickled.

    Raises TrackingError if the run does not exist, CheckpointError if weights are missing or do not fit, and
    WorkloadError if the workload is not found."""
    return find_parts(run, options=options).build(device)


def _writable(column: Any) -> Any:
    """A column in memory that torch may share, as Arrow's memory is read-only."""
    return column.copy() if isinstance(column, Ragged) else np.require(column, requirements=["C", "W"])


@takes(ModelChoice)
def find_parts(run: str | Path | TrainedRun, *, options: ModelChoice) -> ModelParts:
    """Find the workload, config and weights of a run, as used by `load`."""
    found = run if isinstance(run, TrainedRun) else find_trained(run, uri=options.uri)
    made = workload_of(found, options.workload)
    weights = read_run_weights(found, options.which_step, options.weights).merged(found.config.fine_tuning)
    if weights.workload_state is not None and callable(getattr(made, "load_state_dict", None)):
        state = weights.workload_state
        call_user_code(lambda: made.load_state_dict(state), what="load_state_dict()", doing="restoring its state")
    return ModelParts(found.name, found.config, made, weights, preprocessor_of_run(found, made))


def preprocessor_of_run(run: TrainedRun, workload: Any) -> Any:
    """The fitted preprocessor in a run folder, whose class may be defined in the workload's file; None if there is
    none."""
    try:
        return preprocessing.load(run.folder.root, partial(own_name, workload=workload))
    except OSError:
        return None  # a run of which MLflow alone is left
