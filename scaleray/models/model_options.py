"""Options of commands that use the model of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from scaleray.common.options import Words

if TYPE_CHECKING:
    WorkloadLike = Any
    """A workload: a class, an object or a name."""
    StepName = int | str
    """Number of a step, or text that names a step."""
else:  # a command line has texts alone
    WorkloadLike = StepName = str

Format = Literal["safetensors", "torch.export", "onnx", "pt", "folder", "adapter"]
DType = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """Weights and workload of a run's model."""

    step: StepName | None = None
    """The checkpoint: its number, best (by checkpoint.best), or a metric and its direction, such as "val/loss min". The
    final weights by default."""
    weights: str | None = None
    """averaged or trained, if the run has an average of its weights (averaging.decay). The average by default. With
    `predict -c FILE`, it names the run."""
    workload: WorkloadLike | None = None
    """path/to/file.py:Name or package.module:Name of the workload, if the run's own cannot be found."""
    uri: str | None = None
    """MLflow's tracking URI, for a run found there; SCALERAY_TRACKING__URI or MLFLOW_TRACKING_URI by default."""

    @property
    def which_step(self) -> int | str | None:
        """The step as an integer if it is a number."""
        return int(self.step) if isinstance(self.step, str) and self.step.isdecimal() else self.step


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(ModelChoice):
    """Data to evaluate, and the processes that evaluate it."""

    split: str | None = None
    """One of the run's own splits, including train."""
    workers: int = 1
    """Number of workers, each with a whole model and a share of the rows."""
    local: bool = False
    """Run without Ray: in this process, or in gloo processes if there are several workers."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions(ModelChoice):
    """Rows to predict, and the processes that predict them."""

    split: str | None = None
    """One of the run's own splits, instead of --data."""
    keep: Words = ""
    """Columns of the data to write next to the predictions, separated by commas."""
    batch_size: int = 256
    """Number of rows in a batch."""
    workers: int = 1
    """Number of Ray actors, each with a copy of the model."""
    local: bool = False
    """Run in this process, without Ray."""
    skip_failed: bool = False
    """Omit rows that fail, and report them. By default, the first failure ends the command."""
    overwrite: bool = False
    """Replace an existing file."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ModelChoice):
    """Format of the exported file, and the check of its outputs."""

    format: Format | None = None
    """Format; by default that of the file's ending. onnx requires the extra `onnx`."""
    dtype: DType | None = None
    """Type of the floating-point weights; by default the trained type."""
    tolerance: float | None = None
    """Largest allowed difference, relative to the largest output; by default 0 for safetensors, 1e-5 for torch.export,
    1e-4 for onnx and fp32, 1e-2 for fp16, 5e-2 for bf16."""
    overwrite: bool = False
    """Replace an existing file; an existing folder is renamed to FOLDER.before-1."""
