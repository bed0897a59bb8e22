"""The function that Ray Train runs on every worker, and its input, as the driver sends them.

The driver and Ray Train's controller import this module but not the training's code, whose import, with torch's
compiler, takes over a second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scaleray.data import RaySources
    from scaleray.records.run_record import WorkerSummary
    from scaleray.training.setup.job import TrainJob


@dataclass(frozen=True)
class Assignment:
    """Input of a worker. recorder: handle of the recorder actor."""

    job: TrainJob
    sources: RaySources
    recorder: Any
    run_path: str
    facts: Mapping[str, Any]
    """The run's facts for every checkpoint, in addition to its state."""
    published_as: tuple[str, str] | None = None
    """Name and id of the run in the metrics of Ray's nodes; None if the nodes publish none."""
    can_be_preempted: bool = False
    """Whether the cluster may announce the removal of a node."""
    coordinator: Any = None
    """Handle of the actor that replaces lost workers, see `launch/workers/coordinator_actor.py`; None without
    spares."""


def train_worker(config: dict[str, Any]) -> WorkerSummary | None:
    """Entry point of one Ray Train worker; `config["task"]` refers to an Assignment. Returns None on a spare."""
    from scaleray.training.worker import train

    return train(config)
