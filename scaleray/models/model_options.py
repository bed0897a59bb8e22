"""Options of the commands that take the model of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from scaleray.common.options import Words

if TYPE_CHECKING:
    WorkloadLike = Any
    """A workload: a class, an object or a name."""
    StepName = int | str
    """Number of a step, or a text that names one."""
else:  # a command line has texts alone
    WorkloadLike = StepName = str

Format = Literal["safetensors", "torch.export", "onnx", "pt", "folder", "adapter"]
DType = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """Weights and workload of a run's model."""

    step: StepName | None = None
    """Which checkpoint: its number, best (by checkpoint.best), or a metric and its direction, such as
    "val/loss min". By default the final weights."""
    weights: str | None = None
    """averaged or trained, of a run that keeps an average of its weights (averaging.decay). By default the average.
    With `predict -c FILE` it names the run."""
    workload: WorkloadLike | None = None
    """path/to/file.py:Name or package.module:Name of the workload, where the run's own is not found again."""
    uri: str | None = None
    """MLflow's tracking URI, for a run that is found there; else SCALERAY_TRACKING__URI or MLFLOW_TRACKING_URI."""

    @property
    def which_step(self) -> int | str | None:
        """The step as a number, if it is one."""
        return int(self.step) if isinstance(self.step, str) and self.step.isdecimal() else self.step

    @property
    def parts(self) -> dict[str, Any]:
        """The choice as arguments of `find_parts`."""
        return {"step": self.which_step, "which": self.weights, "workload": self.workload, "uri": self.uri}


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(ModelChoice):
    """What is evaluated, and where."""

    split: str | None = None
    """One split of the run's own; train too."""
    workers: int = 1
    """Workers with a whole model and a share of the rows each."""
    local: bool = False
    """Without Ray: in this process, or in gloo processes where there are several workers."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions(ModelChoice):
    """Rows to predict, and where."""

    split: str | None = None
    """A split of the run's own, in place of --data."""
    keep: Words = ""
    """Columns of the data to write next to the answers, with commas."""
    batch_size: int = 256
    """Rows in a batch of the model."""
    workers: int = 1
    """Ray actors, each of which has the model."""
    local: bool = False
    """In this process, without Ray."""
    skip_failed: bool = False
    """Leave out rows that fail, and name them; otherwise the first of them end the command."""
    overwrite: bool = False
    """Replace a file that exists."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ModelChoice):
    """Format of a file, and how it is compared with the model."""

    format: Format | None = None
    """Format; by default that of the ending. onnx needs the extra onnx of the installation."""
    dtype: DType | None = None
    """Type of the floating-point weights; by default as they were trained."""
    tolerance: float | None = None
    """Largest difference over the largest output; by default 0 for safetensors, 1e-5 for torch.export, 1e-4 for onnx
    and fp32, 1e-2 for fp16, 5e-2 for bf16."""
    overwrite: bool = False
    """Replace a file that exists; a folder is renamed to FOLDER.before-1."""
