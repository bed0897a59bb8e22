"""Processes for one trial after another: rank 0 in the trial's own process, the other ranks as separate actors.

They share the trial's placement group, so that Ray gives a trial all of its workers or none, and they are reused by
later trials. Each trial creates its own process group with a store on rank 0. Workers read their rows themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from scaleray.common.seeding import same_switches
from scaleray.config import RunConfig
from scaleray.errors import PeerLostError, RunFailedError, ScaleRayError, first_line
from scaleray.launch.workers.hang_reports import with_explanation
from scaleray.launch.workers.ray_train import worker_resources
from scaleray.records.run_record import WorkerMessage, WorkerSummary
from scaleray.records.start import steady_time
from scaleray.records.worker_requests import ControlRequest
from scaleray.sweeps.search_space import Settings
from scaleray.sweeps.sweep_plan import SweepPlan, material_key
from scaleray.training import loop
from scaleray.training.health import flight_recorder
from scaleray.training.health.stall_watch import StallWatch
from scaleray.training.health.worker_progress import BEAT_S, WATCHDOG_SHARE, Progress, Watchdog
from scaleray.training.rank import HANG_EXIT_CODE
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.setup.stores import OwnedStore, StorePlace, open_store
from scaleray.training.state.pausable_training import AskingCheckpointing, Decision, Ended, Paused, StepwiseTraining
from scaleray.workload import no_exit


@dataclass(frozen=True)
class Rendezvous:
    """Rendezvous of the ranks of one trial."""

    place: StorePlace
    name: str
    backend: str
    timeout_s: float
    is_one_node: bool
    watched: tuple[str, str]
    """Folder and file name for the stacks of stalled ranks."""


def train_rank(
    plan: SweepPlan,
    settings: Settings,
    place: RankContext,
    rendezvous: Rendezvous | None,
    *,
    emit: Callable[[WorkerMessage], None],
    make_checkpointing: Callable[[TrainJob, RankContext], AskingCheckpointing],
    on_hang: Callable[[str], None],
) -> WorkerSummary:
    """Run one rank's part of a trial, from its process group to its last step."""
    job = fresh_job(plan, settings)
    sources = plan.materials[material_key(job.config.workload.args)].sources
    progress = Progress()
    stalls = _stall_watch(progress, place, rendezvous, job.config.scale.collective_timeout_s)
    watchdog = Watchdog(
        progress,
        interval_s=BEAT_S,
        limit_s=WATCHDOG_SHARE * job.config.scale.collective_timeout_s,
        beat=lambda step, phase, since_s: ControlRequest.NOTHING,
        on_leave=lambda: None,
        on_hang=on_hang,
        look=(lambda since_s, may_tell: None) if stalls is None else stalls.look,
    )
    with same_switches():
        if place.device.type == "cpu":
            torch.set_num_threads(max(1, int(job.config.scale.cpus_per_worker)))
        else:
            torch.cuda.set_device(place.device)
        with _process_group(place, rendezvous), stalls or contextlib.nullcontext(), watchdog:
            return loop.run(
                job, place, sources=sources, emit=emit, progress=progress, checkpointing=make_checkpointing(job, place)
            )


def _stall_watch(
    progress: Progress, place: RankContext, rendezvous: Rendezvous | None, timeout_s: float
) -> StallWatch | None:
    if rendezvous is None:
        return None
    path, group = rendezvous.watched
    return StallWatch(
        progress, place, path, collective_timeout_s=timeout_s, look_every_s=BEAT_S, group=group, since_ns=time.time_ns()
    )


def fresh_job(plan: SweepPlan, settings: Settings) -> TrainJob:
    """Return the trial's job with its own copy of the workload, as in a new process."""
    from ray import cloudpickle

    job = plan.job(settings, started_at=steady_time())
    # sent by the driver of this sweep, so trusted
    return job.changed(workload=cloudpickle.loads(job.workload))


