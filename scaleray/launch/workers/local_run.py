"""A run on this machine without Ray: in this process, for a debugger and for tests, or in gloo processes, one per
worker, for profiled short trainings."""

import pickle
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from scaleray.common.stop_signals import on_sigterm
from scaleray.data.source_interface import Source
from scaleray.launch.workers.gloo import TELL, Teller, UserCode, gloo_processes, refuse_streams
from scaleray.launch.workers.loaded_workload import ship_user_code
from scaleray.recording.recorder import Recorder
from scaleray.records.run_record import Heartbeat, Show, WorkerMessage
from scaleray.records.worker_requests import ControlRequest
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext


def run_here(
    job: TrainJob,
    sources: Mapping[str, Source],
    recorder: Recorder,
    *,
    run_path: str,
    facts: Mapping[str, Any],
    show: Show,
) -> None:
    """Train with one worker in this process and this thread."""
    from scaleray.training.rank import Channel, run_rank
    from scaleray.training.state.checkpointing import Control

    refuse_streams(job)

    def send(message: WorkerMessage) -> None:
        recorder.log([message])
        show([message])

    def beat(heartbeat: Heartbeat) -> ControlRequest:
        show([heartbeat])
        return recorder.beat(heartbeat)

    recorder.alerts.show = lambda event: show([event])
    context, control = RankContext(device=torch.device("cuda" if job.config.scale.gpus else "cpu")), Control()
    channel = Channel(send, beat, durable=recorder.durable)
    threads, was_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        # SIGTERM asks the loop to save and leave after its step
        with on_sigterm(control.wants_leave.set, once=True):
            run_rank(job, context, channel, sources=sources, run_path=run_path, facts=facts, control=control)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(was_deterministic)


def run_in_processes(
    job: TrainJob,
    sources: Mapping[str, Source],
    recorder: Recorder,
    *,
    run_path: str,
    facts: Mapping[str, Any],
    show: Show,
) -> None:
    """Train with the config's workers in processes that end with this call. Raises a worker's error."""
    from ray import cloudpickle  # by value: user code that exists in the user's folder only

    refuse_streams(job)

    def take(message: list[WorkerMessage] | Heartbeat) -> ControlRequest | None:
        if not isinstance(message, Heartbeat):
            recorder.log(message)
            show(message)
            return None
        if message.rank == 0:
            show([message])
        return recorder.beat(message)

    recorder.alerts.show = lambda event: show([event])
    ship_user_code(job.workload)
    assignment = cloudpickle.dumps((job, sources, run_path, facts))
    workers, scale = job.config.scale.max_workers, job.config.scale
    with gloo_processes(
        workers, UserCode(None, {}, None, None), timeout_s=scale.collective_timeout_s, watched_in=run_path
    ) as processes:
        processes.run(workers, _train, assignment, TELL, workload=None, on_message=take)


def _train(context: RankContext, assignment: bytes, tell: Teller) -> None:
    """Entry point of each process."""
    from scaleray.training.rank import Channel, run_rank

    job, sources, run_path, facts = pickle.loads(assignment)  # made by the process that started this one
    batches = _InBatches(tell, job.config.tracking.interval_s)
    channel = Channel(batches, batches.beat, flush=batches.close)
    # a hang ends by the collectives' limit, and `GroupWatch` records where the others are
    run_rank(job, context, channel, sources=sources, run_path=run_path, facts=facts, is_watched=True)


class _InBatches:
    """Passes messages on once per interval, since a call for each would take longer than a step. Thread-safe:
    checkpoints and heartbeats come from separate threads, and must not mix in the pipe."""

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

    def beat(self, heartbeat: Heartbeat) -> ControlRequest:
        """Pass a heartbeat on immediately and return the driver's request. Does nothing after `close`, when the pipe is
        reserved for the process's result."""
        with self._asking:
            return ControlRequest.NOTHING if self._is_closed else ControlRequest(self._tell.ask(heartbeat, self._lock))

    def close(self) -> None:
        """Pass the waiting messages on, and no more heartbeats after the last one is answered."""
        with self._asking, self._lock:
            self._flush()
            self._is_closed = True

    def _flush(self) -> None:
        if self._waiting:
            self._tell(self._waiting)
        self._waiting, self._sent_at = [], time.monotonic()
