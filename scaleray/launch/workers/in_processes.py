"""A run in gloo processes of this machine, one a worker, without Ray: short trainings that are profiled."""

from __future__ import annotations

import math
import os
import pickle
import threading
import time
from collections.abc import Mapping
from typing import Any

from scaleray.checkpoints.catalog import Catalog
from scaleray.data.source import Source
from scaleray.launch.workers.gloo import TELL, Teller, UserCode, gloo_processes, refuse_streams
from scaleray.launch.workers.loaded_workload import ship_user_code
from scaleray.recording.recorder import Recorder
from scaleray.records.run_record import Heartbeat, Show, WorkerMessage
from scaleray.records.wishes import Wish
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.place import Place

BEAT_S = 0.5
"""Seconds between two signs of life of each process."""


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

    def take(told: list[WorkerMessage] | Heartbeat) -> Wish | None:
        if not isinstance(told, Heartbeat):
            recorder.log(told)
            show(told)
            return None
        if told.rank == 0:
            show([told])
        return recorder.beat(told)

    recorder.alerts.show = lambda event: show([event])
    ship_user_code(job.workload)
    assignment = cloudpickle.dumps((job, sources, run_path, facts))
    workers, scale = job.config.scale.max_workers, job.config.scale
    with gloo_processes(
        workers, UserCode(None, {}, None, None), timeout_s=scale.collective_timeout_s, watched_in=run_path
    ) as processes:
        processes.run(workers, _train, assignment, TELL, workload=None, on_message=take)


def _train(place: Place, assignment: bytes, tell: Teller) -> None:
    """Main function of each process."""
    import torch

    from scaleray.training import loop
    from scaleray.training.health.worker_progress import Progress, Watchdog
    from scaleray.training.state.checkpointing import Checkpointing, Control
    from scaleray.training.state.weights import save_weights

    job, sources, run_path, facts = pickle.loads(assignment)  # made by the process that started this one
    torch.set_num_threads(max(1, int(job.config.scale.cpus_per_worker)))
    emit = _InBatches(tell, job.config.tracking.interval_s)
    catalog = Catalog.of_run(run_path, job.config.checkpoint.copy_path)
    progress, control = Progress(), Control()

    def beat(step: int, phase: str, since_s: float) -> Wish:
        return emit.beat(
            Heartbeat(
                place.rank,
                place.node,
                os.getpid(),
                step,
                phase,
                since_s,
                world_size=place.world_size,
                recent=progress.recent,
            )
        )

    # it ends nothing: the collectives' limit does, and `GroupWatch` writes down where the others stand
    life = Watchdog(
        progress,
        interval_s=BEAT_S,
        limit_s=math.inf,
        beat=beat,
        on_leave=control.wants_leave.set,
        on_save=control.wants_save.set,
        on_links=control.wants_links.set,
        on_hang=lambda what: None,
    )
    try:
        with life:
            loop.run(
                job,
                place,
                sources=sources,
                emit=emit,
                checkpointing=Checkpointing(job, place, catalog, emit=emit, control=control, facts=facts),
                progress=progress,
                save_weights=lambda share, name: save_weights(share, run_path, name, rank=place.rank),
            )
    finally:
        emit.close()


class _InBatches:
    """Hands messages on once an interval: a call for each would cost the step more than it takes. For several threads:
    checkpoints and signs of life come from their own, and what goes through a pipe must not mix."""

    def __init__(self, tell: Teller, interval_s: float) -> None:
        self._tell, self._interval_s = tell, interval_s
        self._waiting: list[WorkerMessage] = []
        self._sent_at = time.monotonic()
        self._is_closed = False
        self._lock, self._asking = threading.Lock(), threading.Lock()

    def __call__(self, message: WorkerMessage) -> None:
        with self._lock:
            self._waiting.append(message)
            if time.monotonic() - self._sent_at >= self._interval_s:
                self._flush()

    def beat(self, heartbeat: Heartbeat) -> Wish:
        """Hand a sign of life on at once, and give what is asked for; nothing after the end, when the pipe is for the
        process's result."""
        with self._asking:
            return Wish.NOTHING if self._is_closed else Wish(self._tell.ask(heartbeat, self._lock))

    def close(self) -> None:
        """Hand on what waits, and no sign of life any more, once the last one is answered."""
        with self._asking, self._lock:
            self._flush()
            self._is_closed = True

    def _flush(self) -> None:
        if self._waiting:
            self._tell(self._waiting)
        self._waiting, self._sent_at = [], time.monotonic()
