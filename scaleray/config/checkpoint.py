"""Settings of checkpoints: when they are made, where they are stored, and how many are retained."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from scaleray.config.base import Count, Duration, NonNegative, Positive, Settings, above_zero, absolute_path

NOTHING_SAVED: dict[str, Any] = {
    "checkpoint.save_final": False,
    "checkpoint.every": None,
    "checkpoint.every_minutes": None,
    "checkpoint.best": None,
    "checkpoint.keep_every": None,
    "checkpoint.copies": 1,
    "checkpoint.copy_path": None,
}
"""Settings for measurements and comparisons, whose trainings leave no files."""


class MemorySettings(Settings):
    """Copies of the state in the memory of several nodes, in addition to the checkpoints in storage."""

    every: Duration = Duration(1, "steps")
    """Interval between two states. A step is skipped while a worker is still copying an earlier state."""
    copies: Annotated[int, Field(ge=1, le=8)] = 2
    """Number of copies of each worker's part; the first copy is on its own node."""
    place: Annotated[str, Field(min_length=1)] = "node"
    """Failure domain that copies must not share: `node`, or the name of a label of Ray's nodes, such as `rack`."""

    _check_every = field_validator("every")(above_zero)


class CheckpointSettings(Settings):
    """Location of a run's files, and how often its complete state is saved for resuming."""

    storage_path: str = "~/scaleray"
    """Folder or s3:// URI for run folders; made absolute when loaded. With several nodes it must be shared."""
    save_final: bool = True
    """Save the final model weights (a plain state dict) in the run folder and in MLflow."""
    every: Duration | None = None
    """Interval between checkpoints, such as `500 steps` or `1 epoch`; the last step is saved too. None: use only
    `every_minutes`."""
    every_minutes: Positive | None = 10.0
    """Longest time between checkpoints, in minutes. None: use only `every`."""
    is_asynchronous: bool = True
    """Copy and write during training. false: training waits until a checkpoint is complete."""
    keep_last: Count = 2
    """Number of newest checkpoints to retain."""
    keep_best: Annotated[int, Field(ge=0, le=1000)] = 1
    """Number of best checkpoints, by `best`, to retain in addition."""
    best: Annotated[str, Field(pattern=r"^[\w./-]+ (min|max)$")] | None = None
    """Evaluation metric and its direction, such as `val/loss min`: a state among the `keep_best` best so far is saved
    immediately. None: checkpoints are not ranked."""
    keep_every: Duration | None = None
    """Interval between checkpoints that are never deleted, such as `10 epochs`."""
    full_every: Count = 16
    """Number of checkpoints from one full checkpoint to the next; those in between omit unchanged tensors. 1: every
    checkpoint is full."""
    copies: Literal[1, 2] = 1
    """Number of copies of each checkpoint. 2: each shard is also written to `copy_path`, from which lost or damaged
    shards are restored."""
    copy_path: str | None = None
    """Folder or s3:// URI of the second copy, on another disk, node or bucket."""
    memory: MemorySettings | None = None
    """Copies of the state in the memory of several nodes, from which a run continues after losing workers, such as
    `{every: 1 step, copies: 2, place: node}`: the interval, the number of copies, and the failure domain that copies
    must not share, `node` or a label of Ray's nodes such as rack. None: checkpoints in storage only."""
    grace_s: NonNegative = 2.5
    """Seconds after SIGTERM for the last checkpoint, after which workers are ended. `ray job stop` kills after 3 s."""

    _check_every = field_validator("every", "keep_every")(above_zero)

    @property
    def best_metric(self) -> str | None:
        """Name of the metric in `best`, or None."""
        return self.best.partition(" ")[0] if self.best is not None else None

    @property
    def is_higher_better(self) -> bool:
        """Whether larger values of the metric in `best` are better."""
        return self.best is not None and self.best.endswith(" max")

    @model_validator(mode="after")
    def _copies_have_a_place(self) -> CheckpointSettings:
        if (self.copies == 2) != (self.copy_path is not None):
            raise ValueError("checkpoint.copies 2 and checkpoint.copy_path belong together: give both or neither")
        return self


def default_storage_path() -> str:
    """Folder in which runs are looked up by name: the environment's storage path, or the default; absolute."""
    given = os.environ.get("SCALERAY_CHECKPOINT__STORAGE_PATH")
    return absolute_path(given or CheckpointSettings().storage_path)
