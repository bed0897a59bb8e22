"""Features that a training without Ray cannot have, in any kind of process."""

from __future__ import annotations

from scaleray.errors import DataError
from scaleray.training.setup.job import TrainJob


def refuse_streams(job: TrainJob) -> None:
    """Raise DataError where a split is a Ray Dataset."""
    streamed = [name for name, split in job.splits.items() if split.is_streamed]
    if streamed:
        raise DataError(f"the {streamed[0]} data", "a Ray Dataset", "--local runs without Ray", "leave --local out")