@contextlib.contextmanager
def _process_group(place: RankContext, rendezvous: Rendezvous | None) -> Iterator[None]:
    if rendezvous is None:
        yield
        return
    if rendezvous.is_one_node and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo may otherwise pick an unreachable address
    flight_recorder.switch_on()
    timeout = timedelta(seconds=rendezvous.timeout_s)
    store = open_store(rendezvous.place, timeout=timeout)
    dist.init_process_group(
        rendezvous.backend,
        store=dist.PrefixStore(rendezvous.name, store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


GRACE_S = 15.0  # seconds to wait, after a rank's error, for the reports of the others


class LostWorkersError(RunFailedError):
    """The workers of a trial cannot be reused for another one."""


def local_materials(plan: SweepPlan) -> SweepPlan:
    """Return the plan with the data itself in place of object references."""
    import ray

    materials = {
        key: dataclasses.replace(m, sources={name: ray.get(ref) for name, ref in m.sources.items()})
        for key, m in plan.materials.items()
    }
    return dataclasses.replace(plan, materials=materials)


class TrialWorker:
    """Actor that runs one rank above 0 of successive trials."""

    def __init__(self, plan: SweepPlan) -> None:
        self.plan = local_materials(plan)

    def node(self) -> str:
        """Return the address of the actor's node, once the actor is running."""
        import ray

        return ray.util.get_node_ip_address()

    def train(
        self, settings: Settings, place: RankContext, rendezvous: Rendezvous, start_from: str | None
    ) -> ScaleRayError | None:
        """Train to the end of the trial; return the error, if any."""

        def make_checkpointing(job: TrainJob, place: RankContext) -> AskingCheckpointing:
            return AskingCheckpointing(
                job, place, start_from=start_from, emit=lambda message: None, ask=lambda step: Decision()
            )

        def die(what: str) -> None:
            print(f"rank {place.rank} hangs: {what}", file=sys.stderr, flush=True)
            os._exit(HANG_EXIT_CODE)  # the training thread cannot be ended otherwise

        place = dataclasses.replace(place, device=_device(self.plan.base))
        try:
            with no_exit("the workload's code"):
                train_rank(
                    self.plan,
                    settings,
                    place,
                    rendezvous,
                    emit=lambda message: None,
                    make_checkpointing=make_checkpointing,
                    on_hang=die,
                )
        except Exception as exc:
            return as_own_error(exc, place.rank)
        return None


class TrialGroup:
    """Rank 0 and the actors of the other ranks, for successive trials. Created inside the trial's placement group."""

    def __init__(self, plan: SweepPlan, workers: list[Any], nodes: list[str], path: str) -> None:
        self.plan, self._path = plan, path
        self._meets: Rendezvous | None = None
        order = sorted(range(1, len(nodes)), key=lambda n: (nodes[n] != nodes[0], nodes[n]))
        self._workers = [workers[n - 1] for n in order]
        self._nodes = [nodes[0], *(nodes[n] for n in order)]
        self._answers: list[Any] = []
        self._num_trials = 0
        self._owned = OwnedStore(nodes[0]) if workers else None
        self._store = open_store(self._owned.place) if self._owned else None  # the server, for all trials
        self.training: StepwiseTraining | None = None

    @classmethod
    def start(cls, plan: SweepPlan, shared: Any, path: str) -> TrialGroup:
        """Start the actors of the other ranks and wait for them. shared: reference to the plan, for the actors. path:
        folder for the stacks of stalled ranks."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = worker_resources(plan.base)
        group = ray.util.get_current_placement_group()
        workers = [
            ray.remote(TrialWorker)
            .options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank, placement_group_capture_child_tasks=True
                ),
            )
            .remote(shared)
            for rank in range(1, plan.workers)
        ]
        nodes = ray.get([worker.node.remote() for worker in workers], timeout=plan.base.scale.launch_timeout_s)
        return cls(local_materials(plan), workers, [ray.util.get_node_ip_address(), *nodes], path)

    def begin(self, settings: Settings, *, pauses: bool, start_from: str | None) -> StepwiseTraining:
        """Begin a new trial, which trains at the first `advance`."""
        self._num_trials += 1
        self._answers = []
        rendezvous = self._meets = self._rendezvous()
        places = self._places()

        def train(emit: Callable[[WorkerMessage], None], make_checkpointing: Any) -> WorkerSummary:
            self._answers = [
                worker.train.remote(settings, place, rendezvous, start_from)
                for worker, place in zip(self._workers, places[1:], strict=True)
            ]
            place = dataclasses.replace(places[0], device=_device(self.plan.base))
            return train_rank(
                self.plan,
                settings,
                place,
                rendezvous,
                emit=emit,
                make_checkpointing=make_checkpointing,
                on_hang=self._give_up,
            )

        self.training = StepwiseTraining(train, pauses=pauses, start_from=start_from)
        return self.training

    def advance(self) -> Paused | Ended:
        """Train up to the next evaluation or the end. If a rank fails, the result has the error that caused it."""
        assert self.training is not None
        happened = self.training.advance()
        if isinstance(happened, Ended):
            return dataclasses.replace(happened, error=self._cause(happened.error))
        return happened

    def stop(self) -> bool:
        """End a paused trial; return False if its workers are lost with it."""
        if self.training is None:
            return True
        if not self.training.stop():
            return False
        try:
            self._cause(self.training.ended.error if self.training.ended else None)
        except LostWorkersError:
            return False
        return True

    def close(self) -> None:
        """End the actors."""
        import ray

        for worker in self._workers:
            with contextlib.suppress(Exception):  # it may already be gone
                ray.kill(worker)

    def _cause(self, error: BaseException | None) -> BaseException | None:
        """Return the error that caused the others, once all ranks are done.

        Raises LostWorkersError if a rank does not return.
        """
        import ray

        answers: list[ScaleRayError | None] = []
        lost: list[str] = []
        for rank, answer in enumerate(self._answers, start=1):
            try:
                answers.append(ray.get(answer, timeout=GRACE_S))
            except ray.exceptions.GetTimeoutError:
                lost.append(f"rank {rank} did not finish with the other ranks")
            except ray.exceptions.RayError as exc:
                lost.append(f"rank {rank} was lost: {first_line(exc)}")
        self._answers = []
        own = as_own_error(error, 0) if error is not None else None
        known = [e for e in (own, *answers) if e is not None]
        telling = [e for e in known if not isinstance(e, PeerLostError)]
        if lost:
            raise self._with_stalls(LostWorkersError(str(telling[0]) if telling else lost[0]))
        return telling[0] if telling else self._with_stalls(error)

    def _with_stalls(self, error: Any) -> Any:
        """Return the error with the stacks that stalled ranks wrote, if any."""
        if self._meets is None or error is None:
            return error
        return with_explanation(error, *self._meets.watched, len(self._nodes))

    def _give_up(self, what: str) -> None:
        if self.training is not None:
            self.training.give_up(LostWorkersError(f"rank 0 hangs: {what}"))

    def _rendezvous(self) -> Rendezvous | None:
        if self._owned is None:
            return None
        scale = self.plan.base.scale
        return Rendezvous(
            self._owned.place,
            f"trial {self._num_trials}",
            self.plan.base.scale.backend,
            scale.collective_timeout_s,
            is_one_node=len(set(self._nodes)) == 1,
            watched=(self._path, f"trial-{secrets.token_hex(4)}"),
        )

    def _places(self) -> list[RankContext]:
        nodes = self._nodes
        return [
            RankContext(
                rank=rank,
                world_size=len(nodes),
                local_rank=nodes[:rank].count(node),
                local_world_size=nodes.count(node),
                node=node,
            )
            for rank, node in enumerate(nodes)
        ]


def as_own_error(exc: BaseException, rank: int) -> ScaleRayError:
    """Return the error itself if it is a ScaleRayError, or else a ScaleRayError with its last line."""
    if isinstance(exc, ScaleRayError):
        return exc
    last = traceback.format_exception_only(exc)[-1].strip()
    return RunFailedError(f"rank {rank} failed: {last}")


def _device(config: RunConfig) -> torch.device:
    # Ray shows an actor only its assigned GPU
    return torch.device("cuda", 0) if config.scale.gpus else torch.device("cpu")
