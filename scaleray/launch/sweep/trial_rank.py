"""One rank's part of a trial: its process group, its watches, and the loop."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from scaleray.launch.sweep.plan import SweepPlan, material_key
from scaleray.records.run import WorkerMessage, WorkerSummary
from scaleray.records.start import steady_time
from scaleray.records.wishes import Wish
from scaleray.reproducibility.seeding import same_switches
from scaleray.scaling.sweeps.search_space import Settings
from scaleray.training import loop
from scaleray.training.health import flight_recorder
from scaleray.training.health.progress import WATCHDOG_SHARE, Progress, Watchdog
from scaleray.training.health.stall_watch import StallWatch
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.place import Place
from scaleray.training.setup.stores import StorePlace, open_store
from scaleray.training.state.pausable_training import AskingCheckpointing

BEAT_S = 0.5


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one trial find each other."""

    place: StorePlace
    name: str
    backend: str
    timeout_s: float
    is_one_node: bool
    watched: tuple[str, str]
    """Folder, and name in it, for what its ranks were doing when they stood still."""


def train_rank(
    plan: SweepPlan,
    settings: Settings,
    place: Place,
    meeting: Meeting | None,
    *,
    emit: Callable[[WorkerMessage], None],
    make_checkpointing: Callable[[TrainJob, Place], AskingCheckpointing],
    on_hang: Callable[[str], None],
) -> WorkerSummary:
    """One rank's part of a trial, from its process group to its last step."""
    job = fresh_job(plan, settings)
    sources = plan.materials[material_key(job.config.workload.args)].sources
    progress = Progress()
    stalls = _stall_watch(progress, place, meeting, job.config.scale.collective_timeout_s)
    watchdog = Watchdog(
        progress,
        interval_s=BEAT_S,
        limit_s=WATCHDOG_SHARE * job.config.scale.collective_timeout_s,
        beat=lambda step, phase, since_s: Wish.NOTHING,
        on_leave=lambda: None,
        on_hang=on_hang,
        look=(lambda since_s, may_tell: None) if stalls is None else stalls.look,
    )
    with same_switches():
        if place.device.type == "cpu":
            torch.set_num_threads(max(1, int(job.config.scale.cpus_per_worker)))
        else:
            torch.cuda.set_device(place.device)
        with _process_group(place, meeting), stalls or contextlib.nullcontext(), watchdog:
            return loop.run(
                job, place, sources=sources, emit=emit, progress=progress, checkpointing=make_checkpointing(job, place)
            )


def _stall_watch(progress: Progress, place: Place, meeting: Meeting | None, timeout_s: float) -> StallWatch | None:
    if meeting is None:
        return None
    path, group = meeting.watched
    return StallWatch(
        progress, place, path, collective_timeout_s=timeout_s, look_every_s=BEAT_S, group=group, since_ns=time.time_ns()
    )


def fresh_job(plan: SweepPlan, settings: Settings) -> TrainJob:
    """The trial's job with a workload of its own, as a new process would have it."""
    from ray import cloudpickle

    job = plan.job(settings, started_at=steady_time())
    # from the driver of this sweep, not from outside
    return dataclasses.replace(job, workload=cloudpickle.loads(job.workload))


@contextlib.contextmanager
def _process_group(place: Place, meeting: Meeting | None) -> Iterator[None]:
    if meeting is None:
        yield
        return
    if meeting.is_one_node and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo may pick an address that the machine cannot reach
    flight_recorder.switch_on()
    timeout = timedelta(seconds=meeting.timeout_s)
    store = open_store(meeting.place, timeout=timeout)
    dist.init_process_group(
        meeting.backend,
        store=dist.PrefixStore(meeting.name, store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
