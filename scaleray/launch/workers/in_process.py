"""A run in this process, without Ray: for a debugger, and for tests."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from scaleray.checkpoints.catalog import Catalog
from scaleray.common.stop_signals import on_sigterm
from scaleray.common.watchers import Guard
from scaleray.data.source import Source
from scaleray.launch.workers.gloo import refuse_streams
from scaleray.recording.recorder import Recorder
from scaleray.records.run_record import Emit, EventRecord, Heartbeat, Show, WorkerMessage
from scaleray.records.wishes import Wish
from scaleray.training import loop
from scaleray.training.health.stall_watch import StallWatch
from scaleray.training.health.worker_progress import Progress, Watchdog
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.place import Place
from scaleray.training.state.checkpointing import Checkpointing, Control
from scaleray.training.state.weights import save_weights

BEAT_S = 0.5  # seconds between two looks at what it does


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
    refuse_streams(job)
    device = torch.device("cuda") if job.config.scale.gpus else torch.device("cpu")

    def emit(message: WorkerMessage) -> None:
        recorder.log([message])
        show([message])

    recorder.alerts.show = lambda event: show([event])
    place, control, progress = Place(device=device), Control(), Progress()
    stalls, life = _watches(job, place, progress, run_path, emit=emit, show=show, recorder=recorder, control=control)
    checkpointing = Checkpointing(
        job,
        place,
        Catalog.of_run(run_path, job.config.checkpoint.copy_path),
        emit=emit,
        control=control,
        facts=facts,
        before_publishing=lambda: {"mlflow": recorder.durable()},
    )
    threads, was_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    if device.type == "cpu":
        torch.set_num_threads(max(1, int(job.config.scale.cpus_per_worker)))
    try:
        # SIGTERM asks the loop to save and leave after its step
        with stalls, life, on_sigterm(control.wants_leave.set, once=True):
            loop.run(
                job,
                place,
                sources=sources,
                emit=emit,
                checkpointing=checkpointing,
                progress=progress,
                save_weights=lambda share, name: save_weights(share, run_path, name, rank=0),
            )
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(was_deterministic)


def _watches(
    job: TrainJob,
    place: Place,
    progress: Progress,
    run_path: str,
    *,
    emit: Emit,
    show: Show,
    recorder: Recorder,
    control: Control,
) -> tuple[StallWatch, Watchdog]:
    """Observer of the training in a thread of its own. It ends nothing: a debugger may stop for hours."""

    def beat(step: int, phase: str, since_s: float) -> Wish:
        heartbeat = Heartbeat(0, "here", os.getpid(), step, phase, since_s, recent=progress.recent)
        show([heartbeat])
        return recorder.beat(heartbeat)

    def warn(text: str) -> None:
        emit(EventRecord(text, kind="warning"))

    stalls = StallWatch(
        progress,
        place,
        run_path,
        collective_timeout_s=job.config.scale.collective_timeout_s,
        look_every_s=BEAT_S,
        say=warn,
        guard=Guard(warn),
    )
    life = Watchdog(
        progress,
        interval_s=BEAT_S,
        limit_s=math.inf,
        beat=beat,
        on_leave=control.wants_leave.set,
        on_save=control.wants_save.set,
        on_links=control.wants_links.set,
        on_hang=lambda what: None,
        look=stalls.look,
    )
    return stalls, life
