"""A run in gloo processes of this machine, one a worker, without Ray: short trainings that are profiled."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping
from typing import Any

from scaleray.checkpoints.catalog import Catalog
from scaleray.data.source import Source
from scaleray.launch.workers.gloo import TELL, UserCode, gloo_processes
from scaleray.launch.workers.user_code import ship_user_code
from scaleray.launch.workers.without_ray import refuse_streams
from scaleray.records.run import Show, WorkerMessage
from scaleray.tracking.recorder import Recorder
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.place import Place


def run_in_processes(
    job: TrainJob,
    sources: Mapping[str, Source],
    recorder: Recorder,
    *,
    run_path: str,
    facts: Mapping[str, Any],
    show: Show,
) -> None:
    """Train with the workers of the config in processes that end with this call. Raises what a worker raised."""
    from ray import cloudpickle  # by value: user code that exists in the user's folder only

    refuse_streams(job)

    def take(messages: list[WorkerMessage]) -> None:
        recorder.log(messages)
        show(messages)

    recorder.alerts.show = lambda event: show([event])
    ship_user_code(job.workload)
    assignment = cloudpickle.dumps((job, sources, run_path, facts))
    workers, scale = job.config.scale.max_workers, job.config.scale
    with gloo_processes(
        workers, UserCode(None, {}, None, None), timeout_s=scale.collective_timeout_s, watched_in=run_path
    ) as processes:
        processes.run(workers, _train, assignment, TELL, workload=None, on_message=take)


def _train(place: Place, assignment: bytes, tell: Callable[[list[WorkerMessage]], None]) -> None:
    """What each process runs."""
    import torch

    from scaleray.training import loop
    from scaleray.training.state.checkpointing import Checkpointing
    from scaleray.training.state.weights import save_weights

    job, sources, run_path, facts = pickle.loads(assignment)  # made by the process that started this one
    torch.set_num_threads(max(1, int(job.config.scale.cpus_per_worker)))
    emit = _InBatches(tell, job.config.tracking.interval_s)
    catalog = Catalog.of_run(run_path, job.config.checkpoint.copy_path)
    try:
        loop.run(
            job,
            place,
            sources=sources,
            emit=emit,
            checkpointing=Checkpointing(job, place, catalog, emit=emit, facts=facts),
            save_weights=lambda share, name: save_weights(share, run_path, name, rank=place.rank),
        )
    finally:
        emit.flush()


class _InBatches:
    """Hands messages on once an interval: a call for each would cost the step more than it takes."""

    def __init__(self, tell: Callable[[list[WorkerMessage]], None], interval_s: float) -> None:
        self._tell, self._interval_s = tell, interval_s
        self._waiting: list[WorkerMessage] = []
        self._sent_at = time.monotonic()

    def __call__(self, message: WorkerMessage) -> None:
        self._waiting.append(message)
        if time.monotonic() - self._sent_at >= self._interval_s:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            self._tell(self._waiting)
        self._waiting, self._sent_at = [], time.monotonic()
