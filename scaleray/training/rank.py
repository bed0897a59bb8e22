"""One rank of a run, in any kind of process: its checkpoints, its watchdog thread, and its loop."""

import contextlib
import math
import os
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from scaleray.checkpoints.catalog import Catalog
from scaleray.common.watchers import Guard
from scaleray.data import Sources
from scaleray.records.run_record import Emit, EventRecord, Heartbeat, WorkerSummary
from scaleray.records.worker_requests import ControlRequest
from scaleray.training import loop
from scaleray.training.health.stall_watch import StallWatch
from scaleray.training.health.worker_progress import BEAT_S, HANG, WATCHDOG_SHARE, Progress, Watchdog
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.state.checkpointing import Checkpointing, Control
from scaleray.training.state.final_weight_files import save_weights
from scaleray.training.state.live_state import LiveState
from scaleray.training.state.memory_copies import Holders
from scaleray.workload import no_exit

HANG_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h


@dataclass(frozen=True)
class Channel:
    """Connection of a rank to the recorder of its run.

    send: takes messages from several threads, without blocking. beat: delivers a heartbeat and returns the recorder's
    request. flush: waits until all messages have arrived. durable: the recorder's state once everything in it is
    written, for checkpoints."""

    send: Emit
    beat: Callable[[Heartbeat], ControlRequest]
    flush: Callable[[], object] = lambda: None
    durable: Callable[[], Any] | None = None


def run_rank(
    job: TrainJob,
    context: RankContext,
    channel: Channel,
    *,
    sources: Sources,
    run_path: str,
    facts: Mapping[str, Any],
    control: Control | None = None,
    tail: Collection[str] = (),
    ends_hangs: bool = False,
    is_watched: bool = False,
    live: LiveState | None = None,
    holders: Holders | None = None,
) -> WorkerSummary:
    """Train this rank's share to the end of the run.

    facts: the run's facts for every checkpoint. control: requests to this rank from its own process. tail: last lines
    of the process's output. ends_hangs: end the process if it hangs; otherwise it may wait in a debugger for hours.
    is_watched: a watch on the whole group already records where its ranks stall. live: state in memory from which to
    continue. holders: processes that hold copies of the state in memory."""
    progress, control, timeout_s = Progress(), control or Control(), job.config.scale.collective_timeout_s
    if context.device.type == "cpu":
        torch.set_num_threads(max(1, int(job.config.scale.cpus_per_worker)))

    def beat(step: int, phase: str, since_s: float) -> ControlRequest:
        rank, size, lines, recent = context.rank, context.world_size, tuple(tail), progress.recent
        return channel.beat(
            Heartbeat(rank, context.node, os.getpid(), step, phase, since_s, lines, size, recent=recent)
        )

    def warn(text: str) -> None:
        channel.send(EventRecord(text, kind="warning"))

    def end_process(what: str) -> None:
        threading.Timer(10.0, os._exit, [HANG_EXIT_CODE]).start()  # whatever the recorder does
        with contextlib.suppress(Exception):
            beat(progress.step, HANG + what, 0.0)
        channel.flush()
        os._exit(HANG_EXIT_CODE)  # the training thread cannot be ended otherwise

    interval_s, durable = max(BEAT_S, context.world_size / 100), channel.durable
    checkpointing = Checkpointing(
        job,
        context,
        Catalog.of_run(run_path, job.config.checkpoint.copy_path),
        emit=channel.send,
        control=control,
        facts=facts,
        before_publishing=dict if durable is None else lambda: {"mlflow": durable()},
        live=live,
        holders=holders,
    )
    stalls = StallWatch(
        progress,
        context,
        run_path,
        collective_timeout_s=timeout_s,
        look_every_s=interval_s,
        say=None if ends_hangs else warn,
        guard=Guard(warn),
    )
    watchdog = Watchdog(
        progress,
        interval_s=interval_s,
        limit_s=WATCHDOG_SHARE * timeout_s if ends_hangs else math.inf,
        beat=beat,
        on_leave=control.wants_leave.set,
        on_save=control.wants_save.set,
        on_links=control.wants_links.set,
        on_hang=end_process,
        look=(lambda since_s, may_tell: None) if is_watched else stalls.look,
    )
    try:
        with contextlib.nullcontext() if is_watched else stalls, watchdog, no_exit("the workload's code"):
            return loop.run(
                job,
                context,
                sources=sources,
                emit=channel.send,
                checkpointing=checkpointing,
                progress=progress,
                save_weights=lambda share, name: save_weights(share, run_path, name, rank=context.rank),
            )
    finally:
        channel.flush()
